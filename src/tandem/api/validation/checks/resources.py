"""What containers ask for: amounts that Kubernetes refuses, and roles without a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from typing import Any

from tandem.api.validation.report import Found
from tandem.api.validation.subject import Subject, location

GPU = "nvidia.com/gpu"
ROLES = ("prefillSpec", "decodingSpec")
_PATHS = (
    "spec.worker.resources",
    *(f"spec.pdSpec.{role}.resources" for role in ROLES),
    "spec.metricsCollectorResources",
    "spec.metricsSidecarResources",
    "spec.s3UploaderResources",
)
_AMOUNT = re.compile(r"([+-]?[0-9.]+)(?:([eE][+-]?[0-9]+)|([KMGTPE]i|[numkMGTPE]))?")
_UNITS = {
    **{suffix: Decimal(1024) ** (i + 1) for i, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"))},
    **{
        suffix: Decimal(1000) ** (i - 3)
        for i, suffix in enumerate(("n", "u", "m", "", "k", "M", "G", "T", "P", "E"))
    },
}


def quantity(value: Any) -> Decimal | None:
    """A Kubernetes quantity (`500m`, `16Gi`, 8) as a number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    match = _AMOUNT.fullmatch(str(value))
    if match is None or len(match[2] or "") > 4:  # e+99: beyond it nothing is meant
        return None
    try:
        return Decimal(match[1] + (match[2] or "")) * _UNITS[match[3] or ""]
    except InvalidOperation:
        return None


def resource_checks(subject: Subject) -> Iterator[Found]:
    for path in _PATHS:
        yield from _amounts(subject, path)
    yield from _gpus(subject)


def _amounts(subject: Subject, path: str) -> Iterator[Found]:
    limits, requests = subject.object(f"{path}.limits"), subject.object(f"{path}.requests")
    for section, amounts in (("limits", limits), ("requests", requests)):
        for name, given in amounts.items():
            amount = quantity(given)
            if amount is None:
                continue
            if amount < 0:
                yield Found("IEC226", location(path, section, name), f"must not be negative (it is {given})")
            if _extended(name) and amount != amount.to_integral_value():
                yield Found(
                    "IEC226", location(path, section, name), f"must be a whole number (it is {given})"
                )
    for name, given in requests.items():
        asked, most = quantity(given), quantity(limits.get(name))
        at = location(path, "requests", name)
        if asked is None or (name in limits and most is None):
            continue
        if most is None and _extended(name):
            yield Found("IEC226", at, f"needs the same amount in limits: Kubernetes takes {name} only so")
        elif most is not None and _extended(name) and asked != most:
            yield Found(
                "IEC226", at, f"is {given}, but the limit is {limits[name]}; for {name} both must be the same"
            )
        elif most is not None and asked > most:
            yield Found("IEC226", at, f"is {given}, more than the limit, {limits[name]}")


def _extended(name: str) -> bool:
    """Whether a resource is a device's, or huge pages: there requests and limits must agree."""
    return ("/" in name and "kubernetes.io/" not in name) or name.startswith("hugepages-")


def gpus(resources: dict[str, Any]) -> int | None:
    """How many GPUs a container asks for; None when it names none."""
    for section in ("limits", "requests"):
        amounts = resources.get(section)
        amount = quantity(amounts.get(GPU)) if isinstance(amounts, dict) else None
        if amount is not None:
            return int(amount)
    return None


def _gpus(subject: Subject) -> Iterator[Found]:
    if not subject.disaggregated:
        return
    if subject.object("spec.worker.resources"):
        yield Found(
            "IEC501",
            location("spec.worker.resources"),
            "has no effect with pdSpec, where each role has its own resources; the field is required, "
            "so leave it "
            "empty: {}",
        )
    for role in ROLES:
        path = f"spec.pdSpec.{role}"
        resources = subject.object(f"{path}.resources")
        if not gpus(resources) and subject.has(path):
            at = f"{path}.resources" if resources else path
            yield Found(
                "IEC705", location(at), f"asks for no GPU; set resources.limits: {{{GPU}: ...}} for the role"
            )
