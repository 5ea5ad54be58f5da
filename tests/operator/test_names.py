"""Names, labels, containers and ports as HyperPod has them, so that its documented commands work."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.api import Role
from tandem.operator.names import Names, short

from .endpoints import ROLE_LABEL, ROUTER_NAMESPACE, VARIANTS, deployment, named, of_kind, pod, rendered


def test_a_disaggregated_endpoint_has_the_deployments_of_the_guide() -> None:
    made = rendered("dpd-s3")
    found = {(d["metadata"]["namespace"], d["metadata"]["name"]) for d in of_kind(made, "Deployment")}
    assert found == {
        ("team-a", "prefill-pd-s3"),
        ("team-a", "decode-pd-s3"),
        (ROUTER_NAMESPACE, "pd-s3-team-a-router"),
    }


@pytest.mark.parametrize("role", Role)
def test_model_pods_have_the_guides_containers_and_role_label(role: Role) -> None:
    made = rendered("dpd-s3")
    template = deployment(made, role)["spec"]["template"]
    assert [c["name"] for c in template["spec"]["containers"]] == [
        f"{role}-pd-s3",
        "sidecar-reverse-proxy",
        "otel-collector",
    ]
    assert template["metadata"]["labels"][ROLE_LABEL] == role.value
    assert template["metadata"]["labels"]["app"] == "pd-s3"
    assert template["metadata"]["labels"]["deploying-service"] == "hyperpod-inference"


def test_the_router_pod_has_the_guides_containers() -> None:
    assert [c["name"] for c in pod(rendered("dpd-s3"), "router")["containers"]] == [
        "router-container",
        "otel-collector",
    ]


def test_the_routing_service_is_where_the_guides_commands_send_requests() -> None:
    service = named(rendered("dpd-s3"), "Service", "pd-s3-team-a-routing-service")
    assert service["metadata"]["namespace"] == ROUTER_NAMESPACE
    assert [port["port"] for port in service["spec"]["ports"]] == [443]


def test_requests_reach_pods_at_8081_and_the_engine_at_its_own_port() -> None:
    engine, proxy, _ = pod(rendered("dpd-s3"), Role.DECODE)["containers"]
    assert {"name": "http", "containerPort": 8000} in engine["ports"]
    assert [port["containerPort"] for port in proxy["ports"]] == [8081, 9113]


def test_a_colocated_endpoint_has_the_guides_names() -> None:
    made = rendered("colocated-routing")
    workers = named(made, "Deployment", "chat-8b")
    assert workers["metadata"]["namespace"] == "team-a"
    assert [c["name"] for c in workers["spec"]["template"]["spec"]["containers"]] == [
        "chat-8b",
        "sidecar-reverse-proxy",
        "otel-collector",
    ]
    assert workers["spec"]["template"]["metadata"]["labels"]["app"] == "chat-8b"
    assert ROLE_LABEL not in workers["spec"]["template"]["metadata"]["labels"]
    assert named(made, "Ingress", "alb-chat-8b-team-a")["metadata"]["namespace"] == ROUTER_NAMESPACE


def test_without_a_router_the_load_balancer_is_in_the_endpoints_namespace() -> None:
    made = rendered(*VARIANTS["without a router"])
    assert named(made, "Ingress", "alb-chat-8b")["metadata"]["namespace"] == "team-a"
    assert {o["metadata"].get("namespace", "team-a") for o in made.objects} == {"team-a"}


names = st.from_regex(r"[a-z0-9]([-a-z0-9.]{0,80}[a-z0-9])?", fullmatch=True)


@given(names)
def test_a_name_is_kept_where_kubernetes_takes_it_and_else_made_one(name: str) -> None:
    made = short(name)
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", made)
    assert len(made) <= 63
    if re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) and len(name) <= 63:
        assert made == name


@pytest.mark.parametrize("name", ["llama-3.3", "70b", "a.b"])
def test_labels_have_the_name_itself(name: str) -> None:
    """`-l app=NAME` finds the pods also where the name is none for a Service."""
    assert Names(name, "ns", "system").pool_selector(None)["app"] == name


@given(st.lists(names, min_size=2, max_size=2, unique=True))
def test_different_names_stay_different(pair: list[str]) -> None:
    assert short(pair[0]) != short(pair[1])


def test_pods_of_one_pool_are_never_taken_for_those_of_another() -> None:
    """Neither when an endpoint changes between the two forms."""
    of = Names("a", "b", "system")
    selectors = [of.pool_selector(role) for role in (*Role, None)] + [of.router_selector()]
    for i, one in enumerate(selectors):
        for j, other in enumerate(selectors):
            assert i == j or not one.items() <= other.items()


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_two_objects_have_the_same_name(variant: str) -> None:
    made = rendered(*VARIANTS[variant])
    keys = [(o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]) for o in made.objects]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_object_says_whose_it_is(variant: str) -> None:
    """So that two endpoints whose names meet in the system namespace can be told apart."""
    name, changes = VARIANTS[variant]
    for made in rendered(name, changes).objects:
        labels = made["metadata"]["labels"]
        assert labels["app.kubernetes.io/managed-by"] == "tandem"
        assert labels["tandem.dev/endpoint-namespace"] == "team-a"
        assert {"tandem.dev/endpoint", "tandem.dev/component"} <= labels.keys()


@pytest.mark.parametrize("variant", VARIANTS)
def test_endpoints_of_one_name_in_two_namespaces_share_no_object(variant: str) -> None:
    name, changes = VARIANTS[variant]
    one, other = (
        {
            (o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"])
            for o in rendered(name, changes | {"metadata.namespace": namespace}).objects
        }
        for namespace in ("team-a", "team-b")
    )
    assert one.isdisjoint(other)
