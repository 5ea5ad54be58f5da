"""Which pools are scaled, and by what: KEDA's triggers from the resource's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from typing import Any
from urllib.parse import urlsplit

from tandem.api.conventions import MOST_ROUTERS
from tandem.operator import names
from tandem.operator.errors import RenderError
from tandem.operator.plan import Plan
from tandem.operator.wishes import AutoScaling, Trigger, autoscaling, section

ROUTER_CPU_PERCENT = 70
"""Of its request, at which a router without a trigger of its own gets company."""


def router_scaling(plan: Plan) -> AutoScaling | None:
    """The router's autoscaler; None also with LMCache, whose prefillers notify one router alone."""
    routing = plan.spec.intelligent_routing_spec
    if routing is None or not plan.routed or plan.lmcache_pd:
        return None
    asked = autoscaling(routing.auto_scaling_spec, _ROUTER)
    if asked is None:
        return None
    return replace(asked, minimum=min(asked.minimum, MOST_ROUTERS), maximum=min(asked.maximum, MOST_ROUTERS))


def at_start(plan: Plan, scaling: AutoScaling | None, replicas: int) -> int | None:
    """With how many pods an autoscaled Deployment starts: as many as the resource says, within the
    autoscaler's bounds. None for one whose number is the resource's alone."""
    if scaling is None or not triggers(plan, scaling):
        return None
    return max(scaling.minimum, min(replicas, scaling.maximum))


def triggers(plan: Plan, scaling: AutoScaling) -> list[dict[str, Any]]:
    """KEDA's triggers; empty where the resource has none: KEDA takes no ScaledObject without."""
    made = [_cloudwatch(plan, trigger) for trigger in scaling.cloudwatch]
    routers = scaling.path == _ROUTER
    signing = authentication_name(plan, system=routers)
    made += [_prometheus(signing, trigger.given) for trigger in scaling.prometheus]
    if not made and routers:
        metadata = {"value": str(ROUTER_CPU_PERCENT), "containerName": names.ROUTER_CONTAINER}
        made.append({"type": "cpu", "metricType": "Utilization", "metadata": metadata})
    return made


def notes(plan: Plan) -> list[str]:
    """What of the resource's autoscaling has no effect."""
    found = [
        f"{pool.scaling.path}: has no trigger, so the number of pods stays as it is set"
        for pool in plan.pools
        if pool.scaling is not None and not triggers(plan, pool.scaling)
    ]
    routing = plan.spec.intelligent_routing_spec
    if plan.lmcache_pd and routing is not None and routing.auto_scaling_spec is not None:
        found.append(f"{_ROUTER}: without effect: prefillers notify one router, so with LMCache there is one")
    scaled = router_scaling(plan)
    if (
        scaled is not None
        and routing is not None
        and scaled != autoscaling(routing.auto_scaling_spec, _ROUTER)
    ):
        found.append(f"{_ROUTER}: an endpoint has at most {MOST_ROUTERS} routers")
    return found


def authentication_name(plan: Plan, *, system: bool) -> str:
    """The TriggerAuthentication by which KEDA signs its queries for Amazon's managed Prometheus; `system`:
    the router's, in the namespace of all routers."""
    return names.short(f"{plan.names.router if system else plan.names.name}-aws")


def needs_authentication(found: list[dict[str, Any]]) -> bool:
    return any("authenticationRef" in trigger for trigger in found)


_ROUTER = "spec.intelligentRoutingSpec.autoScalingSpec"
_METRIC_TYPES = {"Average": "AverageValue", "Value": "Value"}


def _cloudwatch(plan: Plan, trigger: Trigger) -> dict[str, Any]:
    path, given = trigger
    for name in ("metricName", "targetValue"):
        if given.get(name) in (None, ""):
            raise RenderError(f"{path}.{name}: is required")
    dimensions = [section(d) for d in given.get("dimensions") or ()]
    period = given.get("metricCollectionPeriod", 300)
    points = max(1, ceil(given.get("metricCollectionStartTime", 300) / max(1, period)))
    metadata = {
        "awsRegion": _region(plan, path),
        "identityOwner": "operator",
        "namespace": given.get("namespace"),
        "metricName": given["metricName"],
        "dimensionName": ";".join(d["name"] for d in dimensions) or None,
        "dimensionValue": ";".join(d["value"] for d in dimensions) or None,
        "targetMetricValue": _number(given["targetValue"]),
        "activationTargetMetricValue": _number(given.get("activationTargetValue", 0)),
        "minMetricValue": _number(given.get("minValue", 0)),
        "metricStat": given.get("metricStat", "Average"),
        "metricStatPeriod": str(period),
        "metricCollectionTime": str(points * period),  # KEDA takes nothing but whole data points
    }
    return _trigger("aws-cloudwatch", given, metadata)


def _prometheus(signing: str, given: Mapping[str, Any]) -> dict[str, Any]:
    address = given.get("serverAddress")
    metadata = {
        "serverAddress": address,
        "query": given.get("query"),
        "threshold": _number(given.get("targetValue", 0)),
        "activationThreshold": _number(given.get("activationTargetValue", 0)),
        "namespace": given.get("namespace"),
        "customHeaders": given.get("customHeaders"),
    }
    region = _amazon_region(str(address))
    trigger = _trigger("prometheus", given, metadata | ({"awsRegion": region} if region else {}))
    if region:
        trigger["authenticationRef"] = {"name": signing}
    return trigger


def _trigger(kind: str, given: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {"type": kind}
    if given.get("name"):
        made["name"] = given["name"]
    return made | {
        "metricType": _METRIC_TYPES[given.get("metricType", "Average")],
        "useCachedMetrics": given.get("useCachedMetrics", True),
        "metadata": {key: value for key, value in metadata.items() if value is not None},
    }


def _number(value: float) -> str:
    """A number as KEDA reads it: text, whole where it is whole."""
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _region(plan: Plan, path: str) -> str:
    source = plan.spec.model_source_config
    bucket = section(source.s3_storage) if source.model_source_type == "s3" else {}
    region = plan.settings.region or bucket.get("region")
    if not region:
        raise RenderError(f"{path}: its AWS region is not known; give it with --region")
    return str(region)


def _amazon_region(address: str) -> str | None:
    host = urlsplit(address).hostname or ""
    return host.split(".")[1] if host.startswith("aps-workspaces.") else None
