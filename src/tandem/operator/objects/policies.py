"""NetworkPolicies: KV events, hand-offs and notifications carry users' text, and engines trust who calls."""

from __future__ import annotations

from tandem.api import Role
from tandem.engine.kv_events import EVENTS_PORT, REPLAY_PORT
from tandem.operator import names
from tandem.operator.objects.common import Object, head
from tandem.operator.plan import Plan
from tandem.operator.pools import Pool

_OPEN_PORTS = (names.PROXY_METRICS_PORT, names.COLLECTOR_METRICS_PORT)
"""Figures only, for whoever scrapes them."""


def pool_policy(plan: Plan, pool: Pool) -> Object:
    """Who reaches a model pod: the router (without one, clients) the proxy and the KV events, pods of the
    same endpoint everything, as UCX listens on ports that it is given by chance, and all the world the
    metrics. EFA's own traffic is no IP and not filtered; security groups are for that."""
    rules: list[Object] = []
    requests = [_port(names.PROXY_PORT)]
    if plan.routed:
        ports = requests + (_events(pool.flags.dp) if plan.kv_events else [])
        rules.append({"from": [_router_pods(plan)], "ports": ports})
    else:
        rules.append({"ports": requests})
    if plan.disaggregated:
        pods = {"podSelector": {"matchLabels": plan.names.pods_of_endpoint()}}
        rules.append({"from": [pods]})
    rules.append({"ports": [_port(port) for port in _OPEN_PORTS]})
    made = head(plan, "networking.k8s.io/v1", "NetworkPolicy", plan.names.pool(pool.role), pool.component)
    selector = {"matchLabels": plan.names.pool_selector(pool.role)}
    return made | {"spec": {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": rules}}


def router_policy(plan: Plan) -> Object:
    """Who reaches the router: clients its public port, prefillers the notifications."""
    rules: list[Object] = [
        {"ports": [_port(names.ROUTER_PORT)]},
        {"ports": [_port(names.COLLECTOR_METRICS_PORT)]},
    ]
    if plan.lmcache_pd:
        prefillers = {
            "namespaceSelector": _namespace(plan.names.namespace),
            "podSelector": {"matchLabels": plan.names.pool_selector(Role.PREFILL)},
        }
        rules.append({"from": [prefillers], "ports": [_port(names.NOTIFY_PORT)]})
    made = head(plan, "networking.k8s.io/v1", "NetworkPolicy", plan.names.router, "router", system=True)
    selector = {"matchLabels": plan.names.router_selector()}
    return made | {"spec": {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": rules}}


def _router_pods(plan: Plan) -> Object:
    return {
        "namespaceSelector": _namespace(plan.names.system_namespace),
        "podSelector": {"matchLabels": plan.names.router_selector()},
    }


def _namespace(name: str) -> Object:
    return {"matchLabels": {"kubernetes.io/metadata.name": name}}


def _events(ranks: int) -> list[Object]:
    return [_port(first, last=first + ranks - 1) for first in (EVENTS_PORT, REPLAY_PORT)]


def _port(number: int, last: int | None = None) -> Object:
    made: Object = {"protocol": "TCP", "port": number}
    return made | ({"endPort": last} if last is not None and last > number else {})
