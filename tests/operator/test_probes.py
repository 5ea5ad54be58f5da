"""How Kubernetes asks engines whether they are up."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.api import Role

from .endpoints import engine, planned, rendered

PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def patience(probe: dict[str, Any]) -> int:
    """Seconds until a probe that fails has an effect."""
    return int(probe["periodSeconds"] * probe["failureThreshold"])


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize(
    ("given", "path"), [({"healthCheckPath": "/up"}, "/up"), ({}, "/ping"), (..., "/ping")]
)
def test_engines_are_asked_at_the_health_check_path_at_their_own_port(
    role: Role, given: Any, path: str
) -> None:
    changes = {"spec.loadBalancer": given, "spec.worker.modelInvocationPort.containerPort": 8123}
    changes["spec.worker.args"] = ["--tensor-parallel-size", "8"]
    found = engine(rendered("dpd-s3", changes), role)
    assert [found[probe]["httpGet"] for probe in PROBES] == [{"path": path, "port": 8123}] * 3


@pytest.mark.parametrize("probe", PROBES)
def test_a_probe_of_the_resource_replaces_that_one_alone(probe: str) -> None:
    own = {"tcpSocket": {"port": 8000}, "periodSeconds": 3}
    before = engine(rendered("dpd-s3"), Role.DECODE)
    after = engine(rendered("dpd-s3", {"spec.worker.probes": {probe: own}}), Role.DECODE)
    assert {name: after[name] for name in PROBES} == {name: before[name] for name in PROBES} | {probe: own}


@pytest.mark.parametrize("seconds", [600, 7200])
def test_an_engine_may_load_as_long_as_its_deployment_may_take(seconds: int) -> None:
    found = engine(rendered("dpd-s3", {"spec.maxDeployTimeInSeconds": seconds}), Role.PREFILL)
    assert patience(found["startupProbe"]) == seconds


@pytest.mark.parametrize("length", ["4096", "131072"])
def test_an_engine_deep_in_its_longest_prefill_is_not_ended(length: str) -> None:
    changes = {"spec.worker.args": ["--tensor-parallel-size", "8", "--max-model-len", length]}
    found = engine(rendered("dpd-s3", changes), Role.PREFILL)
    assert patience(found["livenessProbe"]) > planned("dpd-s3", changes).times.longest_prefill
