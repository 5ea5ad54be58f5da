"""An endpoint in a cluster, as its user has it: rendered, applied by hand, asked by HTTP."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from .kube import Cluster, Object

HERE = Path(__file__).parent
SYSTEM = "hyperpod-inference-system"
COMPONENT = "tandem.dev/component"
ENDPOINT = "tandem.dev/endpoint"

SHORT = "What is disaggregated prefill-decode in one sentence?"
LONG = "The quick brown fox jumps over the lazy dog. " * 20
"""Over 64 tokens of any tokenizer, which is the threshold of the manifests here."""


def manifest(name: str, namespace: str, model: Path | None = None) -> Object:
    """A manifest of `manifests/`, in a namespace, its model in a folder."""
    text = (HERE / f"manifests/{name}.yaml").read_text("utf-8").replace("MODEL", str(model))
    loaded: Object = yaml.safe_load(text)
    loaded["metadata"]["namespace"] = namespace
    return loaded


def rendered(resource: Object, folder: Path) -> str:
    """What `tandem render` prints of a resource."""
    file = folder / f"{resource['metadata']['name']}.yaml"
    file.write_text(yaml.safe_dump(resource), "utf-8")
    argv = [sys.executable, "-m", "tandem", "render", "-f", str(file)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@dataclass
class Endpoint:
    cluster: Cluster
    resource: Object
    objects: str = field(default="", init=False)
    """What was applied last."""

    @property
    def name(self) -> str:
        return str(self.resource["metadata"]["name"])

    @property
    def namespace(self) -> str:
        return str(self.resource["metadata"]["namespace"])

    @property
    def model(self) -> str:
        """The name by which it is asked for."""
        args: list[str] = self.resource["spec"]["worker"]["args"]
        flag = "--served-model-name"
        return args[args.index(flag) + 1] if flag in args else "/opt/ml/model"

    @property
    def url(self) -> str:
        """Of the routing service, as HyperPod's guide has it."""
        return f"http://{self.name}-{self.namespace}-routing-service.{SYSTEM}.svc.cluster.local:443"

    def apply(self, folder: Path) -> None:
        """Render the resource as it is now and apply all that comes of it."""
        self.objects = rendered(self.resource, folder)
        self.cluster.apply(self.objects)

    def delete(self, *words: str) -> None:
        self.cluster.kubectl("delete", "-f", "-", *words, stdin=self.objects)

    def pods(self, component: str) -> list[Object]:
        """The pods of prefill, decode, worker or router, without those that are ending."""
        namespace = SYSTEM if component == "router" else self.namespace
        found = self.cluster.pods(namespace, f"{ENDPOINT}={self.name},{COMPONENT}={component}")
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def engines(self) -> set[str]:
        """The names of the engines' pods."""
        pods = [pod for component in ("prefill", "decode", "worker") for pod in self.pods(component)]
        return {pod["metadata"]["name"] for pod in pods}

    def settled(self) -> bool:
        """Whether each Deployment is as it was asked for: its newest pods ready, no older ones in use."""
        found = self.cluster.get("/apis/apps/v1/deployments", labelSelector=f"{ENDPOINT}={self.name}")[
            "items"
        ]
        return bool(found) and all(map(_settled, found))

    def in_use(self) -> bool:
        """Whether the Deployments are settled, and the router answers."""
        if not self.settled():
            return False
        try:
            return self.cluster.http.get(f"{self.url}/ready").status_code == 200
        except httpx.TransportError:
            return False

    def wait_until_in_use(self, seconds: float = 90) -> None:
        self.cluster.wait_for(f"{self.name} in use", self.in_use, seconds)

    def body(self, prompt: str, **fields: Any) -> Object:
        message = {"role": "user", "content": prompt}
        return {"model": self.model, "messages": [message], "max_tokens": 8, "temperature": 0, **fields}

    def ask(self, prompt: str, **fields: Any) -> httpx.Response:
        """A chat completion, through the router's service."""
        return self.cluster.http.post(f"{self.url}/v1/chat/completions", json=self.body(prompt, **fields))

    @contextmanager
    def stream(self, prompt: str, **fields: Any) -> Iterator[httpx.Response]:
        """A streamed answer, for `chunks`."""
        body = self.body(prompt, stream=True, **fields)
        with self.cluster.http.stream("POST", f"{self.url}/v1/chat/completions", json=body) as reply:
            if reply.status_code != 200:
                reply.read()
            yield reply

    def log(self, pod: Mapping[str, Any], container: str) -> str:
        metadata = pod["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/log"
        reply = self.cluster.api.get(path, params={"container": container})
        assert reply.status_code == 200, reply.text
        return reply.text

    def routed(self, reply: httpx.Response) -> list[str]:
        """The router's log lines on the request of a reply."""
        request = reply.headers["x-request-id"]
        logs = [self.log(pod, "router-container") for pod in self.pods("router")]
        return [line for log in logs for line in log.splitlines() if request in line]


@contextmanager
def applied(
    cluster: Cluster, resource: Object, model: Path | None, folder: Path, *, seconds: float = 90
) -> Iterator[Endpoint]:
    """An endpoint in use after so many seconds, in a namespace made for it; with a `model` the config map
    `tiny` there has its files.

    After the block it is deleted, without waiting for its pods. `folder` is for the manifest."""
    endpoint = Endpoint(cluster, resource)
    cluster.kubectl("create", "namespace", endpoint.namespace)
    if model is not None:
        cluster.kubectl("create", "configmap", "tiny", "-n", endpoint.namespace, f"--from-file={model}")
    endpoint.apply(folder)
    try:
        endpoint.wait_until_in_use(seconds)
        yield endpoint
    finally:
        endpoint.delete("--wait=false", "--ignore-not-found")


def address(pod: Object, port: int = 8081) -> str:
    """Of a pod's reverse proxy, or of another port of it."""
    return f"http://{pod['status']['podIP']}:{port}"


class Cut(Exception):
    """A stream was ended by an error event: what it had begun cannot be taken back."""


def chunks(reply: httpx.Response) -> Iterator[Object]:
    """The chunks of a streamed answer. Raises Cut where an error event ends it; fails where neither that
    nor [DONE] does."""
    assert reply.status_code == 200, reply.text
    for line in reply.iter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            chunk: Object = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise Cut(chunk["error"])
            yield chunk
    raise AssertionError("the stream ended without [DONE]")


def _settled(deployment: Object) -> bool:
    wanted, status = deployment["spec"]["replicas"], deployment.get("status", {})
    counts = [status.get(name, 0) for name in ("replicas", "updatedReplicas", "readyReplicas")]
    seen = status.get("observedGeneration") == deployment["metadata"]["generation"]
    return seen and counts == [wanted] * 3
