"""Every object, offered to a real API server (a dry run on its side)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml

from tandem.operator.control.likeness import covers

from ..api.conftest import ApiServer, assets_folder, lacking, started
from .endpoints import ROUTER_NAMESPACE, VARIANTS, rendered


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """One of its own, with KEDA's definitions and the namespaces that endpoints live in.

    Other tests go without KEDA, and taking definitions away again is a wait with no bound.
    """
    definitions = assets_folder() / "keda-crds.yaml"
    if not definitions.exists():
        lacking("needs keda-crds.yaml beside kube-apiserver (KUBEBUILDER_ASSETS)")
    with started(assets_folder(), tmp_path_factory.mktemp("kube-with-keda")) as server:
        done = server.kubectl("apply", "--server-side", "-f", str(definitions))
        assert done.returncode == 0, done.stderr
        server.wait_until_served("scaledobjects.keda.sh")
        for namespace in ("team-a", ROUTER_NAMESPACE):
            done = server.kubectl("create", "namespace", namespace)
            assert done.returncode == 0, done.stderr
        yield server


@pytest.mark.timeout(300)  # the first one waits for the server
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_api_server_takes_every_object_and_gives_back_all_of_it(server: ApiServer, variant: str) -> None:
    """So that a new operator sees in what is there that nothing is to be done."""
    objects = rendered(*VARIANTS[variant]).objects
    together = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
    words = ("create", "--dry-run=server", "--validate=strict", "-o", "yaml", "-f", "-")
    done = server.kubectl(*words, stdin=together)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr.lower(), done.stderr
    made = list(yaml.load_all(done.stdout, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    assert len(made) == len(objects)
    for desired, live in zip(objects, made, strict=True):
        assert covers(live, desired), (desired, live)
