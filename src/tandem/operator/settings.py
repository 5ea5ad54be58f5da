"""What is the same for all endpoints of a cluster: images, the system namespace, where metrics go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any


def _router_image() -> str:
    return f"ghcr.io/tandem-dpd/router:{version('tandem-dpd')}"


@dataclass(frozen=True, kw_only=True)
class Settings:
    system_namespace: str = "hyperpod-inference-system"
    """Where routers, their services and their load balancers are."""
    router_image: str = field(default_factory=_router_image)
    """Tandem's own, of this version."""
    proxy_image: str = "nginxinc/nginx-unprivileged:1.29-alpine"
    collector_image: str = "otel/opentelemetry-collector-contrib:0.165.0"
    region: str | None = None
    """The AWS region, where the resource does not name one."""
    remote_write_url: str | None = None
    """Where collectors write metrics to (Prometheus remote write), besides offering them to be scraped."""
    workers_as_root: bool = False
    """True: model containers run as their image says, with a writable root; for images that need it."""
    model_config: Mapping[str, Any] | None = None
    """The model's `config.json`, from which the size of its KV cache is read."""
