"""What a router may do in the API: as a real API server judges it."""

from __future__ import annotations

import pytest

from ..api.conftest import ApiServer, new_namespace
from .endpoints import ROUTER_NAMESPACE, named, rendered

ACCOUNT = f"system:serviceaccount:{ROUTER_NAMESPACE}:pd-s3-team-a-router"


@pytest.fixture(scope="module")
def namespace(bare_api_server: ApiServer) -> str:
    """One in which the router's rights are given."""
    name = new_namespace(bare_api_server)
    made = rendered("dpd-s3")
    for kind in ("Role", "RoleBinding"):
        found = named(made, kind, "pd-s3-team-a-router")
        here = {**found, "metadata": {**found["metadata"], "namespace": name}}
        done = bare_api_server.kubectl("apply", "--server-side", "-f", "-", stdin=here)
        assert done.returncode == 0, done.stderr
    return name


@pytest.mark.parametrize(
    ("may", "verb", "what"),
    [
        *((True, verb, "pods") for verb in ("get", "list", "watch")),
        *((False, verb, "pods") for verb in ("create", "update", "patch", "delete", "deletecollection")),
        *((False, "get", what) for what in ("pods/log", "secrets", "configmaps", "deployments.apps")),
        (False, "create", "pods/exec"),
    ],
)
def test_a_router_sees_the_pods_of_its_endpoints_namespace_and_nothing_else(
    bare_api_server: ApiServer, namespace: str, may: bool, verb: str, what: str
) -> None:
    def judged(where: str) -> bool:
        what_, _, part = what.partition("/")
        words = ["auth", "can-i", verb, what_, f"--as={ACCOUNT}", "-n", where]
        done = bare_api_server.kubectl(*words, *([f"--subresource={part}"] if part else []))
        assert done.stdout.strip() in ("yes", "no"), done.stderr
        return done.stdout.strip() == "yes"

    assert judged(namespace) is may
    assert not judged("default")
