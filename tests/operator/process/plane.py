"""A control plane with Kubernetes' own controllers, and operators as processes of their own.

Pods are made ready by kwok where nodes are asked for: they are objects, and nothing runs in them.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tandem.api.crd import crd
from tandem.kube import Client, Object, connect
from tandem.kube import resources as kinds
from tandem.operator.control.watches import ENDPOINT, OWNED

from ...api.conftest import ApiServer, _free_ports, _process, started
from ..endpoints import ROUTER_NAMESPACE, changed

T = TypeVar("T")

_QUICK = ("--kube-api-qps=1000", "--kube-api-burst=2000")
_MANY = "10000"
INSTANCE_TYPE = "ml.p5en.48xlarge"


@dataclass(frozen=True)
class Plane:
    server: ApiServer
    folder: Path

    @contextmanager
    def operator(self, *flags: str, name: str = "operator") -> Iterator[Operator]:
        """`tandem operator` as a process, without webhooks unless `flags` ask for them; killed at the end."""
        health, metrics = _free_ports(2)
        log = self.folder / f"{name}-{health}.log"
        argv = [
            *(sys.executable, "-m", "tandem", "operator", f"--kubeconfig={self.server.kubeconfig}"),
            *(f"--health-port={health}", f"--metrics-port={metrics}"),
            *(flags if any(f.startswith("--webhook-port") for f in flags) else ("--webhook-port=0", *flags)),
        ]
        with log.open("wb") as out:
            process = subprocess.Popen(argv, stdout=out, stderr=out, env=os.environ | {"POD_NAME": name})
        try:
            yield Operator(process, metrics, log)
        finally:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class Operator:
    process: subprocess.Popen[bytes]
    metrics_port: int
    log_file: Path

    @property
    def log(self) -> str:
        return self.log_file.read_text("utf-8", "replace")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def metrics(self) -> dict[str, float]:
        """By name, or name and label's value (`tandem_operator_requests_total patch`); empty before it
        serves them."""
        try:
            url = f"http://127.0.0.1:{self.metrics_port}/metrics"
            with urllib.request.urlopen(url, timeout=5) as answer:
                text = answer.read().decode()
        except OSError:
            return {}
        found = re.findall(r'^(\w+)(?:\{\w+="([^"]*)"\})? (\S+)$', text, re.MULTILINE)
        return {f"{name} {label}".strip(): float(value) for name, label, value in found}

    def requests(self) -> dict[str, int]:
        """Sent so far, by verb."""
        head = "tandem_operator_requests_total "
        return {name[len(head) :]: int(v) for name, v in self.metrics().items() if name.startswith(head)}

    def leads(self) -> bool:
        return self.metrics().get("tandem_operator_leads") == 1

    def memory(self) -> int:
        """Bytes of its resident memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)
        assert found
        return int(found[1]) * 1024

    def cpu(self) -> float:
        """Seconds of CPU that it has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def plane(assets: Path, folder: Path, *, nodes: bool = False) -> Iterator[Plane]:
    """With controllers; with `nodes` also with a scheduler and a fake node of any size."""
    with ExitStack() as stack:
        server = stack.enter_context(started(assets, folder))
        server.install(crd())
        server.kubectl("create", "namespace", ROUTER_NAMESPACE)
        kubeconfig = f"--kubeconfig={server.kubeconfig}"
        common = (kubeconfig, "--leader-elect=false", "--secure-port=0", *_QUICK)
        controllers = [
            *("kube-controller-manager", *common, "--concurrent-deployment-syncs=20"),
            *("--concurrent-replicaset-syncs=20", "--concurrent-namespace-syncs=20"),
            # Fake nodes have no heart whose beats could be missed.
            "--node-monitor-grace-period=24h",
        ]
        stack.enter_context(_process(assets, controllers, folder / "controllers.log"))
        if nodes:
            stack.enter_context(_process(assets, ["kube-scheduler", *common], folder / "scheduler.log"))
            done = server.kubectl("create", "-f", "-", stdin=_node())
            assert done.returncode == 0, done.stderr
            kwok = [
                *("kwok", kubeconfig, f"--config={assets}/kwok-stages.yaml", "--enable-crds="),
                "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",
            ]
            stack.enter_context(_process(assets, kwok, folder / "kwok.log"))
        yield Plane(server, folder)


def _node() -> Object:
    room = {"cpu": "1M", "memory": "1Pi", "pods": "1M", "hugepages-2Mi": "1Pi"}
    room |= {"nvidia.com/gpu": _MANY, "vpc.amazonaws.com/efa": _MANY, "ephemeral-storage": "1Pi"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": "fake",
            "annotations": {"kwok.x-k8s.io/node": "fake"},
            "labels": {
                "kubernetes.io/hostname": "fake",
                "node.kubernetes.io/instance-type": INSTANCE_TYPE,
                "topology.kubernetes.io/zone": "a",
            },
        },
        "status": {"allocatable": room, "capacity": room},
    }


class Cluster:
    """What tests ask of a plane."""

    def __init__(self, plane: Plane, client: Client) -> None:
        self.plane = plane
        self.client = client

    async def kubectl(self, *words: str, stdin: Any = None) -> str:
        done = await asyncio.to_thread(self.plane.server.kubectl, *words, stdin=stdin)
        assert done.returncode == 0, done.stderr
        return done.stdout

    async def namespace(self, name: str) -> None:
        made = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        await self.client.create(made, kinds.NAMESPACE, manager="tests")

    async def apply(self, namespace: str, name: str, base: str = "dpd-nixl", **fields: Any) -> Object:
        """An endpoint; `fields` are set by their path."""
        changes = {"metadata.name": name, "metadata.namespace": namespace, **fields}
        return await self.client.apply(changed(base, changes), ENDPOINT, manager="tests")

    async def patch(self, namespace: str, name: str, spec: Object) -> None:
        await self.client.patch(ENDPOINT, name, namespace, {"spec": spec}, manager="tests")

    async def endpoints(self, namespace: str) -> list[Object]:
        return (await self.client.list(ENDPOINT, namespace)).items

    async def forget(self, namespace: str) -> None:
        """Its endpoints are gone, whether an operator runs or not; what they owned goes after them. The
        namespace stays: one that is being deleted while the API server restarts goes without its endpoints,
        which its controller does not know of yet."""
        while found := await self.endpoints(namespace):
            for name in (each["metadata"]["name"] for each in found):
                patch = {"metadata": {"finalizers": None}}
                await self.client.patch(ENDPOINT, name, namespace, patch, manager="tests")
                await self.client.delete(ENDPOINT, name, namespace)

    async def objects(self, namespace: str) -> dict[str, Object]:
        """Of the namespace's endpoints, wherever they are, by kind and name."""
        labels = f"tandem.dev/endpoint-namespace={namespace}"
        served = [r for r in OWNED if r.group != "keda.sh"]
        lists = await asyncio.gather(*(self.client.list(r, labels=labels) for r in served))
        return {f"{o['kind']}/{o['metadata']['name']}": o for found in lists for o in found.items}

    async def states(self, namespace: str) -> list[str]:
        return [e.get("status", {}).get("state", "") for e in await self.endpoints(namespace)]


@asynccontextmanager
async def cluster(plane: Plane) -> AsyncIterator[Cluster]:
    async with connect(plane.server.kubeconfig) as client:
        yield Cluster(plane, client)


async def until(what: str, look: Callable[[], Any], seconds: float = 60.0) -> float:
    """Wait until `look()`, which may be awaitable, is true; returns after how many seconds that was."""
    began = time.monotonic()
    while True:
        seen = look()
        if asyncio.iscoroutine(seen):
            seen = await seen
        if seen:
            return time.monotonic() - began
        assert time.monotonic() - began < seconds, f"{what}: not within {seconds:g} s"
        await asyncio.sleep(0.1)
