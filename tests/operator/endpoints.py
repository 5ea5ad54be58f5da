"""The manifests whose objects are kept as golden files, and variants of them: HyperPod's four samples, and
one whose KV goes by NIXL."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tandem.api import Endpoint, Role, parse_endpoint
from tandem.operator import Rendering, Settings, render
from tandem.operator.plan import Plan, plan

HERE = Path(__file__).parent
NAMES = ("dpd-s3", "dpd-huggingface", "dpd-nvme", "dpd-nixl", "colocated-routing")
SETTINGS = Settings(
    router_image="registry.example/tandem/router:1.0",
    proxy_image="registry.example/nginx-unprivileged:1.29",
    collector_image="registry.example/otelcol:0.165",
    region="us-east-2",
)
ROUTER_NAMESPACE = "hyperpod-inference-system"
ROLE_LABEL = "inference.sagemaker.aws.amazon.com/dpd-role"


def manifest(name: str) -> dict[str, Any]:
    """One of NAMES, as it is written."""
    loaded: dict[str, Any] = yaml.safe_load((HERE / f"manifests/{name}.yaml").read_text("utf-8"))
    return loaded


def changed(name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest with fields set by path (`spec.worker.args`); ... takes one away."""
    document = manifest(name)
    for path, value in changes.items():
        *sections, last = path.split(".")
        place = document
        for section in sections:
            place = place.setdefault(section, {})
        if value is ...:
            del place[last]
        else:
            place[last] = copy.deepcopy(value)
    return document


def endpoint(name: str, changes: Mapping[str, Any] | None = None) -> Endpoint:
    return parse_endpoint(yaml.safe_dump(changed(name, changes or {})), source=f"{name}.yaml")[0]


def planned(name: str, changes: Mapping[str, Any] | None = None, settings: Settings = SETTINGS) -> Plan:
    return plan(endpoint(name, changes), settings)


def rendered(name: str, changes: Mapping[str, Any] | None = None, settings: Settings = SETTINGS) -> Rendering:
    return render(endpoint(name, changes), settings)


