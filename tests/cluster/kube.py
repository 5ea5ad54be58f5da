"""A running Kubernetes, as tests use it: kubectl, its API, images, and HTTP to what runs in it."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

Object = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Cluster:
    enter: tuple[str, ...]
    """What stands before a command so that it runs where pods and services are reachable."""
    environment: Mapping[str, str]
    """Of these commands."""
    api: httpx.Client
    """Kubernetes' API, as in `api.get("/api/v1/nodes")`: a hundred times quicker than kubectl."""
    http: httpx.Client
    """Its requests start inside: names of services and addresses of pods count."""
    make_image: Callable[[str, Sequence[str]], None] | None = None
    """None: the cluster has the images that the tests name."""

    def run(
        self, *argv: str, stdin: str | None = None, seconds: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside, whatever its exit status."""
        return subprocess.run(
            [*self.enter, *argv],
            env=self.environment,
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
        )

    def kubectl(self, *words: str, stdin: str | Sequence[Object] | None = None) -> str:
        """What kubectl prints; the test fails where it fails. `stdin`: YAML, or objects."""
        if not (stdin is None or isinstance(stdin, str)):
            stdin = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(stdin)})
        done = self.run("kubectl", *words, stdin=stdin, seconds=120)
        assert done.returncode == 0, f"kubectl {' '.join(words)}:\n{done.stdout}{done.stderr}"
        return done.stdout

    def apply(self, objects: str | Sequence[Object]) -> str:
        """`kubectl apply -f -` of YAML, or of objects."""
        return self.kubectl("apply", "-f", "-", stdin=objects)

    def image(self, name: str, *argv: str) -> str:
        """See to it that pods can use an image with this name and entrypoint; returns the name.

        Its containers have /usr of this machine, in /usr/local/bin `tandem`, `vllm` (a simulated engine) and
        `python3` of these tests, and nothing else; read-only.
        """
        if self.make_image is not None:
            self.make_image(name, argv)
        return name

    def get(self, path: str, **query: str) -> Any:
        """What the API has at a path; None where it has nothing."""
        reply = self.api.get(path, params=query)
        if reply.status_code == 404:
            return None
        assert reply.status_code == 200, f"{path}: {reply.status_code} {reply.text}"
        return reply.json()

    def pods(self, namespace: str, selector: str = "") -> list[Object]:
        """The pods of a namespace, those that are ending too."""
        found: list[Object] = self.get(f"/api/v1/namespaces/{namespace}/pods", labelSelector=selector)[
            "items"
        ]
        return found

    def wait_for(self, what: str, look: Callable[[], T | None], seconds: float = 60) -> T:
        """What `look` returns, as soon as that is true. Else the test fails after so many seconds; how the
        cluster is then is in its report."""
        end = time.monotonic() + seconds
        while True:
            seen = look()
            if seen:
                return seen
            assert time.monotonic() < end, f"{what}: not after {seconds:g} s; the last look gave {seen!r}"
            time.sleep(0.2)


def ready(pod: Object) -> bool:
    """Whether a pod is in use: all its containers are ready, and it is not ending."""
    conditions = {c["type"]: c["status"] for c in pod.get("status", {}).get("conditions", ())}
    return conditions.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]
