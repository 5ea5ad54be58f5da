"""Which nodes model pods run on: instance types, zone, placement group, and what the resource says itself."""

from __future__ import annotations

from itertools import product
from typing import Any

from tandem.api.models import TopologySpec
from tandem.operator import names
from tandem.operator.plan import Plan
from tandem.operator.pools import Pool
from tandem.operator.wishes import instance_types, section

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def affinity(plan: Plan, pool: Pool) -> dict[str, Any]:
    """Kubernetes' Affinity; empty where nothing is asked for. What the resource and the role's annotation
    say holds besides what instance types and topologySpec ask for."""
    own = section(pool.extensions.affinity)
    nodes = _node_affinity(plan, section(own.get("nodeAffinity")))
    together = _together(plan)
    made: dict[str, Any] = {}
    if nodes:
        made["nodeAffinity"] = nodes
    pods = _joined(section(own.get("podAffinity")), {_REQUIRED: together} if together else {})
    if pods:
        made["podAffinity"] = pods
    apart = section(own.get("podAntiAffinity"))
    return made | ({"podAntiAffinity": apart} if apart else {})


def tolerations(plan: Plan, pool: Pool) -> list[dict[str, Any]]:
    """GPU nodes are kept for pods that need GPUs."""
    gpu = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    return [*([gpu] if pool.gpus else []), *pool.extensions.tolerations]


def _topology(plan: Plan) -> TopologySpec | None:
    pd = plan.spec.pd_spec
    return None if pd is None else pd.topology_spec or TopologySpec()


def _together(plan: Plan) -> list[dict[str, Any]]:
    """sameAZ: all model pods of the endpoint, of both roles, in one zone. The first one chooses it."""
    topology = _topology(plan)
    if topology is None or not topology.same_az:
        return []
    selector = {"matchLabels": plan.names.pods_of_endpoint()}
    return [{"labelSelector": selector, "topologyKey": names.ZONE_LABEL}]


def _node_affinity(plan: Plan, own: dict[str, Any]) -> dict[str, Any]:
    types, topology = instance_types(plan.spec), _topology(plan)
    wanted = []
    if types:
        wanted.append(_in(names.INSTANCE_TYPE_LABEL, types))
    if topology is not None and topology.availability_zone:
        wanted.append(_in(names.ZONE_LABEL, (topology.availability_zone,)))
    if topology is not None and topology.placement_group:
        wanted.append(_in(names.PLACEMENT_GROUP_LABEL, (topology.placement_group,)))
    asked = section(plan.spec.node_affinity)
    terms = _all_of(
        [{"matchExpressions": wanted}] if wanted else [],
        section(asked.get(_REQUIRED)).get("nodeSelectorTerms", []),
        section(own.get(_REQUIRED)).get("nodeSelectorTerms", []),
    )
    # The first type weighs most; a list of one is no preference.
    by_order = [
        {
            "weight": max(1, 100 - 100 * i // len(types)),
            "preference": {"matchExpressions": [_in(names.INSTANCE_TYPE_LABEL, (name,))]},
        }
        for i, name in enumerate(types)
        if len(types) > 1
    ]
    preferred = [*by_order, *asked.get(_PREFERRED, []), *own.get(_PREFERRED, [])]
    made: dict[str, Any] = {_REQUIRED: {"nodeSelectorTerms": terms}} if terms else {}
    return made | ({_PREFERRED: preferred} if preferred else {})


def _in(key: str, values: tuple[str, ...]) -> dict[str, Any]:
    return {"key": key, "operator": "In", "values": list(values)}


def _all_of(*lists: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Node selector terms that hold where one of each list holds: a list's own terms are alternatives."""
    merged: list[dict[str, Any]] = []
    for chosen in product(*(terms for terms in lists if terms)):
        term: dict[str, Any] = {}
        for part in chosen:
            for key, expressions in part.items():
                term[key] = [*term.get(key, []), *expressions]
        if term:
            merged.append(term)
    return merged


def _joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Lists of both, key by key."""
    return {key: [*one.get(key, []), *other.get(key, [])] for key in {**one, **other}}
