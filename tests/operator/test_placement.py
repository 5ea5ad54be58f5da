"""Which nodes pods may run on, judged as the scheduler reads it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tandem.api import Role
from tandem.engine.validation import validate

from .endpoints import VARIANTS, changed, deployment, pod, rendered

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
TYPE, ZONE = "node.kubernetes.io/instance-type", "topology.kubernetes.io/zone"


def allows(of_pod: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a pod may run on a node with these labels."""
    selector = of_pod.get("nodeSelector", {})
    terms = of_pod.get("affinity", {}).get("nodeAffinity", {}).get(REQUIRED, {}).get("nodeSelectorTerms")
    return selector.items() <= labels.items() and (terms is None or any(_holds(t, labels) for t in terms))


def _holds(term: dict[str, Any], labels: dict[str, str]) -> bool:
    for expression in term["matchExpressions"]:
        key = expression["key"]
        match expression["operator"]:
            case "In":
                if labels.get(key) not in expression["values"]:
                    return False
            case "Exists":
                if key not in labels:
                    return False
            case other:
                raise AssertionError(other)
    return True


@pytest.mark.parametrize("role", Role)
def test_pods_run_on_the_instance_type_alone(role: Role) -> None:
    of_pod = pod(rendered("dpd-nvme"), role)
    assert allows(of_pod, {TYPE: "ml.p5.48xlarge"})
    assert not allows(of_pod, {TYPE: "ml.p5en.48xlarge"})
    assert not allows(of_pod, {})


def test_the_first_of_several_types_is_liked_best() -> None:
    affinity = pod(rendered("colocated-routing"), None)["affinity"]["nodeAffinity"]
    weights = {p["preference"]["matchExpressions"][0]["values"][0]: p["weight"] for p in affinity[PREFERRED]}
    assert weights["ml.g6e.12xlarge"] > weights["ml.g5.24xlarge"] >= 1
    of_pod = pod(rendered("colocated-routing"), None)
    assert allows(of_pod, {TYPE: "ml.g5.24xlarge"})
    assert not allows(of_pod, {TYPE: "ml.p5.48xlarge"})


def test_a_roles_node_selector_is_its_own() -> None:
    made = rendered("dpd-s3")
    assert pod(made, Role.PREFILL)["nodeSelector"] == {"pool": "prefill"}
    assert "nodeSelector" not in pod(made, Role.DECODE)


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("topology", [..., {}, {"sameAZ": True}])
def test_both_roles_are_in_one_zone_unless_told_otherwise(role: Role, topology: Any) -> None:
    made = rendered("dpd-s3", {"spec.pdSpec.topologySpec": topology})
    (term,) = pod(made, role)["affinity"]["podAffinity"][REQUIRED]
    assert term["topologyKey"] == ZONE
    for other in Role:  # pods of both roles are what it looks for, so the first one is free to choose
        labels = deployment(made, other)["spec"]["template"]["metadata"]["labels"]
        assert term["labelSelector"]["matchLabels"].items() <= labels.items()


def test_zones_may_differ_where_the_resource_says_so() -> None:
    made = rendered("dpd-s3", {"spec.pdSpec.topologySpec": {"sameAZ": False}})
    assert all("podAffinity" not in pod(made, role)["affinity"] for role in Role)


@pytest.mark.parametrize("role", Role)
def test_a_zone_and_a_placement_group_hold_for_both_roles(role: Role) -> None:
    of_pod = pod(rendered(*VARIANTS["a zone and a placement group"]), role)
    node = {TYPE: "ml.p5.48xlarge", ZONE: "us-east-2a", "tandem.dev/placement-group": "pg-1"}
    node |= of_pod.get("nodeSelector", {})
    assert allows(of_pod, node)
    assert not allows(of_pod, node | {ZONE: "us-east-2b"})
    assert not allows(of_pod, node | {"tandem.dev/placement-group": "pg-2"})


def test_a_node_affinity_of_its_own_keeps_its_alternatives() -> None:
    of_pod = pod(rendered(*VARIANTS["a node affinity of its own"]), Role.DECODE)
    assert allows(of_pod, {"disk": "nvme"})
    assert allows(of_pod, {"pool": "x"})
    assert not allows(of_pod, {"disk": "ssd"})


def test_a_roles_affinity_holds_besides() -> None:
    terms = '{"nodeSelectorTerms": [{"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}]}'
    own = f'{{"nodeAffinity": {{"{REQUIRED}": {terms}}}}}'
    made = rendered("dpd-nvme", {"metadata.annotations": {"tandem.dev/decode-affinity": own}})
    assert allows(pod(made, Role.DECODE), {TYPE: "ml.p5.48xlarge", "gpu": ""})
    assert not allows(pod(made, Role.DECODE), {TYPE: "ml.p5.48xlarge"})
    assert not allows(pod(made, Role.DECODE), {TYPE: "ml.g5.xlarge", "gpu": ""})
    assert allows(pod(made, Role.PREFILL), {TYPE: "ml.p5.48xlarge"})


def test_gpu_nodes_are_tolerated_by_pods_that_need_gpus() -> None:
    gpu = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert gpu in pod(rendered("dpd-s3"), Role.PREFILL)["tolerations"]
    assert "tolerations" not in pod(rendered("dpd-s3"), "router")


def _long(count: int) -> dict[str, Any]:
    term = {"matchExpressions": [{"key": "pool", "operator": "Exists"}]}
    return {REQUIRED: {"nodeSelectorTerms": [term] * count}}


@pytest.mark.parametrize(
    ("own", "types", "annotated", "mistakes"),
    [
        (40, 0, 40, []),
        (2000, 0, 0, []),
        (2000, 0, 2000, ["metadata.annotations[tandem.dev/decode-affinity].nodeAffinity"]),
        (2000, 50, 0, ["spec.nodeAffinity"]),
    ],
)
def test_lists_that_multiply_beyond_what_an_object_holds_are_refused(
    own: int, types: int, annotated: int, mistakes: list[str]
) -> None:
    """They would be multiplied in the operator, which all tenants share."""
    changes: dict[str, Any] = {"spec.instanceType": ..., "spec.nodeAffinity": _long(own)}
    if types:
        changes["spec.instanceTypes"] = [f"ml.p5.{i}xlarge" for i in range(types)]
    if annotated:
        affinity = json.dumps({"nodeAffinity": _long(annotated)})
        changes["metadata.annotations"] = {"tandem.dev/decode-affinity": affinity}
    assert [f.path for f in validate(changed("dpd-nvme", changes)).errors] == mistakes
