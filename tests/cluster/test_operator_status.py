"""What keeps an endpoint from serving is in its status within a minute, by role and by cause."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tandem.operator.names import ZONE_LABEL

from .conftest import NODE_LABELS
from .endpoint import manifest
from .kube import Cluster, Object
from .operating import ENDPOINTS, Managed, Operator, Seen, has_room, managed, watching

NAMESPACE = "trouble"
BROKEN = """
import os
if os.environ["TROUBLE"] == "memory":
    len(b"x" * 2**31)
print("INFO 11-30 04:00:00 [core.py:80] Initializing a V1 LLM engine", flush=True)
raise ValueError("No available memory for the cache blocks.")
"""
"""An engine that ends while it starts."""

SMALL: Object = {"cpu": "20m", "memory": "128Mi", "nvidia.com/gpu": "1"}


def endpoint(name: str, source: Object, prefill: Object, decode: Object, **annotations: Any) -> Object:
    """With what is given in place of the manifest's; annotations are written as YAML."""
    made = manifest("nixl", NAMESPACE, Path("/nowhere"))
    made["metadata"] |= {"name": name, "annotations": {}}
    for key, value in annotations.items():
        text = value if isinstance(value, str) else json.dumps(value)
        made["metadata"]["annotations"][f"tandem.dev/{key.replace('_', '-')}"] = text
    spec = made["spec"]
    spec["metrics"]["enabled"] = False
    spec["modelSourceConfig"] = source
    if source["modelSourceType"] != "kubernetesVolume":
        del spec["kubernetes"]
    limits = {"nvidia.com/gpu": "1", "memory": "128Mi"}
    for role, changes in (("prefillSpec", prefill), ("decodingSpec", decode)):
        spec["pdSpec"][role] = {"replicas": 1, "resources": {"requests": SMALL, "limits": limits}, **changes}
    return made


TOKEN = {"name": "hf-token-secret", "key": "token"}
MANY: Object = {
    "resources": {"requests": SMALL | {"nvidia.com/gpu": "999"}, "limits": {"nvidia.com/gpu": "999"}}
}
FAULTY = (
    endpoint(
        "fetched",
        {
            "modelSourceType": "huggingface",
            "prefetchEnabled": True,
            "huggingFaceModel": {"modelId": "org/model", "tokenSecretRef": TOKEN},
        },
        {},
        {},
        prefill_image="vllm/vllm-openai:nobody-has-it",
    ),
    endpoint(
        "broken",
        {"modelSourceType": "kubernetesVolume"},
        {},
        {},
        prefill_image="tandem-tests/broken-vllm:v1",
        decode_image="tandem-tests/broken-vllm:v1",
        prefill_env=[{"name": "TROUBLE", "value": "memory"}],
        decode_env=[{"name": "TROUBLE", "value": "crash"}],
    ),
    endpoint(
        "mounted",
        {
            "modelSourceType": "s3",
            "modelLocation": "m",
            "s3Storage": {"bucketName": "b", "region": "us-east-2"},
        },
        {},
        MANY,
    ),
)
FAULTY[1]["spec"]["kubernetes"]["volumes"] = [{"name": "model-weights", "emptyDir": {}}]

TOLD = {
    "fetched": {
        "PrefillReady": ("ImagePullBackOff", "vllm/vllm-openai:nobody-has-it"),
        "DecodeReady": ("CreateContainerConfigError", 'secret "hf-token-secret" not found'),
        "ModelSource": ("", "hf-model-downloader"),
    },
    "broken": {
        "PrefillReady": ("OOMKilled", "container prefill-broken was ended because it used more memory"),
        "DecodeReady": ("Crash", "exit code 1: ValueError: No available memory for the cache blocks."),
    },
    "mounted": {
        "PrefillReady": ("CsiDriverMissing", "s3.csi.aws.com"),
        "DecodeReady": ("Unschedulable", "2 Insufficient nvidia.com/gpu"),
        "ModelSource": ("CsiDriverMissing", "s3.csi.aws.com"),
    },
}
"""Reason, and words of the message, by endpoint and condition."""


