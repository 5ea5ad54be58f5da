"""What objects have in common: their head, and the locks on containers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from tandem.operator import names
from tandem.operator.engines import pod_field
from tandem.operator.plan import Plan
from tandem.operator.scaling import at_start
from tandem.operator.wishes import AutoScaling

Object = dict[str, Any]
"""A Kubernetes object, or a part of one, as it is written in YAML."""

PROXY_USER, COLLECTOR_USER, ROUTER_USER, MODEL_USER = 101, 10001, 65532, 1000
"""User ids: those of the images, and for model containers the first of ordinary users."""


def head(
    plan: Plan,
    api_version: str,
    kind: str,
    name: str,
    component: str,
    *,
    system: bool = False,
    annotations: Mapping[str, str] | None = None,
) -> Object:
    """An object with its metadata; `system`: in the system namespace, not the endpoint's."""
    metadata: Object = {
        "name": name,
        "namespace": plan.names.system_namespace if system else plan.names.namespace,
        "labels": plan.names.labels(component),
    }
    if annotations:
        metadata["annotations"] = dict(annotations)
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata}


def deployment_head(
    plan: Plan,
    name: str,
    component: str,
    annotations: Mapping[str, str],
    replicas: int,
    scaling: AutoScaling | None,
    *,
    system: bool = False,
) -> Object:
    """A Deployment's metadata, and in its spec the number of pods. Where that is an autoscaler's, who applies
    the object leaves it alone, and an annotation says with how many the operator starts."""
    start = at_start(plan, scaling, replicas)
    told = dict(annotations) | ({} if start is None else {names.START_ANNOTATION: str(start)})
    made = head(plan, "apps/v1", "Deployment", name, component, system=system, annotations=told)
    return made | {"spec": {"replicas": replicas} if start is None else {}}


def locked(user: int | None) -> Object:
    """A container without root, privileges and a writable root; `user` is its user id, None the image's
    own."""
    context: Object = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    if user is None:
        return context
    return context | {"readOnlyRootFilesystem": True, "runAsNonRoot": True, "runAsUser": user}


def resources(cpu: str, memory: str, cpu_limit: str, memory_limit: str) -> Object:
    return {
        "requests": {"cpu": cpu, "memory": memory},
        "limits": {"cpu": cpu_limit, "memory": memory_limit},
    }


def http_probe(path: str, port: int, **seconds: int) -> Object:
    return {"httpGet": {"path": path, "port": port}, **seconds}


def config_hash(config_maps: Iterable[Object]) -> str:
    """Of the content of config maps; in a pod's annotations it makes pods new when the content is."""
    content = json.dumps([m["data"] for m in config_maps], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def collector(plan: Plan, mount: Object, config_file: str) -> Object:
    """The metrics collector's container."""
    given = plan.spec.metrics_collector_resources
    return {
        "name": names.COLLECTOR_CONTAINER,
        "image": plan.settings.collector_image,
        "args": [f"--config={config_file}"],
        "env": [pod_field("POD_NAME", "metadata.name"), pod_field("NODE_NAME", "spec.nodeName")],
        "ports": [{"name": "metrics", "containerPort": names.COLLECTOR_METRICS_PORT}],
        "livenessProbe": http_probe(
            "/", names.COLLECTOR_HEALTH_PORT, initialDelaySeconds=10, periodSeconds=30, timeoutSeconds=5
        ),
        # No readiness: a collector in trouble is no reason to take its pod's engine out of use.
        "resources": dict(given) if given else resources("50m", "128Mi", "500m", "512Mi"),
        "securityContext": locked(COLLECTOR_USER),
        "volumeMounts": [mount],
    }


def scrape_annotations() -> dict[str, str]:
    """For a Prometheus that looks for pods by the usual annotations."""
    return {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(names.COLLECTOR_METRICS_PORT),
        "prometheus.io/path": "/metrics",
    }
