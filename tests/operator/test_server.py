"""Every object, offered to a real API server (a dry run on its side)."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..api.conftest import ApiServer, _assets
from .endpoints import ROUTER_NAMESPACE, VARIANTS, rendered


@pytest.fixture(scope="session")
def server(bare_api_server: ApiServer) -> ApiServer:
    """With KEDA's definitions and the namespaces that endpoints live in."""
    definitions = Path(_assets()) / "keda-crds.yaml"
    if not definitions.exists():
        pytest.skip("needs keda-crds.yaml beside kube-apiserver (KUBEBUILDER_ASSETS)")
    done = bare_api_server.kubectl("apply", "--server-side", "-f", str(definitions))
    assert done.returncode == 0, done.stderr
    bare_api_server.wait_until_served("scaledobjects.keda.sh")
    for namespace in ("team-a", ROUTER_NAMESPACE):  # other tests may have made one
        made = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
        done = bare_api_server.kubectl("apply", "--server-side", "-f", "-", stdin=made)
        assert done.returncode == 0, done.stderr
    return bare_api_server


@pytest.mark.timeout(300)  # the first one waits for the server
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_api_server_takes_every_object(server: ApiServer, variant: str) -> None:
    made = rendered(*VARIANTS[variant])
    together = {"apiVersion": "v1", "kind": "List", "items": list(made.objects)}
    done = server.kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", stdin=together)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(made.objects)
    assert "warning" not in done.stderr.lower(), done.stderr
