"""The operator in a cluster, and endpoints that it makes of resources: what their user has and sees."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from .endpoint import ENDPOINT, HERE, SYSTEM, Endpoint, manifest
from .kube import Cluster, Object, ready

DEPLOY = HERE.parents[1] / "deploy"
OPERATOR = "hyperpod-inference-operator-controller-manager"
GROUP = "inference.sagemaker.aws.amazon.com"
ENDPOINTS = f"/apis/{GROUP}/v1/inferenceendpointconfigs"
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases"
LEASE = "tandem-operator"
METRICS = 8080


@dataclass(frozen=True)
class Operator:
    """As `kubectl apply -k deploy/` installs it."""

    cluster: Cluster

    def install(self, *words: str) -> str:
        return self.cluster.kubectl("apply", *words, "-k", str(DEPLOY))

    def every_pod(self) -> list[Object]:
        """Also those that are ending."""
        return self.cluster.pods(SYSTEM, "app.kubernetes.io/component=operator")

    def pods(self) -> list[Object]:
        """Without those that are ending."""
        return [pod for pod in self.every_pod() if "deletionTimestamp" not in pod["metadata"]]

    def ready(self, count: int = 1) -> bool:
        pods = self.pods()
        return len(pods) == count and all(map(ready, pods))

    def holder(self) -> str:
        """The name of the pod that leads; empty where none does."""
        return holder(self.cluster.get(f"{LEASES}/{LEASE}") or {"spec": {}})

    def leading(self) -> list[str]:
        """The names of pods that say of themselves that they lead, of those that answer."""
        found = list(filter(self._says_it_leads, self.every_pod()))
        if len(found) > 1:  # between their answers one may have followed the other
            found = list(filter(self._says_it_leads, found))
        return [pod["metadata"]["name"] for pod in found]

    def _says_it_leads(self, pod: Object) -> bool:
        return "tandem_operator_leads 1.0" in self._metrics(pod)

    def _metrics(self, pod: Object) -> str:
        with suppress(httpx.HTTPError, KeyError):
            url = f"http://{pod['status']['podIP']}:{METRICS}/metrics"
            return self.cluster.http.get(url, timeout=5).text  # who has ended does not refuse
        return ""

    def leads(self) -> bool:
        """Whether the one pod that there is leads."""
        return [pod["metadata"]["name"] for pod in self.pods()] == [self.holder()]

    def requests(self) -> float:
        """To the API server so far, of all verbs, by the pod that leads."""
        (pod,) = [pod for pod in self.pods() if pod["metadata"]["name"] == self.holder()]
        page = self._metrics(pod)
        lines = [line for line in page.splitlines() if line.startswith("tandem_operator_requests_total{")]
        assert lines, page
        return sum(float(line.split()[1]) for line in lines)


def holder(lease: Object) -> str:
    """The name of the pod that a lease names; empty where it names none."""
    return str(lease["spec"].get("holderIdentity") or "").rpartition("-")[0]


@dataclass
class Managed(Endpoint):
    """An endpoint that its user applies, and the operator makes."""

    def apply(self, folder: Path | None = None) -> None:
        self.cluster.apply([self.resource])

    def delete(self, *words: str) -> None:
        self.cluster.kubectl("delete", "inferenceendpointconfig", self.name, "-n", self.namespace, *words)

    @property
    def path(self) -> str:
        return f"/apis/{GROUP}/v1/namespaces/{self.namespace}/inferenceendpointconfigs/{self.name}"

    def status(self) -> Object:
        """Empty as long as there is none."""
        found = self.cluster.get(self.path) or {}
        status: Object = found.get("status") or {}
        return status

    def state(self) -> str:
        return str(self.status().get("state", ""))

    def condition(self, kind: str) -> Object:
        """Empty where it is not there."""
        return next((c for c in self.status().get("conditions", ()) if c["type"] == kind), {})

    def complete(self) -> bool:
        """Whether status says so, of the resource as it is now."""
        found = self.cluster.get(self.path)
        status = found.get("status") or {}
        seen = status.get("observedGeneration") == found["metadata"]["generation"]
        return seen and status["state"] == "DeploymentComplete"

    def left(self) -> list[str]:
        """What there still is of it, in either namespace."""
        kinds = self.cluster.kubectl("api-resources", "--verbs=list", "-o", "name").split()
        every = ",".join(kind for kind in kinds if not kind.startswith("events"))
        words = ("-A", "-l", f"{ENDPOINT}={self.name}", "-o", "name", "--ignore-not-found")
        return self.cluster.kubectl("get", every, *words).split()


@contextmanager
def managed(cluster: Cluster, resource: Object, model: Path) -> Iterator[Managed]:
    """An endpoint that is applied, in a namespace where the config map `tiny` has the model's files.

    After the block it is deleted, without waiting for its pods."""
    endpoint = Managed(cluster, resource)
    furnish(cluster, endpoint.namespace, model)
    endpoint.apply()
    try:
        yield endpoint
    finally:
        endpoint.delete("--wait=false", "--ignore-not-found")


@contextmanager
def nixl_pair(cluster: Cluster, namespace: str, model: Path, *, metrics: bool) -> Iterator[Managed]:
    """Two prefillers and two decoders over NIXL, in use; with collectors where `metrics`."""
    resource = manifest("nixl", namespace, model)
    resource["spec"]["metrics"]["enabled"] = metrics
    with managed(cluster, resource, model) as endpoint:
        cluster.wait_for("the endpoint", endpoint.complete, 90)
        yield endpoint


def has_room(cluster: Cluster) -> None:
    """Wait until pods that are on their way out, in any namespace, have gone: until then what they asked for
    is taken, and nodes of two cores soon have no more."""

    def ending() -> list[str]:
        pods = cluster.get("/api/v1/pods")["items"]
        return [pod["metadata"]["name"] for pod in pods if "deletionTimestamp" in pod["metadata"]]

    cluster.wait_for("former pods to go", lambda: not ending(), 180)


def furnish(cluster: Cluster, namespace: str, model: Path) -> None:
    """Make the namespace and its config map, where they are not there."""
    if cluster.get(f"/api/v1/namespaces/{namespace}") is None:
        cluster.kubectl("create", "namespace", namespace)
    if cluster.get(f"/api/v1/namespaces/{namespace}/configmaps/tiny") is None:
        cluster.kubectl("create", "configmap", "tiny", "-n", namespace, f"--from-file={model}")


@dataclass
class Seen:
    """What a watch has shown of an object, oldest first."""

    objects: list[Object] = field(default_factory=list)

    def values(self, read: Callable[[Object], Any]) -> list[Any]:
        """What was read of it, each time that it became another."""
        read_ = [read(found) for found in self.objects]
        return [*read_[:1], *(after for before, after in pairwise(read_) if after != before)]

    @property
    def states(self) -> list[str]:
        states = self.values(lambda found: found.get("status", {}).get("state"))
        return [state for state in states if state]


@contextmanager
def watching(cluster: Cluster, path: str, **query: str) -> Iterator[Seen]:
    """All that a watch shows inside the block: of one object (`fieldSelector`) or of several."""
    seen, stop, opened = Seen(), threading.Event(), threading.Event()

    def watch() -> None:
        params: Mapping[str, str] = {"watch": "true", "timeoutSeconds": "300", **query}
        with (
            suppress(httpx.HTTPError, httpx.StreamError),
            cluster.api.stream("GET", path, params=params, timeout=300) as reply,
        ):
            opened.set()
            for line in reply.iter_lines():
                if stop.is_set():
                    return
                seen.objects.append(json.loads(line)["object"])

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    assert opened.wait(10)
    try:
        yield seen
    finally:
        stop.set()
