"""The label by which engines pair: the same while their KV is the same, another when it is not."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.api import Role
from tandem.operator.kv_layout import FLAGS, kv_layout

from .endpoints import VARIANTS, deployment, manifest, planned, rendered

LABEL = "tandem.dev/kv-layout"
ARGS = "spec.worker.args"
PREFILL, DECODE = "spec.pdSpec.prefillSpec", "spec.pdSpec.decodingSpec"
IMAGE = "spec.worker.image"


def args(name: str, *more: str) -> list[str]:
    """A manifest's own, and more."""
    return [*manifest(name)["spec"]["worker"]["args"], *more]


def layout(name: str = "dpd-nixl", changes: dict[str, Any] | None = None) -> str:
    return kv_layout(planned(name, changes))


def more_args(*flags: str) -> tuple[str, dict[str, Any]]:
    return "dpd-nixl", {ARGS: args("dpd-nixl", *flags)}


ANOTHER = {
    "image": ("dpd-nixl", {IMAGE: "vllm/vllm-openai:v9.9.9"}),
    "image of a role": ("dpd-nixl", {"metadata.annotations": {"tandem.dev/decode-image": "x/y:1"}}),
    "model": more_args("--model", "other/model"),
    "commit": ("dpd-nixl", {"spec.modelSourceConfig.huggingFaceModel.commitSHA": "0" * 40}),
    "folder": ("dpd-s3", {"spec.modelSourceConfig.modelLocation": "another/folder"}),
    "bucket": ("dpd-s3", {"spec.modelSourceConfig.s3Storage.bucketName": "another-bucket"}),
    "volume": ("dpd-nvme", {"spec.kubernetes.volumes": [{"name": "model", "hostPath": {"path": "/other"}}]}),
    "dtype": more_args("--dtype", "float16"),
    "cache dtype": more_args("--kv-cache-dtype", "fp8"),
    "block size": more_args("--block-size", "64"),
    "ranks": more_args("-tp", "2"),
    "ranks of a role": ("dpd-nixl", {f"{PREFILL}.args": ["--tensor-parallel-size=2"]}),
    "stages": more_args("--pipeline_parallel_size", "2"),
    "quantization": more_args("-q", "fp8"),
    "adapter": more_args("--enable-lora", "--lora-modules", "sql=/adapters/sql"),
    "another switch": more_args("--disable-hybrid-kv-cache-manager"),
    "its opposite": more_args("--no-disable-hybrid-kv-cache-manager"),
    "a key of it": more_args("--hf-overrides.rope_theta", "base"),
    "served name": more_args("--served-model-name", "another"),
    "connector": ("dpd-s3", {"metadata.annotations": {"tandem.dev/connector": "nixl"}}),
    "transport": ("dpd-nixl", {"spec.instanceType": ..., "spec.instanceTypes": ["ml.g6e.48xlarge"]}),
    "variable": (
        "dpd-nixl",
        {
            "metadata.annotations": {
                "tandem.dev/decode-env": '[{"name":"VLLM_KV_CACHE_LAYOUT","value":"NHD"}]'
            }
        },
    ),
}
"""Changes after which KV of before cannot be read, or means something else."""


@pytest.mark.parametrize("change", ANOTHER)
def test_what_shapes_kv_makes_another_layout(change: str) -> None:
    name, changes = ANOTHER[change]
    assert layout(name, changes) != layout(name)


SAME: dict[str, tuple[str, dict[str, Any]]] = {
    "nothing": ("dpd-nixl", {}),
    "replicas": ("dpd-nixl", {f"{DECODE}.replicas": 7}),
    "threshold": ("dpd-nixl", {"spec.pdSpec.routingThreshold": 1}),
    "strategy": ("dpd-nixl", {"spec.intelligentRoutingSpec": {"routingStrategy": "kvaware"}}),
    "limits": ("dpd-nixl", {"spec.worker.requestLimits": {"maxConcurrentRequests": 7}}),
    "args of no matter": more_args("--max-num-seqs", "64", "--gpu-memory-utilization", "0.8"),
    "args of a role": ("dpd-nixl", {f"{PREFILL}.args": ["--max-num-batched-tokens", "16384"]}),
    "variable": (
        "dpd-nixl",
        {"metadata.annotations": {"tandem.dev/decode-env": '[{"name":"A","value":"b"}]'}},
    ),
    "prefetching": ("dpd-s3", {"spec.modelSourceConfig.prefetchEnabled": True}),
}
"""Changes after which pods of before and after may be used together."""


@pytest.mark.parametrize("change", SAME)
def test_what_does_not_shape_kv_makes_none(change: str) -> None:
    name, changes = SAME[change]
    assert layout(name, changes) == layout(name)


def test_the_spelling_and_the_place_of_flags_do_not_matter() -> None:
    one = layout(*more_args("--tensor-parallel-size", "2", "--block-size", "64"))
    other = layout(*more_args("--block_size=64", "-tp", "2"))
    assert one == other


def test_endpoints_of_one_kind_have_one_layout_whatever_they_are_called() -> None:
    assert layout("dpd-s3", {"metadata.name": "other"}) == layout("dpd-s3")


@pytest.mark.parametrize("variant", VARIANTS)
def test_both_roles_have_the_label_on_their_pods_and_nothing_selects_by_it(variant: str) -> None:
    """Selectors of Deployments cannot be changed."""
    plan, made = planned(*VARIANTS[variant]), rendered(*VARIANTS[variant])
    roles = tuple(Role) if plan.disaggregated else (None,)
    for role in roles:
        found = deployment(made, role)["spec"]
        labels = found["template"]["metadata"]["labels"]
        assert labels.get(LABEL) == (kv_layout(plan) if plan.disaggregated else None)
        assert LABEL not in found["selector"]["matchLabels"]


def test_the_flags_are_vllms(vllm_parser: Any) -> None:
    known = {option for action in vllm_parser._actions for option in action.option_strings}
    assert known >= FLAGS
