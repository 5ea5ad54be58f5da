"""What a resource asks for, section by section, with the schema's defaults where it is silent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import BaseModel

from tandem.api import Endpoint, Spec
from tandem.api.conventions import PLAIN_PATH, is_plain_path
from tandem.operator.errors import RenderError


def section(value: Any) -> dict[str, Any]:
    """A section of the resource under its own field names; empty where it is left out."""
    if value is None:
        return {}
    if isinstance(value, BaseModel):
        return value.model_dump(by_alias=True, exclude_unset=True)
    return dict(value)


@dataclass(frozen=True)
class Metrics:
    enabled: bool
    scrape_seconds: int
    path: str
    port: int
    """The engine's. vLLM has its metrics where it serves, so the schema's 8080 stands for that port."""


def metrics(spec: Spec) -> Metrics:
    given = section(spec.metrics)
    model = section(given.get("modelMetrics"))
    port = model.get("port", 8080)
    serving = spec.worker.model_invocation_port.container_port
    return Metrics(
        enabled=given.get("enabled", True),
        scrape_seconds=given.get("metricsScrapeIntervalSeconds", 15),
        path=_path(model.get("path", "/metrics"), "spec.metrics.modelMetrics.path"),
        port=serving if port == 8080 else port,
    )


@dataclass(frozen=True)
class LoadBalancer:
    health_path: str
    algorithm: str
    idle_seconds: int | None
    """None: not asked for; nor is 60, the schema's default, which would cut long answers off."""


def load_balancer(spec: Spec) -> LoadBalancer:
    given = section(spec.load_balancer)
    idle = given.get("idleTimeoutSeconds", 60)
    return LoadBalancer(
        health_path=_path(given.get("healthCheckPath", "/ping"), "spec.loadBalancer.healthCheckPath"),
        algorithm=given.get("routingAlgorithm", "least_outstanding_requests"),
        idle_seconds=None if idle == 60 else idle,
    )


class Trigger(NamedTuple):
    path: str
    """Its field path."""
    given: Mapping[str, Any]
    """Its fields are the schema's."""


@dataclass(frozen=True)
class AutoScaling:
    """One autoscaler; its fields are the schema's."""

    path: str
    """The section's field path."""
    minimum: int
    maximum: int
    polling: int
    cooldown: int
    initial_cooldown: int
    down_stabilization: int
    up_stabilization: int
    cloudwatch: tuple[Trigger, ...]
    prometheus: tuple[Trigger, ...]


def autoscaling(value: Any, path: str) -> AutoScaling | None:
    """None where the section is left out."""
    if value is None:
        return None
    given = section(value)
    return AutoScaling(
        path=path,
        minimum=given.get("minReplicaCount", 1),
        maximum=given.get("maxReplicaCount", 5),
        polling=given.get("pollingInterval", 30),
        cooldown=given.get("cooldownPeriod", 300),
        initial_cooldown=given.get("initialCooldownPeriod", 300),
        down_stabilization=given.get("scaleDownStabilizationTime", 300),
        up_stabilization=given.get("scaleUpStabilizationTime", 0),
        cloudwatch=_triggers(given, f"{path}.cloudWatchTrigger"),
        prometheus=_triggers(given, f"{path}.prometheusTrigger"),
    )


def _triggers(scaling: Mapping[str, Any], path: str) -> tuple[Trigger, ...]:
    """The list wins over the single one."""
    name = path.rpartition(".")[2]
    if listed := scaling.get(f"{name}List"):
        return tuple(Trigger(f"{path}List[{i}]", section(given)) for i, given in enumerate(listed))
    return (Trigger(path, section(scaling[name])),) if scaling.get(name) else ()


def instance_types(spec: Spec) -> tuple[str, ...]:
    """Those allowed, best first; empty where nodes are chosen otherwise."""
    return tuple(spec.instance_types or ([spec.instance_type] if spec.instance_type else []))


def routed(endpoint: Endpoint) -> bool:
    """Whether the endpoint has a router: always with pdSpec, else where it is asked for."""
    routing = endpoint.spec.intelligent_routing_spec
    return endpoint.spec.pd_spec is not None or (routing is not None and routing.enabled)


def invocation_path(spec: Spec) -> str:
    return _path(spec.invocation_path, "spec.invocationEndpoint")


def deploy_seconds(spec: Spec) -> int:
    seconds = spec.max_deploy_time_in_seconds
    return 3600 if seconds is None else int(seconds)


def _path(path: str, field: str) -> str:
    """A path that configurations can hold as it is."""
    if not is_plain_path(path):
        raise RenderError(f"{field}: must be {PLAIN_PATH} (it is {path!r})")
    return path
