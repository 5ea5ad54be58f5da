"""The control loop beside a real API server. No controllers run there: tests say what Deployments report."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from tandem.kube import Client, Object, connect
from tandem.operator.process.loop import Loop
from tandem.operator.process.metrics import Metrics

from ...api.conftest import ApiServer
from ..endpoints import ROUTER_NAMESPACE, SETTINGS, changed

WAIT_SECONDS = 20.0
DECODE = "Deployment/decode-pd-hf"
OWNED = "deploy,svc,cm,netpol,pdb,ingress,sa,role,rolebinding"


@dataclass
class World:
    """One namespace of a cluster with an operator."""

    server: ApiServer
    namespace: str
    client: Client

    async def kubectl(self, *words: str, stdin: Any = None) -> str:
        done = await asyncio.to_thread(self.server.kubectl, *words, stdin=stdin)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def manifest(self, name: str = "dpd-nixl", **changes: Any) -> Object:
        made = changed(name, changes)
        made["metadata"]["namespace"] = self.namespace
        return made

    async def apply(self, manifest: Object) -> None:
        await self.kubectl("apply", "-f", "-", stdin=manifest)

    async def endpoint(self, name: str = "pd-hf") -> Object:
        found: Object = json.loads(await self.kubectl("get", "iec", name, "-n", self.namespace, "-o", "json"))
        return found

    async def objects(self, kinds: str = OWNED) -> dict[str, Object]:
        """Of this namespace's endpoints, in both namespaces, by kind and name."""
        selector = f"-l=tandem.dev/endpoint-namespace={self.namespace}"
        found = json.loads(await self.kubectl("get", kinds, "-A", selector, "-o", "json"))
        return {f"{o['kind']}/{o['metadata']['name']}": o for o in found["items"]}

    async def report(self, name: str, *, namespace: str | None = None, ready: bool = True) -> None:
        """What a Deployment's controller would."""
        where = namespace or self.namespace
        words = ("deploy", name, "-n", where)
        found = json.loads(await self.kubectl("get", *words, "-o", "json"))
        count = found["spec"]["replicas"]
        status = {
            "observedGeneration": found["metadata"]["generation"],
            "replicas": count,
            "updatedReplicas": count,
            "readyReplicas": count if ready else 0,
            "availableReplicas": count if ready else 0,
        }
        await self.kubectl(
            "patch", *words, "--subresource=status", "--type=merge", "-p", json.dumps({"status": status})
        )

    async def report_when_there(self, name: str, *, ready: bool) -> None:
        await self.until(self.has(f"Deployment/{name}"), name)
        await self.report(name, ready=ready)

    async def deployed(self) -> None:
        """All Deployments of pd-hf report that they are ready."""
        await self.until(self.has("Deployment/decode-pd-hf"), "the deployments")
        await self.report("prefill-pd-hf")
        await self.report("decode-pd-hf")
        await self.until(self.has(f"Deployment/pd-hf-{self.namespace}-router"), "the router")
        await self.report(f"pd-hf-{self.namespace}-router", namespace=ROUTER_NAMESPACE)

    def has(self, *names: str) -> Callable[[], Any]:
        async def check() -> bool:
            return set(names) <= (await self.objects()).keys()

        return check

    def has_scaled_object(self, name: str) -> Callable[[], Any]:
        async def check() -> bool:
            return f"ScaledObject/{name}" in await self.objects("scaledobjects.keda.sh")

        return check

    def state(self, wanted: str, name: str = "pd-hf") -> Callable[[], Any]:
        async def check() -> bool:
            return (await self.endpoint(name)).get("status", {}).get("state") == wanted

        return check

    async def until(self, check: Callable[[], Any], what: str) -> None:
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                while not await check():
                    await asyncio.sleep(0.1)
        except TimeoutError:
            pytest.fail(f"{what}: not seen within {WAIT_SECONDS:.0f} s")

    async def settled(self, client: Client | None = None) -> None:
        """Until a second has passed in which the operator, or another one, sent nothing."""
        client = client or self.client
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                before = client.sent.total()
                await asyncio.sleep(1)
                if client.sent.total() == before > 0:
                    return


@asynccontextmanager
async def operating(server: ApiServer) -> AsyncIterator[Client]:
    """The control loop, without lease and webhooks."""
    async with connect(server.kubeconfig) as client:
        task = asyncio.create_task(Loop(client, SETTINGS, Metrics()).run())
        try:
            yield client
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def world(api_server: ApiServer, namespace: str) -> AsyncIterator[World]:
    if api_server.kubectl("get", "namespace", ROUTER_NAMESPACE).returncode != 0:
        api_server.kubectl("create", "namespace", ROUTER_NAMESPACE)
    async with operating(api_server) as client:
        yield World(api_server, namespace, client)
        # Without an operator nobody takes the finalizer off.
        await asyncio.to_thread(
            api_server.kubectl, "delete", "iec", "--all", "-n", namespace, "--timeout=20s"
        )