_AMAZONS = {
    "serverAddress": "https://aps-workspaces.us-east-2.amazonaws.com/workspaces/ws-1",
    "query": "sum(vllm:num_requests_waiting)",
    "targetValue": 4,
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in NAMES},
    "kvaware": ("dpd-nixl", {"spec.intelligentRoutingSpec": {"routingStrategy": "kvaware"}}),
    "kvaware lmcache": ("dpd-s3", {"spec.intelligentRoutingSpec.routingStrategy": "kvaware"}),
    "kvaware colocated": (
        "colocated-routing",
        {"spec.intelligentRoutingSpec.routingStrategy": "kvaware", "spec.invocationEndpoint": "/completions"},
    ),
    "API keys": ("dpd-nixl", {"metadata.annotations": {"tandem.dev/api-keys-secret": "keys-of-chat"}}),
    "without a router": ("colocated-routing", {"spec.intelligentRoutingSpec": ...}),
    "without metrics": ("dpd-s3", {"spec.metrics": {"enabled": False}}),
    "prefetched from s3": ("dpd-s3", {"spec.modelSourceConfig.prefetchEnabled": True}),
    "downloaded by the engine": (
        "dpd-nixl",
        {
            "spec.modelSourceConfig.prefetchEnabled": False,
            "spec.worker.args": ["--model", "meta-llama/Llama-3.3-70B-Instruct", "--max-model-len", "8k"],
        },
    ),
    "without EFA": (
        "dpd-nixl",
        {"spec.instanceType": ..., "spec.instanceTypes": ["ml.g6e.48xlarge", "ml.p5.48xlarge"]},
    ),
    "a node affinity of its own": (
        "dpd-nvme",
        {
            "spec.instanceType": ...,
            "spec.nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {"matchExpressions": [{"key": "disk", "operator": "In", "values": ["nvme"]}]},
                        {"matchExpressions": [{"key": "pool", "operator": "Exists"}]},
                    ]
                }
            },
        },
    ),
    "a zone and a placement group": (
        "dpd-s3",
        {"spec.pdSpec.topologySpec": {"availabilityZone": "us-east-2a", "placementGroup": "pg-1"}},
    ),
    "limits": (
        "dpd-s3",
        {"spec.worker.requestLimits": {"maxConcurrentRequests": 8, "maxQueueSize": 4}},
    ),
    "scaled roles": (
        "dpd-nixl",
        {
            "spec.pdSpec.autoScalingSpec": {
                "prefillAutoScaling": {
                    "maxReplicaCount": 4,
                    "prometheusTrigger": {
                        "serverAddress": "https://aps-workspaces.us-east-2.amazonaws.com/workspaces/ws-1",
                        "query": "sum(vllm:num_requests_waiting)",
                        "targetValue": 4,
                    },
                },
                "decodingAutoScaling": {
                    "cloudWatchTriggerList": [
                        {"namespace": "X", "metricName": "a", "targetValue": 1.5},
                        {"namespace": "X", "metricName": "b", "targetValue": 2, "metricType": "Value"},
                    ]
                },
            },
            "spec.intelligentRoutingSpec": {"autoScalingSpec": {"maxReplicaCount": 3}},
        },
    ),
    "scaled by Amazon's Prometheus": (
        "dpd-huggingface",
        {
            "spec.pdSpec.autoScalingSpec": {
                "prefillAutoScaling": {"prometheusTrigger": _AMAZONS},
                "decodingAutoScaling": {"prometheusTrigger": _AMAZONS},
            },
            "spec.intelligentRoutingSpec": {"autoScalingSpec": {"prometheusTrigger": _AMAZONS}},
        },
    ),
    "a certificate": (
        "dpd-s3",
        {
            "spec.tlsConfig": {
                "customCertificateConfig": {
                    "acmArn": "arn:aws:acm:us-east-2:123456789012:certificate/0a1b",
                    "domainName": "llm.example.com",
                }
            }
        },
    ),
    "extensions by role": (
        "dpd-nixl",
        {
            "metadata.annotations": {
                "tandem.dev/prefill-image": "registry.example/vllm:prefill",
                "tandem.dev/decode-env": '[{"name": "A", "value": "b"}]',
                "tandem.dev/decode-tolerations": '[{"key": "spot", "operator": "Exists"}]',
                "tandem.dev/prefill-volumes": '[{"name": "scratch", "emptyDir": {}}]',
                "tandem.dev/prefill-volume-mounts": '[{"name": "scratch", "mountPath": "/scratch"}]',
            }
        },
    ),
    "long names": ("dpd-s3", {"metadata.name": "a-very-long-name-of-an-endpoint-that-goes-on-and-on-1"}),
    "a configuration of LMCache's": (
        "dpd-s3",
        {"spec.kvCacheSpec": {"cacheConfigFile": "/cfg/lmcache.yaml"}},
    ),
    "its own init container and account": (
        "dpd-nvme",
        {
            "spec.kubernetes.initContainers": [{"name": "sync", "image": "registry.example/sync:1"}],
            "spec.kubernetes.serviceAccountName": "models",
            "spec.kubernetes.schedulerName": "gang",
        },
    ),
}
"""Shapes that each test of all objects goes through."""


def deployment(made: Rendering, role: Role | str | None) -> dict[str, Any]:
    """The Deployment of a role, of colocated workers (None), or of the `router`."""
    component = {None: "worker"}.get(role, str(role))  # type: ignore[call-overload]
    return next(
        o
        for o in made.objects
        if o["kind"] == "Deployment" and o["metadata"]["labels"]["tandem.dev/component"] == component
    )


def pod(made: Rendering, role: Role | str | None) -> dict[str, Any]:
    spec: dict[str, Any] = deployment(made, role)["spec"]["template"]["spec"]
    return spec


def container(of_pod: Mapping[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(c for c in of_pod["containers"] if c["name"] == name)
    return found


def engine(made: Rendering, role: Role | None) -> dict[str, Any]:
    """The model container, which is a model pod's first."""
    first: dict[str, Any] = pod(made, role)["containers"][0]
    return first


def variables(of_container: Mapping[str, Any]) -> dict[str, Any]:
    """Variables with a value of their own."""
    return {v["name"]: v["value"] for v in of_container["env"] if "value" in v}


def named(made: Rendering, kind: str, name: str) -> dict[str, Any]:
    return next(o for o in made.objects if (o["kind"], o["metadata"]["name"]) == (kind, name))


def of_kind(made: Rendering, kind: str) -> list[dict[str, Any]]:
    return [o for o in made.objects if o["kind"] == kind]
