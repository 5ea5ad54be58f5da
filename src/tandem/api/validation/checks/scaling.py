"""Autoscaling: bounds, triggers that cannot work, and sections without effect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tandem.api.conventions import MOST_ROUTERS
from tandem.api.crd.structural import Location
from tandem.api.validation.checks.source import REGION, bucket_region
from tandem.api.validation.report import Found
from tandem.api.validation.schema import bounds
from tandem.api.validation.subject import Subject, location, objects_in, whole

_SCALED = {
    "spec.autoScalingSpec": "spec.replicas",
    "spec.pdSpec.autoScalingSpec.prefillAutoScaling": "spec.pdSpec.prefillSpec.replicas",
    "spec.pdSpec.autoScalingSpec.decodingAutoScaling": "spec.pdSpec.decodingSpec.replicas",
    "spec.intelligentRoutingSpec.autoScalingSpec": None,
}
"""Each autoscaler, and the field with the number of pods that it scales."""

_REQUIRED = {"cloudWatchTrigger": ("metricName", "targetValue"), "prometheusTrigger": ()}
_NEEDED = {
    "cloudWatchTrigger": ("namespace", "dimensions"),
    "prometheusTrigger": ("serverAddress", "query", "targetValue"),
}
"""What KEDA cannot do without, besides what is required."""

_SECONDS_OF_POINTS = (1, 5, 10, 30)
"""Of CloudWatch's data points below a minute; else they are of whole minutes."""


def scaling_checks(subject: Subject) -> Iterator[Found]:
    if subject.disaggregated and subject.has("spec.autoScalingSpec"):
        yield Found(
            "IEC503",
            location("spec.autoScalingSpec"),
            "has no effect with pdSpec; use spec.pdSpec.autoScalingSpec, which scales each role",
        )
    for path, replicas in _SCALED.items():
        if not subject.has(path) or (path == "spec.autoScalingSpec" and subject.disaggregated):
            continue
        scaling = subject.object(path)
        if replicas is None:
            yield from _routers(scaling, location(path))
        yield from _bounds(subject, path, replicas)
        yield from _triggers(scaling, location(path))
        if _has_cloudwatch(scaling) and not bucket_region(subject):
            yield Found("IEC724", location(path), f"asks CloudWatch, in an AWS region; {REGION}")
        if replicas and not any(scaling.get(f"{kind}{end}") for kind in _NEEDED for end in ("", "List")):
            said = "has no trigger, so the number of pods stays as it is set; add one"
            yield Found("IEC715", location(path), said)


def _routers(scaling: dict[str, Any], at: Location) -> Iterator[Found]:
    for name in ("minReplicaCount", "maxReplicaCount"):
        count = whole(scaling.get(name))
        if count is not None and count > MOST_ROUTERS:
            said = f"is {count}; an endpoint has at most {MOST_ROUTERS} routers: no quota of its own counts"
            yield Found("IEC726", (*at, name), said)


def _has_cloudwatch(scaling: dict[str, Any]) -> bool:
    return bool(scaling.get("cloudWatchTriggerList") or scaling.get("cloudWatchTrigger"))


def _bounds(subject: Subject, path: str, replicas: str | None) -> Iterator[Found]:
    low, high = bounds(subject.object(path))
    if low is None or high is None or low > high:
        return
    if high == 0:
        yield Found(
            "IEC704", location(path, "maxReplicaCount"), "is 0: no pod would ever run; it must be at least 1"
        )
    given = subject.number(replicas) if replicas else None
    if replicas and given is not None and not low <= given <= high:
        bound = (
            f"below {path}.minReplicaCount, {low}" if given < low else f"above {path}.maxReplicaCount, {high}"
        )
        yield Found("IEC701", location(replicas), f"is {given}, {bound}: autoscaling changes it at once")


def _triggers(scaling: dict[str, Any], at: Location) -> Iterator[Found]:
    for name in _NEEDED:
        alone, listed = scaling.get(name), scaling.get(f"{name}List")
        if listed and alone is not None:
            yield Found(
                "IEC506",
                (*at, name),
                f"has no effect beside {name}List: the list wins. Put the trigger into the list",
            )
        elif isinstance(alone, dict):
            yield from _trigger(alone, (*at, name), name)
        for where, trigger in objects_in(listed, (*at, f"{name}List")):
            yield from _trigger(trigger, where, name)


def _trigger(trigger: dict[str, Any], at: Location, kind: str) -> Iterator[Found]:
    for name in _REQUIRED[kind]:
        if trigger.get(name) in (None, ""):
            yield Found("IEC231", (*at, name), "is required")
    missing = [name for name in _NEEDED[kind] if trigger.get(name) in (None, "", [])]
    if missing:
        yield Found("IEC702", at, f"does not scale anything without {', '.join(missing)}")
    if whole(trigger.get("targetValue")) == 0:
        yield Found("IEC702", (*at, "targetValue"), "must be greater than 0: the metric is divided by it")
    if kind == "cloudWatchTrigger":
        yield from _points(trigger, at)


def _points(trigger: dict[str, Any], at: Location) -> Iterator[Found]:
    """How long CloudWatch's data points are, and how far back they are asked for."""
    start, period = (whole(trigger.get(f"metricCollection{name}", 300)) for name in ("StartTime", "Period"))
    if period is not None and (period < 1 or (period % 60 and period not in _SECONDS_OF_POINTS)):
        said = (
            f"is {period}: CloudWatch's data points are of 1, 5, 10 or 30 seconds, or of whole minutes, so "
        )
        yield Found("IEC702", (*at, "metricCollectionPeriod"), f"{said}nothing is scaled")
    if start is not None and period is not None and start < period:
        where = (
            "metricCollectionStartTime"
            if "metricCollectionStartTime" in trigger
            else "metricCollectionPeriod"
        )
        yield Found(
            "IEC703",
            (*at, where),
            f"metricCollectionStartTime ({start}) must be at least metricCollectionPeriod ({period}): "
            f"less holds no "
            "whole data point",
        )
