"""The load balancer in front."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.operator import Rendering

from .endpoints import VARIANTS, of_kind, planned, rendered

PREFIX = "alb.ingress.kubernetes.io/"


def ingress(made: Rendering) -> dict[str, Any]:
    (found,) = of_kind(made, "Ingress")
    return found


def annotation(made: Rendering, name: str) -> str:
    return str(ingress(made)["metadata"]["annotations"][PREFIX + name])


def backend(made: Rendering) -> tuple[str, str]:
    (path,) = ingress(made)["spec"]["rules"][0]["http"]["paths"]
    return path["path"], path["backend"]["service"]["name"]


def test_it_leads_to_the_router_at_the_invocation_endpoint() -> None:
    assert backend(rendered("dpd-s3")) == ("/v1/chat/completions", "pd-s3-team-a-routing-service")
    assert backend(rendered("dpd-s3", {"spec.invocationEndpoint": ...}))[0] == "/invocations"
    assert backend(rendered("dpd-s3", {"spec.invocationEndpoint": "/a/b/"}))[0] == "/a/b"


def test_without_a_router_it_leads_to_the_pods_and_checks_their_health() -> None:
    made = rendered(*VARIANTS["without a router"])
    assert backend(made) == ("/v1/chat/completions", "chat-8b")
    assert annotation(made, "healthcheck-path") == "/health"


def test_a_router_is_asked_whether_it_can_serve() -> None:
    assert annotation(rendered("dpd-s3"), "healthcheck-path") == "/ready"


@pytest.mark.parametrize("given", [{}, {"idleTimeoutSeconds": 60}])
def test_silence_that_is_worth_waiting_for_is_not_cut_off(given: dict[str, Any]) -> None:
    """60 is what the API server fills in."""
    made = rendered("dpd-s3", {"spec.loadBalancer": given})
    seconds = int(annotation(made, "load-balancer-attributes").rpartition("=")[2])
    assert planned("dpd-s3").times.longest_silence < seconds <= 4000


def test_a_time_out_that_is_asked_for_counts() -> None:
    made = rendered("dpd-s3", {"spec.loadBalancer": {"idleTimeoutSeconds": 90}})
    assert annotation(made, "load-balancer-attributes") == "idle_timeout.timeout_seconds=90"


def test_the_algorithm_is_the_resources() -> None:
    made = rendered("dpd-s3", {"spec.loadBalancer": {"routingAlgorithm": "round_robin"}})
    assert "load_balancing.algorithm.type=round_robin" in annotation(made, "target-group-attributes")


def test_a_certificate_brings_https_and_its_host() -> None:
    made = rendered(*VARIANTS["a certificate"])
    assert annotation(made, "listen-ports") == '[{"HTTPS":443}]'
    assert annotation(made, "certificate-arn").startswith("arn:aws:acm:")
    assert ingress(made)["spec"]["rules"][0]["host"] == "llm.example.com"
    assert annotation(rendered("dpd-s3"), "listen-ports") == '[{"HTTP":80}]'
