"""HyperPod's manifests through the operator: applied as they are they say what this cluster lacks, and with
the weights and the resources of this cluster they serve."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from .conftest import NODE_LABELS
from .endpoint import HERE, SYSTEM
from .kube import Cluster, Object
from .operating import OPERATOR, Managed, Operator, managed

SAMPLES = HERE.parent / "operator/manifests"
IMAGES = ("public.ecr.aws/deep-learning-containers/vllm:server-hyperpod-cuda-v1.1",)

INSTANCE = "takes nodes with node.kubernetes.io/instance-type=ml"
LACKS = {
    "dpd-s3": {
        "ModelSource": ("CsiDriverMissing", "s3.csi.aws.com"),
        "PrefillReady": (
            "Unschedulable",
            "takes nodes with pool=prefill and node.kubernetes.io/instance-type",
        ),
    },
    "dpd-huggingface": {
        "PrefillReady": ("Unschedulable", f"{INSTANCE}.p5en.48xlarge"),
        "DecodeReady": ("Unschedulable", f"{INSTANCE}.p5en.48xlarge"),
    },
    "dpd-nvme": {
        "PrefillReady": ("Unschedulable", f"{INSTANCE}.p5.48xlarge"),
        "DecodeReady": ("Unschedulable", f"{INSTANCE}.p5.48xlarge"),
    },
    "colocated-routing": {
        "Ready": ("Invalid", "spec.modelSourceConfig.fsxStorage.dnsName: is needed"),
        "Validated": ("Invalid", "give it, or the AWS region"),
    },
}
"""Reason and words of conditions that do not hold, by sample."""

SMALL: Object = {"cpu": "50m", "memory": "128Mi"}


def sample(name: str) -> Object:
    made: Object = yaml.safe_load((SAMPLES / f"{name}.yaml").read_text("utf-8"))
    return made


def at_home(made: Object) -> Object:
    """Its weights in a config map, its pods small: what else it says stays."""
    made = copy.deepcopy(made)
    spec = made["spec"]
    spec["modelSourceConfig"] = {"modelSourceType": "kubernetesVolume"}
    spec["kubernetes"] = {"volumes": [{"name": "model-weights", "configMap": {"name": "tiny"}}]}
    spec["worker"].setdefault("environmentVariables", []).append(
        {"name": "SIM_FLAGS", "value": "--time-scale 20"}
    )
    roles = [spec["pdSpec"][role] for role in ("prefillSpec", "decodingSpec")] if "pdSpec" in spec else []
    for given in roles or [spec["worker"]]:
        devices = {
            "nvidia.com/gpu": given["resources"]["limits"]["nvidia.com/gpu"],
            "vpc.amazonaws.com/efa": "0",
        }
        given["resources"] = {"requests": SMALL | devices, "limits": devices}
    return made


@pytest.fixture(scope="module")
def instances(cluster: Cluster) -> Iterator[None]:
    """The images of the samples; afterwards the nodes' labels are as they were."""
    for image in IMAGES:
        cluster.image(image, "vllm", "serve")
    yield
    labels = [f"{name}={value}" for name, value in NODE_LABELS.items()]
    cluster.kubectl("label", "nodes", "--all", "--overwrite", *labels, "pool-")


def test_as_they_are_they_say_what_is_missing(cluster: Cluster, operator: Operator, model: Path) -> None:
    with ExitStack() as stack:
        applied = {name: stack.enter_context(managed(cluster, sample(name), model)) for name in LACKS}
        for name, lacks in LACKS.items():

            def said(endpoint: Managed = applied[name], lacks: dict[str, tuple[str, str]] = lacks) -> bool:
                found = {c["type"]: c for c in endpoint.status().get("conditions", ())}
                return all(
                    kind in found
                    and (found[kind]["status"], found[kind]["reason"]) == ("False", reason)
                    and words in found[kind]["message"]
                    for kind, (reason, words) in lacks.items()
                )

            cluster.wait_for(f"{name}: {lacks}", said)
        # What the resource does not say of AWS the operator is told.
        words = ("-n", SYSTEM, f"deployment/{OPERATOR}")
        cluster.kubectl("set", "env", *words, "AWS_REGION=us-east-2")
        cluster.kubectl("rollout", "status", *words, "--timeout=90s")
        chat = applied["colocated-routing"]
        cluster.wait_for(
            "a driver", lambda: "fsx.csi.aws.com" in chat.condition("ModelSource").get("message", "")
        )
        assert chat.condition("Autoscaling")["reason"] == "KedaMissing"
        assert applied["dpd-s3"].condition("Autoscaling") == {}
    for endpoint in applied.values():
        endpoint.delete("--ignore-not-found")


@pytest.mark.parametrize("names", [("dpd-s3", "dpd-nvme"), ("dpd-huggingface", "colocated-routing")])
def test_with_this_clusters_weights_they_serve(
    cluster: Cluster, operator: Operator, instances: None, model: Path, names: tuple[str, ...]
) -> None:
    with ExitStack() as stack:
        made = []
        for name in names:
            resource = at_home(sample(name))
            spec = resource["spec"]
            kind = spec.get("instanceType") or spec["instanceTypes"][0]
            label = f"node.kubernetes.io/instance-type={kind}"
            cluster.kubectl("label", "nodes", "--all", "--overwrite", label, "pool=prefill")
            made.append(stack.enter_context(managed(cluster, resource, model)))
            count = {"dpd-s3": 3}.get(name, 2)
            cluster.wait_for("its pods placed", lambda e=made[-1], n=count: _placed(e) >= n)
        for endpoint in made:
            cluster.wait_for(f"{endpoint.name} in use", lambda e=endpoint: e.complete() and e.in_use(), 90)
            short, long = endpoint.ask("hello"), endpoint.ask("The quick brown fox. " * 1500, max_tokens=4)
            assert (short.status_code, long.status_code) == (200, 200), (short.text, long.text)
            if "pdSpec" in endpoint.resource["spec"]:
                assert "prefill time" in "".join(endpoint.routed(long))
                assert endpoint.status()["transfer"]["connector"] == "lmcache", "as with HyperPod"
            else:
                assert endpoint.condition("Autoscaling")["reason"] == "KedaMissing"


def _placed(endpoint: Managed) -> int:
    pods = [pod for component in ("prefill", "decode", "worker") for pod in endpoint.pods(component)]
    return sum(bool(pod["spec"].get("nodeName")) for pod in pods)
