"""Which fields of a resource mean something on one machine, and which of a manifest's do not."""

from __future__ import annotations

from typing import Any

# Paths that `tandem up` acts on (with everything below them), and those that only name things.
_MEANT = (
    "apiVersion",
    "kind",
    "metadata",
    "spec.modelName",
    "spec.modelSourceConfig.modelSourceType",
    "spec.modelSourceConfig.huggingFaceModel.modelId",
    "spec.kubernetes.volumes",
    "spec.intelligentRoutingSpec.enabled",
    "spec.intelligentRoutingSpec.routingStrategy",
    "spec.pdSpec.routingThreshold",
    "spec.pdSpec.prefillSpec.replicas",
    "spec.pdSpec.prefillSpec.args",
    "spec.pdSpec.decodingSpec.replicas",
    "spec.pdSpec.decodingSpec.args",
    "spec.worker.args",
    "spec.worker.environmentVariables",
    "spec.worker.modelVolumeMount",
)
# Required by the CRD, and about containers only: listing them for every manifest would say nothing.
_EXPECTED = ("spec.worker.image", "spec.worker.resources", "spec.worker.modelInvocationPort")


def without_local_meaning(raw: dict[str, Any]) -> list[str]:
    """Paths of a manifest that do nothing on one machine: the highest path of each part, in file order.

    Empty objects and lists count as not given.
    """
    return [p for p in _highest(raw, "") if p not in _EXPECTED]


def _highest(value: Any, path: str) -> list[str]:
    if value in ({}, [], None) or path in _MEANT:
        return []
    below_matters = not path or any(m.startswith(path + ".") for m in _MEANT)
    if not below_matters or not isinstance(value, dict):
        return [path]
    return [p for key, v in value.items() for p in _highest(v, f"{path}.{key}" if path else str(key))]
