"""Fields without meaning on one machine: each is told once, none is dropped in silence."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tandem.local.fields import without_local_meaning

from ..api.manifests import COLOCATED, HUGGING_FACE, NVME, S3


@pytest.mark.parametrize(
    ("text", "listed"),
    [
        (
            S3,
            [
                "spec.endpointName",
                "spec.instanceType",
                "spec.modelSourceConfig.modelLocation",
                "spec.modelSourceConfig.s3Storage",
                "spec.loadBalancer",
                "spec.metrics",
                "spec.pdSpec.prefillSpec.nodeSelector",
                "spec.pdSpec.prefillSpec.resources",
                "spec.pdSpec.decodingSpec.resources",
                "spec.pdSpec.topologySpec",
            ],
        ),
        (
            NVME,
            [
                "spec.instanceType",
                "spec.loadBalancer",
                "spec.pdSpec.prefillSpec.resources",
                "spec.pdSpec.decodingSpec.resources",
            ],
        ),
        (
            HUGGING_FACE,
            [
                "spec.instanceType",
                "spec.modelSourceConfig.prefetchEnabled",
                "spec.modelSourceConfig.huggingFaceModel.tokenSecretRef",
                "spec.loadBalancer",
                "spec.pdSpec.prefillSpec.resources",
                "spec.pdSpec.decodingSpec.resources",
            ],
        ),
        (
            COLOCATED,
            [
                "spec.instanceTypes",
                "spec.replicas",
                "spec.modelSourceConfig.modelLocation",
                "spec.modelSourceConfig.fsxStorage",
                "spec.intelligentRoutingSpec.autoScalingSpec",
                "spec.autoScalingSpec",
                "spec.metrics",
                "spec.loadBalancer",
            ],
        ),
    ],
)
def test_each_part_is_listed_once_by_its_highest_path_in_file_order(text: str, listed: list[str]) -> None:
    assert without_local_meaning(yaml.safe_load(text)) == listed


def test_of_the_volumes_only_the_models_has_meaning() -> None:
    raw = yaml.safe_load(NVME)
    raw["spec"]["kubernetes"]["volumes"].insert(0, {"name": "shm", "emptyDir": {"medium": "Memory"}})
    assert "spec.kubernetes.volumes[0]" in without_local_meaning(raw)
    assert "spec.kubernetes.volumes[1]" not in without_local_meaning(raw)
    raw["spec"]["modelSourceConfig"]["modelSourceType"] = "huggingface"
    assert "spec.kubernetes" in without_local_meaning(raw)


def test_empty_parts_count_as_not_given() -> None:
    raw = yaml.safe_load(NVME)
    before = without_local_meaning(raw)
    raw["spec"] |= {
        "tags": [],
        "nodeAffinity": {},
        "dataCapture": None,
        "kubernetes": raw["spec"]["kubernetes"],
    }
    raw["spec"]["kubernetes"]["initContainers"] = []
    assert without_local_meaning(raw) == before


def test_annotations_about_pods_and_the_operator_are_listed() -> None:
    raw = yaml.safe_load(NVME)
    told = ["tandem.dev/prefill-env", "tandem.dev/paused"]
    before = without_local_meaning(raw)
    others = ("example.com/owner", "tandem.dev/connector", "tandem.dev/v1-fields")
    raw["metadata"]["annotations"] = dict.fromkeys((*others, *told), "x")
    assert without_local_meaning(raw) == [*(f"metadata.annotations[{key}]" for key in told), *before]


# What `tandem up` acts on: test_plan.py shows for each that it does. And what names the object.
ACTED_ON = {
    "apiVersion",
    "kind",
    "metadata",
    "spec.modelName",
    "spec.invocationEndpoint",
    "spec.modelSourceConfig.modelSourceType",
    "spec.modelSourceConfig.huggingFaceModel.modelId",
    "spec.kubernetes.volumes[1]",
    "spec.intelligentRoutingSpec.enabled",
    "spec.intelligentRoutingSpec.routingStrategy",
    "spec.kvCacheSpec.enableL1Cache",
    "spec.kvCacheSpec.enableL2Cache",
    "spec.kvCacheSpec.l2CacheSpec",
    "spec.pdSpec.routingThreshold",
    "spec.pdSpec.prefillSpec.replicas",
    "spec.pdSpec.prefillSpec.args",
    "spec.pdSpec.decodingSpec.replicas",
    "spec.pdSpec.decodingSpec.args",
    "spec.worker.args",
    "spec.worker.command",
    "spec.worker.environmentVariables",
    "spec.worker.modelVolumeMount",
    "spec.worker.requestLimits",
}
# Required, and about containers only.
EXPECTED = {"spec.worker.image", "spec.worker.resources", "spec.worker.modelInvocationPort"}
VALUES = st.recursive(
    st.integers() | st.booleans() | st.text("ab", max_size=3),
    lambda below: st.lists(below, max_size=2) | st.dictionaries(st.sampled_from("pqr"), below, max_size=2),
    max_leaves=4,
)
NAMES = ("args", "replicas", "resources", "probes", "enabled", "volumes", "initContainers", "autoScalingSpec")


@st.composite
def manifests(draw: st.DrawFn) -> dict[str, Any]:
    """A manifest with more fields wherever there is an object; their values have no type to keep to."""
    raw = yaml.safe_load(NVME)
    raw["spec"]["kubernetes"]["volumes"].insert(0, {"name": "other", "secret": {"secretName": "s"}})
    spec = raw["spec"]
    spec["intelligentRoutingSpec"] = {}
    for place in (spec, spec["pdSpec"], spec["pdSpec"]["prefillSpec"], spec["worker"], spec["kubernetes"]):
        for name in draw(st.lists(st.sampled_from(NAMES), max_size=3, unique=True)):
            place.setdefault(name, draw(VALUES))
    return dict(raw)


def leaves(value: Any, path: str = "") -> list[str]:
    if isinstance(value, dict):
        return [p for k, v in value.items() for p in leaves(v, f"{path}.{k}" if path else str(k))]
    if isinstance(value, list):
        return [p for i, v in enumerate(value) for p in leaves(v, f"{path}[{i}]")]
    return [] if value is None else [path]


def is_in(path: str, part: str) -> bool:
    return path == part or path.startswith((f"{part}.", f"{part}["))


@given(manifests())
def test_every_value_is_acted_on_or_listed_and_never_both(raw: dict[str, Any]) -> None:
    listed = without_local_meaning(raw)
    for leaf in leaves(raw):
        told = [p for p in listed if is_in(leaf, p)]
        silent = [p for p in ACTED_ON | EXPECTED if is_in(leaf, p)]
        assert len(told) + len(silent) == 1, leaf
    assert len(listed) == len(set(listed))
