"""What containers ask for: amounts that Kubernetes refuses, and roles without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tandem.api.crd import schema_problems
from tandem.api.crd.structural import Location
from tandem.api.quantities import EFA, GPU, MOST_DEVICES, devices, quantity
from tandem.api.validation.metadata import key_mistake
from tandem.api.validation.report import Found
from tandem.api.validation.schema import schema_of
from tandem.api.validation.subject import Subject, location

ROLES = ("prefillSpec", "decodingSpec")
_STANDARD = ("cpu", "memory", "ephemeral-storage")

_PATHS = (
    "spec.worker.resources",
    *(f"spec.pdSpec.{role}.resources" for role in ROLES),
    "spec.metricsCollectorResources",
    "spec.metricsSidecarResources",
    "spec.s3UploaderResources",
)


def resource_checks(subject: Subject) -> Iterator[Found]:
    for path in _PATHS:
        yield from _amounts(subject.object(path), location(path))
    for where, container in subject.objects("spec.kubernetes.initContainers"):
        if isinstance(given := container.get("resources"), dict):
            yield from _amounts(given, (*where, "resources"))
    yield from _gpus(subject)


def _amounts(resources: dict[str, Any], place: Location) -> Iterator[Found]:
    if resources.get("claims"):
        yield Found(
            "IEC233",
            (*place, "claims"),
            "names claims of the pod, and the resource has no field for those: Kubernetes refuses the pod",
        )
    limits, requests = (
        given if isinstance(given := resources.get(name), dict) else {} for name in ("limits", "requests")
    )
    for section, amounts in (("limits", limits), ("requests", requests)):
        for name, given in amounts.items():
            if mistake := _no_resource(str(name)):
                yield Found("IEC226", (*place, section, str(name)), mistake)
            if what := _no_amount(name, given):
                yield Found("IEC226", (*place, section, name), f"{what} (it is {given})")
    for name, given in requests.items():
        asked, most = quantity(given), quantity(limits.get(name))
        at = (*place, "requests", name)
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


def _no_resource(name: str) -> str | None:
    """What is wrong with a resource's name."""
    if mistake := key_mistake(name):
        return mistake
    if "/" in name or name in _STANDARD or name.startswith("hugepages-"):
        return None
    return f"must be one of {', '.join(_STANDARD)}, hugepages-SIZE, or begin with a domain, as {GPU}"


def _no_amount(name: str, given: Any) -> str | None:
    """What an amount should be, where the schema takes it and Kubernetes does not."""
    amount = quantity(given)
    if amount is None:
        schema = schema_of("v1")
        for field in ("spec", "worker", "resources", "limits"):
            schema = schema["properties"][field]
        taken = not any(schema_problems(given, schema["additionalProperties"]))
        return "must be an amount, as 8 or 16Gi" if taken else None
    if amount < 0:
        return "must not be negative"
    if _extended(name) and amount != amount.to_integral_value():
        return "must be a whole number"
    if name in (GPU, EFA) and amount > MOST_DEVICES:
        return f"must be at most {MOST_DEVICES}"
    return None


def _extended(name: str) -> bool:
    """Whether a resource is a device's, or huge pages: there requests and limits must agree."""
    return ("/" in name and "kubernetes.io/" not in name) or name.startswith("hugepages-")


def gpus(resources: dict[str, Any]) -> int | None:
    """How many GPUs a container asks for; None when it names none, or no number of them."""
    try:
        return devices(resources, GPU)
    except ValueError:
        return None  # told of the amount


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
