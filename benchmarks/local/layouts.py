"""What is compared: a prefiller and a decoder, or two engines that are alike; with the same model on the same
cores and memory, and behind the same router.

All is planned as `tandem up` plans the built-in endpoint. Engines that are alike have the decoder's command
line, less the KV connector and the budget of a role, and stand behind the router without a role.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tandem.api import Role
from tandem.bench.load import LoadError, ask
from tandem.config import EngineSpec
from tandem.engine import detect, without
from tandem.http import Client, Origin
from tandem.local.endpoint import running
from tandem.local.manifest import read_manifest
from tandem.local.plan import LOOPBACK, LocalPlan, make_plan, router_command
from tandem.local.ports import free_port
from tandem.local.process import Process, ProcessSpec

IN_TURN, BY_LOAD = "roundrobin", "prefixaware"
"""Strategies of the router. As no two prompts begin alike, prefixaware goes by load alone."""
_START_SECONDS = 60.0
_BUDGET, _HELD = "--max-num-batched-tokens", "--long-prefill-token-threshold"


@dataclass(frozen=True, order=True)
class Tuning:
    """How two engines that are alike are set."""

    budget: int
    """Tokens of a step (`--max-num-batched-tokens`)."""
    held: int = 0
    """Tokens of a step that one prompt may have beside others (`--long-prefill-token-threshold`); 0: all."""

    @property
    def flags(self) -> tuple[str, ...]:
        held = (_HELD, str(self.held)) if self.held else ()
        return (_BUDGET, str(self.budget), *held)


@dataclass(frozen=True)
class Place:
    """A layout that runs."""

    model: str
    engines: tuple[Origin, ...]
    """Of a pair, the prefiller first."""
    routers: dict[str, Origin]
    """By strategy, that of the plan first."""

    @property
    def router(self) -> Origin:
        """That of the plan."""
        return next(iter(self.routers.values()))


def pair(logs: Path) -> LocalPlan:
    """The built-in endpoint: one prefiller, one decoder."""
    manifest, port = read_manifest(None), free_port(8000, LOOPBACK)
    plan = make_plan(manifest.endpoint, manifest.raw, detect(), sys.executable, port=port)
    return replace(plan, logs=logs)


def colocated(tuning: Tuning, logs: Path) -> LocalPlan:
    """As many engines on the same cores, each of which prefills and decodes."""
    plan = pair(logs)
    decoder = next(engine for engine in plan.engines if engine.role is Role.DECODE)
    alike = without(decoder.argv, ("--kv-transfer-config", _BUDGET, _HELD, "--port"))
    engines = tuple(
        replace(engine, name=f"engine-{i}", argv=(*alike, *tuning.flags, "--port", str(engine.port)))
        for i, engine in enumerate(plan.engines)
    )
    urls = tuple(EngineSpec(engine.url).text for engine in engines)
    router = replace(plan.router, prefill=(), decode=(), engine=urls, routing_strategy=IN_TURN)
    return replace(plan, engines=engines, router=router, router_argv=router_command(sys.executable, router))


@asynccontextmanager
async def up(plan: LocalPlan, more_strategies: Sequence[str] = ()) -> AsyncIterator[Place]:
    """Start a plan, with a further router for each further strategy; ready within the block. Raises
    LocalError or LoadError where that comes to nothing."""
    routers = {plan.router.routing_strategy: Origin.parse(plan.url)}
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running(plan, on_progress=lambda _: None))
        for strategy in more_strategies:
            port = free_port(8000, LOOPBACK)
            config = replace(plan.router, port=port, routing_strategy=strategy)
            spec = ProcessSpec(f"router-{strategy}", router_command(sys.executable, config))
            process = await Process.start(spec, plan.logs / f"{spec.name}.log")
            stack.push_async_callback(process.stop)
            routers[strategy] = Origin.parse(f"http://{LOOPBACK}:{port}")
            await _ready(routers[strategy])
        yield Place(plan.served_name, tuple(Origin.parse(engine.url) for engine in plan.engines), routers)


async def _ready(router: Origin) -> None:
    client, deadline = Client(), time.monotonic() + _START_SECONDS
    try:
        while True:
            try:
                await ask(client, router, "/ready")
                return
            except LoadError as error:
                if time.monotonic() > deadline:
                    raise LoadError(f"{router} is not ready: {error}") from None
            await asyncio.sleep(0.25)
    finally:
        await client.aclose()
