"""Who reaches which port, judged as a network plug-in reads the policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tandem.api import Role
from tandem.operator import Rendering

from .endpoints import ROUTER_NAMESPACE, VARIANTS, deployment, of_kind, rendered


@dataclass(frozen=True)
class Peer:
    namespace: str
    labels: dict[str, str]


STRANGER = Peer("team-b", {"app": "curious"})
STRANGER_AT_HOME = Peer("team-a", {"app": "curious"})


def pods_of(made: Rendering, component: Role | str | None) -> Peer:
    found = deployment(made, component)
    return Peer(found["metadata"]["namespace"], found["spec"]["template"]["metadata"]["labels"])


def reaches(made: Rendering, source: Peer, target: Peer, port: int) -> bool:
    """Whether a pod may connect to a port of another; a pod that no policy is for is open."""
    chosen = [
        p
        for p in of_kind(made, "NetworkPolicy")
        if p["metadata"]["namespace"] == target.namespace
        and _selects(p["spec"]["podSelector"], target.labels)
    ]
    assert chosen, "every pod has a policy"
    rules = [rule for policy in chosen for rule in policy["spec"]["ingress"]]
    return any(_from(rule, source, target.namespace) and _at(rule, port) for rule in rules)


def _selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    wanted: dict[str, str] = selector["matchLabels"]
    return wanted.items() <= labels.items()


def _from(rule: dict[str, Any], source: Peer, home: str) -> bool:
    def fits(peer: dict[str, Any]) -> bool:
        namespace = {"kubernetes.io/metadata.name": source.namespace}
        there = (
            _selects(peer["namespaceSelector"], namespace)
            if "namespaceSelector" in peer
            else source.namespace == home
        )
        return there and _selects(peer["podSelector"], source.labels)

    return "from" not in rule or any(fits(peer) for peer in rule["from"])


def _at(rule: dict[str, Any], port: int) -> bool:
    return "ports" not in rule or any(p["port"] <= port <= p.get("endPort", p["port"]) for p in rule["ports"])


@pytest.mark.parametrize("variant", ["dpd-s3", "dpd-nixl", "kvaware"])
@pytest.mark.parametrize("role", Role)
def test_what_carries_users_text_is_closed_to_strangers(variant: str, role: Role) -> None:
    made = rendered(*VARIANTS[variant])
    target = pods_of(made, role)
    for stranger in (STRANGER, STRANGER_AT_HOME):
        for port in (8000, 8081, 5557, 6557, 5600, 7300, 7307, 7400, 40_000):
            assert not reaches(made, stranger, target, port)


@pytest.mark.parametrize("role", Role)
def test_the_router_reaches_the_proxy_and_with_kvaware_the_events(role: Role) -> None:
    made = rendered(*VARIANTS["kvaware"])
    router, target = pods_of(made, "router"), pods_of(made, role)
    assert [p for p in (8000, 8081, 5557, 6557, 5600) if reaches(made, router, target, p)] == [
        8081,
        5557,
        6557,
    ]
    plain = rendered("dpd-nixl")
    assert not reaches(plain, pods_of(plain, "router"), pods_of(plain, role), 5557)


def test_events_of_every_rank_are_reached() -> None:
    name, changes = VARIANTS["kvaware"]
    made = rendered(name, {**changes, "spec.worker.args": ["--model", "/opt/ml/model", "-dp", "4"]})
    router, target = pods_of(made, "router"), pods_of(made, Role.DECODE)
    assert [p for p in range(5550, 5570) if reaches(made, router, target, p)] == [5557, 5558, 5559, 5560]


def test_a_router_of_the_same_name_elsewhere_is_a_stranger() -> None:
    made = rendered("dpd-s3")
    router = Peer("team-b", pods_of(made, "router").labels)
    assert not reaches(made, router, pods_of(made, Role.DECODE), 8081)


def test_the_roles_reach_each_other_for_the_hand_off() -> None:
    """On any port: UCX listens where the system lets it."""
    made = rendered("dpd-s3")
    prefill, decode = pods_of(made, Role.PREFILL), pods_of(made, Role.DECODE)
    for port in (5600, 7300, 7407, 40_000):
        assert reaches(made, prefill, decode, port)
        assert reaches(made, decode, prefill, port)


def test_pods_of_another_endpoint_are_strangers() -> None:
    made = rendered("dpd-s3")
    other = pods_of(rendered("dpd-nvme"), Role.PREFILL)
    assert not reaches(made, other, pods_of(made, Role.DECODE), 7300)


def test_notifications_come_from_prefillers_alone() -> None:
    made = rendered("dpd-s3")
    router = pods_of(made, "router")
    assert reaches(made, pods_of(made, Role.PREFILL), router, 7500)
    for other in (STRANGER, STRANGER_AT_HOME, pods_of(made, Role.DECODE)):
        assert not reaches(made, other, router, 7500)
        assert not reaches(made, other, router, 8001)
        assert reaches(made, other, router, 8000)


def test_metrics_are_open() -> None:
    made = rendered("dpd-s3")
    assert reaches(made, STRANGER, pods_of(made, Role.DECODE), 8889)
    assert reaches(made, STRANGER, pods_of(made, Role.DECODE), 9113)
    assert reaches(made, STRANGER, pods_of(made, "router"), 8889)


def test_without_a_router_clients_reach_the_proxy() -> None:
    made = rendered(*VARIANTS["without a router"])
    workers = pods_of(made, None)
    assert reaches(made, STRANGER, workers, 8081)
    assert not reaches(made, STRANGER, workers, 8000)


def test_policies_are_the_only_ones_in_the_router_namespace_for_its_pods() -> None:
    made = rendered("dpd-s3")
    there = [p for p in of_kind(made, "NetworkPolicy") if p["metadata"]["namespace"] == ROUTER_NAMESPACE]
    assert [p["metadata"]["name"] for p in there] == ["pd-s3-team-a-router"]
