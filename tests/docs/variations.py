"""Whole manifests, and each field of them changed: what a field does is what then is otherwise."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

from tandem.api.annotations import PREFIX
from tandem.api.crd.schemas import Schema

from ..operator.endpoints import changed
from .fields import schemas

Manifest = dict[str, Any]
Place = tuple[str | int, ...]

_PROBE = {"httpGet": {"path": "/x", "port": 8000, "scheme": "HTTPS"}, "periodSeconds": 7}
_AMOUNTS = {"limits": {"cpu": "3", "memory": "3Gi"}, "requests": {"cpu": "1", "memory": "1Gi"}}
_GPUS = {"limits": {"nvidia.com/gpu": 8, "memory": "9Gi"}, "requests": {"memory": "8Gi"}}
_VARIABLE = {"name": "A", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k", "optional": True}}}
_TERM = {"matchExpressions": [{"key": "disk", "operator": "In", "values": ["nvme"]}]}
_VOLUME = {"name": "scratch", "ephemeral": {"volumeClaimTemplate": {"spec": {"storageClassName": "fast"}}}}

SAMPLES: dict[str, Any] = {
    "spec.nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [_TERM]}},
    "spec.instanceTypes": ["ml.p5e.48xlarge", "ml.p5.48xlarge"],
    "spec.kubernetes.initContainers": [
        {"name": "sync", "image": "sync:1", "volumeMounts": [{"name": "shm", "mountPath": "/x"}]}
    ],
    "spec.kubernetes.volumes": [_VOLUME],
    "spec.metricsCollectorResources": _AMOUNTS,
    "spec.metricsSidecarResources": _AMOUNTS,
    "spec.s3UploaderResources": _AMOUNTS,
    "spec.modelSourceConfig.huggingFaceModel.tokenSecretRef": {"name": "s", "key": "k", "optional": True},
    "spec.pdSpec.decodingSpec.args": ["--seed", "7"],
    "spec.pdSpec.decodingSpec.nodeSelector": {"pool": "other"},
    "spec.pdSpec.decodingSpec.resources": _GPUS,
    "spec.pdSpec.prefillSpec.args": ["--seed", "7"],
    "spec.pdSpec.prefillSpec.nodeSelector": {"pool": "other"},
    "spec.pdSpec.prefillSpec.resources": _GPUS,
    "spec.worker.args": ["--model", "/opt/ml/model", "--seed", "7"],
    "spec.worker.command": ["vllm", "serve", "--seed", "7"],
    "spec.worker.environmentVariables": [_VARIABLE, {"name": "B", "value": "b"}],
    "spec.worker.modelVolumeMount.mountPath": "/opt/ml/other",
    "spec.worker.probes.livenessProbe": _PROBE,
    "spec.worker.probes.readinessProbe": _PROBE,
    "spec.worker.probes.startupProbe": _PROBE,
    "spec.worker.resources": {"limits": {"nvidia.com/gpu": 4, "memory": "9Gi"}},
    f"{PREFIX}connector": "lmcache",
    f"{PREFIX}api-keys-secret": "keys-of-chat",
    f"{PREFIX}managed": "false",
    f"{PREFIX}paused": "true",
    f"{PREFIX}v1-fields": '{"fields":{}}',
}
"""Values of fields that are Kubernetes' own, or that no schema bounds. Parts of them are told apart from what
else is rendered."""

for _role in ("prefill", "decode"):
    SAMPLES |= {
        f"{PREFIX}{_role}-image": "registry.example/vllm:other",
        f"{PREFIX}{_role}-env": '[{"name": "A", "value": "of the role"}]',
        f"{PREFIX}{_role}-tolerations": '[{"key": "spot", "operator": "Exists"}]',
        f"{PREFIX}{_role}-affinity": '{"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution":'
        ' [{"weight": 3, "podAffinityTerm": {"topologyKey": "rack"}}]}}',
        f"{PREFIX}{_role}-volumes": '[{"name": "scratch", "emptyDir": {"sizeLimit": "5Gi"}}]',
        f"{PREFIX}{_role}-volume-mounts": '[{"name": "shm", "mountPath": "/scratch"}]',
    }

_TEXTS = (
    *("one", "two", "redis", "tieredstorage", "http", "grpc", "/one", "/two", "s3://one/x", "s3://two/x"),
    *("Z1", "Z2", "ml.p5.48xlarge", "ml.p5en.48xlarge", "org/one", "org/two", "0" * 40, "1" * 40),
    "arn:aws:acm:us-east-2:123456789012:certificate/0a1b",
    "arn:aws:acm:us-east-2:123456789012:certificate/0a1c",
    "https://aps-workspaces.us-east-2.amazonaws.com/workspaces/ws-1",
    "https://aps-workspaces.us-east-2.amazonaws.com/workspaces/ws-2",
    *(
        f"arn:aws:sagemaker:us-east-2:123456789012:{kind}/x"
        for kind in ("endpoint", "endpoint-config", "model")
    ),
    "",
)
"""Two for each pattern."""

BASES: dict[str, Manifest] = {
    "lmcache, s3": changed("dpd-s3", {"spec.kvCacheSpec": {"enableL2Cache": True}}),
    "nixl, hugging face": changed("dpd-nixl", {}),
    "nixl, downloaded by the engine": changed(
        "dpd-nixl",
        {
            "spec.modelSourceConfig.prefetchEnabled": False,
            "spec.worker.args": ["--tensor-parallel-size", "8"],
        },
    ),
    "lmcache, volume": changed("dpd-nvme", {"spec.instanceType": ...}),
    "colocated, fsx": changed(
        "colocated-routing",
        {
            "spec.autoScalingSpec": ...,
            "spec.modelSourceConfig.s3Storage": {"bucketName": "b", "region": "us-east-2"},
        },
    ),
    "colocated, without a router": changed(
        "colocated-routing", {"spec.autoScalingSpec": ..., "spec.intelligentRoutingSpec": ...}
    ),
}


def place(path: str) -> Place:
    """`spec.tags[].name` → ('spec', 'tags', 0, 'name')."""
    if path.startswith(PREFIX):
        return ("metadata", "annotations", path)
    names = path.split(".")
    return tuple(p for n in names for p in ((n.removesuffix("[]"), 0) if n.endswith("[]") else (n,)))


def value_at(manifest: Any, at: Place) -> Any:
    for part in at:
        known = part in manifest if isinstance(manifest, dict) else isinstance(manifest, list)
        manifest = manifest[part] if known else None
    return manifest


def with_value(manifest: Manifest, path: str, value: Any) -> Manifest:
    """A copy with a field set (... takes it away). What it lies in is there already."""
    made = copy.deepcopy(manifest)
    *above, last = place(path)
    container = value_at(made, tuple(above))
    if value is ...:
        container.pop(last, None)
    else:
        container[last] = copy.deepcopy(value)
    return made


def with_sections(manifest: Manifest, path: str) -> Manifest:
    """A copy in which everything is there that a field lies in, with all that it can have."""
    made = copy.deepcopy(manifest)
    if path.startswith(PREFIX):
        made["metadata"].setdefault("annotations", {})
        return made
    *above, _ = path.split(".")
    for depth in range(1, len(above) + 1):
        name = ".".join(above[:depth]).removesuffix("[]")
        if value_at(made, place(name)) is None:
            made = with_value(made, name, sample(name))
    return made


def sample(path: str) -> Any:
    """A value of a field with everything that it can have."""
    return SAMPLES[path] if path in SAMPLES else _sample(schemas()[path][0], path)


def _sample(schema: Schema, path: str) -> Any:
    match schema["type"]:
        case "object":
            inner = [name for name in schema.get("properties", {}) if f"{path}.{name}" not in _BESIDE]
            return {name: sample(f"{path}.{name}") for name in inner}
        case "array":
            items = [_sample(schema["items"], f"{path}[]")]
            return 2 * items if path.endswith("TriggerList") else items  # not what the trigger alone would do
        case _:
            return other(schema, None)


_BESIDE: frozenset[str] = frozenset(
    path for path in schemas() if path.endswith(("TriggerList", "cacheConfigFile"))
)
"""Fields beside which others have no effect."""


def other(schema: Schema, current: Any) -> Any:
    """A value of a scalar other than the current one, and than the default."""
    avoided = (schema.get("default") if current is None else current,)
    match schema:
        case {"enum": values}:
            return next(v for v in values if v not in avoided)
        case {"format": "date-time"}:
            return "2026-01-01T00:00:00Z"
        case {"type": "boolean"}:
            return not (schema.get("default", False) if current is None else current)
        case {"type": "integer" | "number"}:
            low, high = schema.get("minimum", 0), schema.get("maximum", 2**31 - 1)
            near = (current if current is not None else schema.get("default", low)) or 0
            return next(n for n in (near + 1, near - 1, low, high) if low <= n <= high and n not in avoided)
    pattern = re.compile(schema.get("pattern", ""))
    return next(t for t in _TEXTS if pattern.search(t) and t not in avoided)


def variants(manifest: Manifest, path: str) -> Iterator[Manifest]:
    """The manifest with a field changed, in each way that makes sense. Its sections are there already."""
    schema, required = schemas()[path]
    current = value_at(manifest, place(path))
    if path in SAMPLES:
        yield with_value(manifest, path, SAMPLES[path] if current != SAMPLES[path] else ...)
    elif schema["type"] not in ("object", "array"):
        yield with_value(manifest, path, other(schema, current))
    elif current is None:
        yield with_value(manifest, path, sample(path))
    else:
        if not required and path != "spec":
            yield with_value(manifest, path, ...)
        for name in schema.get("properties", {}):
            yield from variants(with_sections(manifest, f"{path}.{name}"), f"{path}.{name}")


_PD, _COLOCATED = "dpd-s3", "colocated-routing"
_L2 = {"l2CacheBackend": "redis", "l2CacheLocalUrl": "redis://r:6379"}
_TRIGGER = {"namespace": "n", "metricName": "m", "targetValue": 1}
_QUERY = {
    "serverAddress": "https://aps-workspaces.us-east-2.amazonaws.com/workspaces/ws-1",
    "query": "q",
    "targetValue": 1,
}
_SOURCE = "spec.modelSourceConfig"
_CACHE = "spec.kvCacheSpec"

WITHOUT_EFFECT: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {
    ("spec.replicas", "IEC502"): (_PD, {"spec.replicas": 3}),
    ("spec.intelligentRoutingSpec.enabled", "IEC504"): (_PD, {"spec.intelligentRoutingSpec.enabled": False}),
    ("spec.intelligentRoutingSpec.routingStrategy", "IEC505"): (
        _COLOCATED,
        {"spec.intelligentRoutingSpec": {"routingStrategy": "session"}},
    ),
    (_CACHE, "IEC520"): ("dpd-nixl", {_CACHE: {"enableL1Cache": True}}),
    (f"{_CACHE}.enableL1Cache", "IEC509"): (_PD, {_CACHE: {"enableL1Cache": True, "cacheConfigFile": "/f"}}),
    (f"{_CACHE}.enableL2Cache", "IEC507"): (_PD, {_CACHE: {"enableL2Cache": True}}),
    (f"{_CACHE}.enableL2Cache", "IEC508"): (
        _PD,
        {_CACHE: {"enableL1Cache": False, "enableL2Cache": True, "l2CacheSpec": _L2}},
    ),
    (f"{_CACHE}.l2CacheSpec", "IEC508"): (_PD, {_CACHE: {"l2CacheSpec": _L2}}),
    (f"{_SOURCE}.modelLocation", "IEC511"): ("dpd-nixl", {f"{_SOURCE}.modelLocation": "x"}),
    (f"{_SOURCE}.prefetchEnabled", "IEC511"): ("dpd-nvme", {f"{_SOURCE}.prefetchEnabled": True}),
    (f"{_SOURCE}.s3Storage", "IEC511"): (
        "dpd-nvme",
        {f"{_SOURCE}.s3Storage": {"bucketName": "b", "region": "us-east-2"}},
    ),
    (f"{_SOURCE}.fsxStorage", "IEC511"): (_PD, {f"{_SOURCE}.fsxStorage": {"fileSystemId": "fs-1"}}),
    (f"{_SOURCE}.huggingFaceModel", "IEC511"): (_PD, {f"{_SOURCE}.huggingFaceModel": {"modelId": "a/b"}}),
    (f"{_SOURCE}.huggingFaceModel.tokenSecretRef", "IEC512"): (
        "dpd-nixl",
        {f"{_SOURCE}.prefetchEnabled": False},
    ),
    ("spec.worker.requestLimits", "IEC510"): (_PD, {"spec.worker.requestLimits": {"maxQueueSize": 4}}),
    ("spec.worker.resources", "IEC501"): (_PD, {}),
    ("spec.metrics.metricsScrapeIntervalSeconds", "IEC514"): (
        _PD,
        {"spec.metrics": {"enabled": False, "metricsScrapeIntervalSeconds": 20}},
    ),
    ("spec.metricsCollectorResources", "IEC514"): (
        _PD,
        {"spec.metrics": {"enabled": False}, "spec.metricsCollectorResources": {"limits": {"cpu": "1"}}},
    ),
    ("spec.autoScalingSpec", "IEC503"): (_PD, {"spec.autoScalingSpec": {"cloudWatchTrigger": _TRIGGER}}),
    ("spec.intelligentRoutingSpec.autoScalingSpec", "IEC505"): (
        _COLOCATED,
        {"spec.intelligentRoutingSpec": {"autoScalingSpec": {"cloudWatchTrigger": _TRIGGER}}},
    ),
    ("spec.intelligentRoutingSpec.autoScalingSpec", "IEC719"): (
        _PD,
        {"spec.intelligentRoutingSpec.autoScalingSpec": {"cloudWatchTrigger": _TRIGGER}},
    ),
    ("spec.autoScalingSpec.cloudWatchTrigger", "IEC506"): (
        _COLOCATED,
        {"spec.autoScalingSpec.cloudWatchTriggerList": [_TRIGGER]},
    ),
    ("spec.autoScalingSpec.prometheusTrigger", "IEC506"): (
        _COLOCATED,
        {"spec.autoScalingSpec": {"prometheusTrigger": _QUERY, "prometheusTriggerList": [_QUERY]}},
    ),
    (f"{PREFIX}connector", "IEC516"): (_COLOCATED, {"metadata.annotations": {f"{PREFIX}connector": "nixl"}}),
}
"""Manifests in which a field has no effect, and the rule that warns of it: one of the operator's tests, and
what is changed in it."""
