"""Names, labels and ports of all that belongs to an endpoint: HyperPod's own wherever they are known."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from tandem.api import GROUP, Role, conventions
from tandem.engine import pod_ports

PROXY_CONTAINER = conventions.PROXY_CONTAINER
COLLECTOR_CONTAINER = conventions.COLLECTOR_CONTAINER
DOWNLOAD_CONTAINER = conventions.DOWNLOAD_CONTAINER
COPY_CONTAINER = conventions.COPY_CONTAINER
ROUTER_CONTAINER = "router-container"

PROXY_PORT = pod_ports.PROXY_PORT
PROXY_METRICS_PORT = pod_ports.PROXY_METRICS_PORT
COLLECTOR_METRICS_PORT = pod_ports.COLLECTOR_METRICS_PORT
COLLECTOR_HEALTH_PORT = pod_ports.COLLECTOR_HEALTH_PORT
SIDE_CHANNEL_PORT = pod_ports.SIDE_CHANNEL_PORT
ROUTER_PORT = 8000
ROUTER_ADMIN_PORT = 8001
"""Engines, routing decisions and metrics; on the pod's own loopback address only."""
ROUTING_SERVICE_PORT = 443
"""Plain HTTP, as on HyperPod."""
NOTIFY_PORT = 7500
"""Where a router takes the notifications of LMCache's prefillers (`pd_proxy_port`)."""
API_KEYS_FOLDER = "/etc/tandem/api-keys"
API_KEYS_FILE = "keys.yaml"
"""In a Secret, and where the router reads it."""

WEBHOOK = "tandem-inferenceendpointconfigs"
"""The ValidatingWebhookConfiguration that is installed with the operator."""

ROLE_LABEL = f"{GROUP}/dpd-role"
ENDPOINT_LABEL = "tandem.dev/endpoint"
NAMESPACE_LABEL = "tandem.dev/endpoint-namespace"
COMPONENT_LABEL = "tandem.dev/component"
KV_LAYOUT_LABEL = "tandem.dev/kv-layout"
"""Of the pods of a disaggregated endpoint; see `kv_layout`."""
SIZES_ANNOTATION = "tandem.dev/sizes"
CONFIG_ANNOTATION = "tandem.dev/config-hash"
START_ANNOTATION = "tandem.dev/replicas-at-start"
"""On a Deployment whose number of pods is its autoscaler's: with how many it starts."""
ZONE_LABEL = "topology.kubernetes.io/zone"
INSTANCE_TYPE_LABEL = "node.kubernetes.io/instance-type"
PLACEMENT_GROUP_LABEL = "tandem.dev/placement-group"
"""Put on nodes by those who make them: Kubernetes and AWS label no node with its placement group."""

_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def short(name: str, limit: int = 63) -> str:
    """The name itself where Kubernetes takes it for a Service; else one made of its beginning and a hash of
    the whole, so that different names stay different."""
    if _LABEL.fullmatch(name) and len(name) <= limit:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    kept = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not kept[:1].isalpha():
        kept = f"e-{kept}"
    return f"{kept[: limit - 9].rstrip('-')}-{digest}"


def label(name: str) -> str:
    """A name as the value of a label: itself, but where it is too long for one."""
    return name if len(name) <= 63 else short(name)


@dataclass(frozen=True)
class Names:
    """The names of one endpoint's objects. `name` and `namespace` are the resource's."""

    name: str
    namespace: str
    system_namespace: str

    def pool(self, role: Role | None) -> str:
        """Deployment, container, config map, account, policy and service of a role's model pods, or (None)
        of a colocated endpoint's."""
        return short(self.name if role is None else f"{role}-{self.name}")

    @property
    def account(self) -> str:
        """The model pods' service account."""
        return short(f"{self.name}-model")

    def claim(self, digest: str) -> str:
        """The volume claim of the weights; `digest`: of where they lie."""
        return short(f"{self.name}-model-{digest}")

    def volume(self, digest: str) -> str:
        """The volume behind the claim; the whole cluster sees it."""
        return short(f"{self.name}-{self.namespace}-model-{digest}")

    @property
    def router(self) -> str:
        """Deployment, config map, account and policy of the router, in the system namespace; in the
        endpoint's own, the role by which it sees pods, and its binding."""
        return short(f"{self.name}-{self.namespace}-router")

    @property
    def routing_service(self) -> str:
        return short(f"{self.name}-{self.namespace}-routing-service")

    @property
    def notify_service(self) -> str:
        """Where prefillers send LMCache's notifications; apart from what clients use."""
        return short(f"{self.name}-{self.namespace}-router-notify")

    def ingress(self, *, routed: bool) -> str:
        return short(f"alb-{self.name}-{self.namespace}" if routed else f"alb-{self.name}")

    def labels(self, component: str) -> dict[str, str]:
        """What every object of the endpoint carries, so that it can be found and told from others'."""
        return {
            "app.kubernetes.io/managed-by": "tandem",
            ENDPOINT_LABEL: label(self.name),
            NAMESPACE_LABEL: label(self.namespace),
            COMPONENT_LABEL: component,
        }

    def router_selector(self) -> dict[str, str]:
        return {"app": self.router, COMPONENT_LABEL: "router"}

    def pool_selector(self, role: Role | None) -> dict[str, str]:
        """The labels by which a Deployment knows its pods; they never change."""
        labels = {"app": label(self.name), "deploying-service": "hyperpod-inference"}
        if role is None:
            return labels | {COMPONENT_LABEL: "worker"}
        return labels | {COMPONENT_LABEL: role.value, ROLE_LABEL: role.value}

    def pods_of_endpoint(self) -> dict[str, str]:
        """The labels that all model pods of the endpoint share."""
        return {"app": label(self.name), "deploying-service": "hyperpod-inference"}
