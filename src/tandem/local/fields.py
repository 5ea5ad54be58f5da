"""Which fields of a resource mean something on one machine, and which of a manifest's do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tandem.api import ANNOTATION_CONNECTOR
from tandem.api.annotations import PREFIX
from tandem.api.conversion import ANNOTATION_V1_FIELDS

# Paths that `tandem up` acts on (with everything below them), and those that only name things.
_MEANT = (
    "apiVersion",
    "kind",
    "metadata",
    "spec.modelName",
    "spec.invocationEndpoint",
    "spec.modelSourceConfig.modelSourceType",
    "spec.modelSourceConfig.huggingFaceModel.modelId",
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
)
# Required by the CRD, and about containers only: listing them for every manifest would say nothing.
_EXPECTED = ("spec.worker.image", "spec.worker.resources", "spec.worker.modelInvocationPort")


def without_local_meaning(raw: dict[str, Any]) -> list[str]:
    """Paths of a valid manifest that do nothing on one machine: the highest path of each part, in file
    order. Empty objects and lists count as not given.
    """
    return [
        *_annotations(raw),
        *(p for p in _highest(raw, "", (*_MEANT, *_model_volume(raw))) if p not in _EXPECTED),
    ]


def has_local_meaning(path: str) -> bool:
    """Whether `tandem up` acts on a field, or on one below it or around it."""
    if path.startswith("metadata.annotations["):
        return path == f"metadata.annotations[{ANNOTATION_CONNECTOR}]"
    return any(_is_at_or_below(path, meant) or _is_at_or_below(meant, path) for meant in _MEANT)


def _is_at_or_below(path: str, other: str) -> bool:
    return path == other or path.startswith((f"{other}.", f"{other}["))


def _annotations(raw: dict[str, Any]) -> list[str]:
    """Tandem's own that are about pods, or tell the operator something."""
    given = raw["metadata"].get("annotations") or {}
    meant = (ANNOTATION_CONNECTOR, ANNOTATION_V1_FIELDS)
    return [f"metadata.annotations[{key}]" for key in given if key.startswith(PREFIX) and key not in meant]


def _model_volume(raw: dict[str, Any]) -> list[str]:
    """The path of the volume that holds the model, where the resource says that one does."""
    spec = raw["spec"]
    if spec["modelSourceConfig"]["modelSourceType"] != "kubernetesVolume":
        return []
    name = spec["worker"]["modelVolumeMount"]["name"]
    volumes = (spec.get("kubernetes") or {}).get("volumes") or []
    return [f"spec.kubernetes.volumes[{i}]" for i, v in enumerate(volumes) if v["name"] == name]


def _highest(value: Any, path: str, meant: Sequence[str]) -> list[str]:
    if value in ({}, [], None) or path in meant:
        return []
    below_matters = not path or any(m.startswith((f"{path}.", f"{path}[")) for m in meant)
    if below_matters and isinstance(value, dict):
        below = [(f"{path}.{key}" if path else str(key), v) for key, v in value.items()]
    elif below_matters and isinstance(value, list):
        below = [(f"{path}[{i}]", v) for i, v in enumerate(value)]
    else:
        return [path]
    return [found for where, v in below for found in _highest(v, where, meant)]
