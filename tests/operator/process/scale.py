"""How an operator does with many endpoints: what is measured by `benchmarks/operator` and held by a test."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.kube import resources as kinds

from .plane import Cluster, Operator, until

WRITES = ("create", "patch", "delete")
"""Verbs of what an operator writes; it updates nothing but its lease."""
QUIET_SECONDS = 20.0
"""Longer than a pod has to be ready before its Deployment calls it available (`minReadySeconds`)."""
_AT_ONCE = 10


@dataclass(frozen=True)
class Rest:
    """What an operator at rest takes."""

    requests: dict[str, float]
    """A minute, by verb."""
    cpu: float
    """Of one core."""
    memory: int
    """Bytes."""


@dataclass(frozen=True)
class Restart:
    seconds: float
    """From the start of the process until it has looked at every endpoint."""
    writes: int


async def settle(kube: Cluster, namespace: str, names: Sequence[str], seconds: float) -> float:
    """Apply the endpoints, and wait until all of the namespace are whole. Returns after how many seconds."""
    gate = asyncio.Semaphore(_AT_ONCE)

    async def apply(name: str) -> None:
        async with gate:
            await kube.apply(namespace, name)

    async def whole() -> bool:
        return set(await kube.states(namespace)) == {"DeploymentComplete"}

    began = time.monotonic()
    await asyncio.gather(*map(apply, names))
    await until("all endpoints", whole, seconds)
    return time.monotonic() - began


async def at_rest(operator: Operator, *, seconds: float = 60.0) -> Rest:
    """Wait until it has written nothing for a while, then look for `seconds`."""

    async def rests() -> bool:
        before = operator.requests()
        await asyncio.sleep(QUIET_SECONDS)
        now = operator.requests()
        return bool(now) and all(now[verb] == before[verb] for verb in (*WRITES, "list"))

    await until("rest", rests, 180)
    requests, cpu, began = operator.requests(), operator.cpu(), time.monotonic()
    await asyncio.sleep(seconds)
    took = time.monotonic() - began
    sent = {verb: (count - requests[verb]) * 60 / took for verb, count in operator.requests().items()}
    return Rest(sent, (operator.cpu() - cpu) / took, operator.memory())


async def latencies(kube: Cluster, namespace: str, names: Sequence[str], changes: int) -> list[float]:
    """Seconds from a change of an endpoint's decoders until its Deployment has their number, as a watch
    sees it; one change after the other."""
    chosen = random.Random(1)
    replicas = dict.fromkeys(names, 1)
    seen: dict[str, int] = {}
    woken = asyncio.Event()
    version = (await kube.client.list(kinds.DEPLOYMENT, namespace)).version

    async def watch() -> None:
        async for kind, found in kube.client.watch(kinds.DEPLOYMENT, namespace, version=version):
            if kind in ("ADDED", "MODIFIED"):
                seen[found["metadata"]["name"]] = found["spec"]["replicas"]
                woken.set()

    watching = asyncio.create_task(watch())
    took = []
    try:
        for _ in range(changes):
            name = chosen.choice(names)
            replicas[name] = 3 - replicas[name]
            began = time.monotonic()
            await kube.patch(namespace, name, {"pdSpec": {"decodingSpec": {"replicas": replicas[name]}}})
            async with asyncio.timeout(60):
                while seen.get(f"decode-{name}") != replicas[name]:
                    woken.clear()
                    await woken.wait()
            took.append(time.monotonic() - began)
            await asyncio.sleep(0.05)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    return took


async def restarted(operator: Operator, began: float, endpoints: int) -> Restart:
    """Of an operator that was started at `began`, by the clock, on endpoints that are as they should be."""

    async def looked() -> bool:
        found = operator.metrics()
        return (
            found.get("tandem_operator_passes_total done", 0) >= endpoints
            and found["tandem_operator_endpoints"] == endpoints
            and found["tandem_operator_queue"] == 0
        )

    await until("a look at every endpoint", looked, 120)
    seconds = time.monotonic() - began
    await asyncio.sleep(3)
    return Restart(seconds, sum(operator.requests()[verb] for verb in WRITES))
