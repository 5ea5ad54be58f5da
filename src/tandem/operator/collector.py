"""The configuration of the OpenTelemetry collectors: what they scrape, and where figures go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import yaml

from tandem.operator import names
from tandem.operator.plan import Plan
from tandem.operator.settings import Settings


def pool_collector(plan: Plan) -> str:
    """Of a model pod: the engine's metrics and the proxy's."""
    return _config(
        plan,
        {
            "engine": (f"127.0.0.1:{plan.metrics.port}", plan.metrics.path),
            "proxy": (f"127.0.0.1:{names.PROXY_METRICS_PORT}", "/metrics"),
        },
    )


def router_collector(plan: Plan) -> str:
    """Of a router pod: the router's metrics, which its admin port has."""
    return _config(plan, {"router": (f"127.0.0.1:{names.ROUTER_ADMIN_PORT}", "/metrics")})


def _config(plan: Plan, targets: Mapping[str, tuple[str, str]]) -> str:
    interval = f"{plan.metrics.scrape_seconds}s"
    jobs = [
        {
            "job_name": name,
            "scrape_interval": interval,
            "scrape_timeout": f"{min(10, plan.metrics.scrape_seconds)}s",
            "metrics_path": path,
            "honor_labels": True,  # vLLM's model_name is the served one, by which its dashboards look
            "static_configs": [{"targets": [address], "labels": {"metric_source": name, **_labels(plan)}}],
        }
        for name, (address, path) in targets.items()
    ]
    exporters: dict[str, Any] = {
        "prometheus": {"endpoint": f"0.0.0.0:{names.COLLECTOR_METRICS_PORT}", "metric_expiration": "5m"}
    }
    extensions: dict[str, Any] = {"health_check": {"endpoint": f"0.0.0.0:{names.COLLECTOR_HEALTH_PORT}"}}
    if plan.settings.remote_write_url:
        exporters["prometheusremotewrite"] = _remote_write(plan.settings, extensions)
    config = {
        "receivers": {"prometheus": {"config": {"scrape_configs": jobs}}},
        "processors": {
            "memory_limiter": {"check_interval": "5s", "limit_percentage": 80, "spike_limit_percentage": 20},
            "batch": {},
        },
        "exporters": exporters,
        "extensions": extensions,
        "service": {
            "extensions": list(extensions),
            "telemetry": {"metrics": {"level": "none"}, "logs": {"level": "warn"}},
            "pipelines": {
                "metrics": {
                    "receivers": ["prometheus"],
                    "processors": ["memory_limiter", "batch"],
                    "exporters": list(exporters),
                }
            },
        },
    }
    head = f"# The metrics collector of {plan.names.namespace}/{plan.names.name}: see service.pipelines.\n"
    return head + yaml.safe_dump(config, sort_keys=False, width=110)


def _labels(plan: Plan) -> dict[str, str]:
    """HyperPod's labels; what differs from pod to pod comes from the collector's environment. The collector
    would fill in `${file:…}` too, and show everybody what it reads: of the resource's own text it is told to
    take nothing so."""
    return {
        "resource_name": plan.names.name,
        "namespace": plan.names.namespace,
        "model_name": plan.spec.model_name.replace("$", "$$"),
        "pod_name": "${env:POD_NAME}",
        "node_name": "${env:NODE_NAME}",
    }


def _remote_write(settings: Settings, extensions: dict[str, Any]) -> dict[str, Any]:
    """Signed for Amazon's managed Prometheus, which the address tells."""
    url = str(settings.remote_write_url)
    host = urlsplit(url).hostname or ""
    exporter: dict[str, Any] = {"endpoint": url}
    if host.startswith("aps-workspaces."):
        extensions["sigv4auth"] = {"service": "aps", "region": host.split(".")[1]}
        exporter["auth"] = {"authenticator": "sigv4auth"}
    return exporter