@pytest.fixture(scope="module")
def faulty(cluster: Cluster, operator: Operator, model: Path) -> Iterator[tuple[dict[str, Managed], Seen]]:
    """The endpoints, and what a watch has shown of them since before they were applied."""
    has_room(cluster)
    cluster.image("tandem-tests/broken-vllm:v1", "python3", "-c", BROKEN)
    with watching(cluster, ENDPOINTS) as seen, ExitStack() as stack:
        made = [stack.enter_context(managed(cluster, resource, model)) for resource in FAULTY]
        yield {endpoint.name: endpoint for endpoint in made}, seen


@pytest.mark.parametrize("name", TOLD)
def test_the_cause_is_told_within_a_minute(faulty: tuple[dict[str, Managed], Seen], name: str) -> None:
    endpoint = faulty[0][name]

    def told() -> bool:
        found = {kind: endpoint.condition(kind) for kind in TOLD[name]}
        return all(
            c and c["status"] == "False" and c["reason"].startswith(reason) and words in c["message"]
            for c, (reason, words) in ((found[kind], TOLD[name][kind]) for kind in TOLD[name])
        )

    endpoint.cluster.wait_for(f"{TOLD[name]}", told, 60)
    ready = endpoint.status()["conditions"][0]
    assert (ready["type"], ready["status"]) == ("Ready", "False")
    for kind in ("PrefillReady", "DecodeReady"):
        assert TOLD[name][kind][1] in ready["message"]
    assert endpoint.state() != "DeploymentComplete"


def test_a_secret_that_is_missing_is_no_failed_download(faulty: tuple[dict[str, Managed], Seen]) -> None:
    _, seen = faulty
    reasons = {c["reason"] for found in seen.objects for c in found.get("status", {}).get("conditions", ())}
    assert "HuggingFaceDownloadFailed" not in reasons


def test_nodes_without_a_zone_are_told_and_take_the_pods_once_they_have_one(
    cluster: Cluster, operator: Operator, model: Path
) -> None:
    """sameAZ is the default, and a cluster of one's own may have no zones."""
    cluster.kubectl("label", "nodes", "--all", f"{ZONE_LABEL}-")
    try:
        resource = endpoint("zoneless", {"modelSourceType": "kubernetesVolume"}, {}, {})
        resource["spec"]["kubernetes"]["volumes"] = [{"name": "model-weights", "emptyDir": {}}]
        with managed(cluster, resource, model) as made:

            def told() -> bool:
                ready = made.condition("PrefillReady")
                return ready.get("reason") == "Unschedulable" and f"label {ZONE_LABEL}" in ready["message"]

            cluster.wait_for("the label", told)
            cluster.kubectl("label", "nodes", "--all", f"{ZONE_LABEL}={NODE_LABELS[ZONE_LABEL]}")
            cluster.wait_for("a node", lambda: all(p["spec"].get("nodeName") for p in made.pods("prefill")))
    finally:
        cluster.kubectl("label", "nodes", "--all", "--overwrite", f"{ZONE_LABEL}={NODE_LABELS[ZONE_LABEL]}")


def test_what_is_mended_is_told(cluster: Cluster, faulty: tuple[dict[str, Managed], Seen]) -> None:
    mounted = faulty[0]["mounted"]
    driver = {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "CSIDriver",
        "metadata": {"name": "s3.csi.aws.com"},
        "spec": {"attachRequired": False},
    }
    cluster.apply([driver])
    try:
        cluster.wait_for(
            "other words", lambda: mounted.condition("ModelSource")["reason"] != "CsiDriverMissing", 20
        )
    finally:
        cluster.kubectl("delete", "csidriver", "s3.csi.aws.com")


def test_a_pull_that_fails_again_and_again_is_one_trouble(
    cluster: Cluster, faulty: tuple[dict[str, Managed], Seen]
) -> None:
    endpoints, seen = faulty
    (pod,) = endpoints["fetched"].pods("prefill")
    of_pod = f"involvedObject.name={pod['metadata']['name']}"

    def pulls() -> int:
        events = cluster.get(f"/api/v1/namespaces/{NAMESPACE}/events", fieldSelector=of_pod)["items"]
        return sum(e.get("count") or 1 for e in events if e["message"].startswith("Failed to pull image"))

    cluster.wait_for("another pull", lambda: pulls() >= 2)
    told = [
        (c["reason"], c["message"])
        for found in seen.objects
        if found["metadata"]["name"] == "fetched"
        for c in found.get("status", {}).get("conditions", ())
        if c["type"] == "PrefillReady" and c["reason"] not in ("Starting", "Pending")
    ]
    assert len(set(told)) == 1, set(told)
