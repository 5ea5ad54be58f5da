"""A running local endpoint: its processes started together, watched together, stopped together."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx

from tandem.local.errors import LocalError
from tandem.local.plan import LocalPlan
from tandem.local.process import Process, tail
from tandem.local.reaper import reaper
from tandem.local.sockets import make_private

_POLL_SECONDS = 0.25

# The last of these found in an engine's log is how far its start has come.
_STAGES = (
    ("importing vLLM", re.compile(r"")),
    ("starting the engine", re.compile(r"Initializing a V1 LLM engine|non-default args")),
    ("loading the weights", re.compile(r"Starting to load model|Loading (weights|safetensors)")),
    ("allocating the KV cache", re.compile(r"KV cache size|init engine")),
    ("opening its port", re.compile(r"Starting vLLM (API )?server")),
    ("answering", re.compile(r"Application startup complete")),
)

_LAST_STAGE = _STAGES[-1][0]

OnProgress = Callable[[dict[str, str]], None]
"""Called with process name → what it is doing, each time one of them changes."""


class RunningEndpoint:
    """Every process of a plan, up and proved by the router's canaries."""

    def __init__(self, plan: LocalPlan, processes: list[Process]) -> None:
        self.plan = plan
        self.processes = processes

    async def died(self) -> None:
        """Return never; raise ProcessDied as soon as one process ends."""
        deaths = [asyncio.create_task(p.died()) for p in self.processes]
        try:
            done, _ = await asyncio.wait(deaths, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                await task
        finally:
            for task in deaths:
                task.cancel()
            await asyncio.gather(*deaths, return_exceptions=True)

    async def while_alive(self, work: Coroutine[Any, Any, None], *, within: float | None = None) -> None:
        """Run some work; ProcessDied when a process ends first, TimeoutError after `within` seconds."""
        working, death = asyncio.ensure_future(work), asyncio.create_task(self.died())
        try:
            async with asyncio.timeout(within):
                done, _ = await asyncio.wait({working, death}, return_when=asyncio.FIRST_COMPLETED)
            for task in done & {death} or {working}:
                await task
        finally:
            working.cancel()
            death.cancel()
            await asyncio.gather(working, death, return_exceptions=True)


@asynccontextmanager
async def running(
    plan: LocalPlan, *, on_progress: OnProgress, ready_timeout: float | None = None
) -> AsyncIterator[RunningEndpoint]:
    """Start a plan; the block runs once a canary has gone through every path. Stops all on the way out.
    `ready_timeout`: seconds, in place of the plan's own.

    Raises ProcessDied when a process ends first, with the cause from its log; LocalError on time-out.
    """
    ready_timeout = plan.ready_timeout if ready_timeout is None else ready_timeout
    async with reaper() as guard:
        processes: list[Process] = []
        if plan.sockets is not None:
            make_private(plan.sockets)
            guard.made(plan.sockets)
        try:
            for spec in plan.processes:
                process = await Process.start(spec, plan.logs / f"{spec.name}.log")
                guard.started(process.pid)
                processes.append(process)  # at once: what was started is stopped, whatever happens next
            endpoint = RunningEndpoint(plan, processes)
            waits_for: list[str] = []
            try:
                await endpoint.while_alive(_poll(endpoint, on_progress, waits_for), within=ready_timeout)
            except TimeoutError:
                why = "".join(waits_for) or "no engine answered"
                raise LocalError(
                    f"The endpoint was not ready after {ready_timeout:g} s: {why}. Logs: {plan.logs}"
                ) from None
            yield endpoint
        finally:
            await asyncio.gather(*(p.stop() for p in processes))
            for process in processes:
                guard.ended(process.pid)


async def _poll(endpoint: RunningEndpoint, on_progress: OnProgress, waits_for: list[str]) -> None:
    """Return when every engine is in use and every pair proved. `waits_for` tells what is missing till then.

    The router's word is not enough: what answers on a port is ours only once our own engine has come to
    answering, as it dies if somebody else has the port.
    """
    shown: dict[str, str] = {}
    async with httpx.AsyncClient(base_url=endpoint.plan.url, timeout=5.0, trust_env=False) as client:
        while True:
            missing = await _what_router_waits_for(client)
            now = {p.spec.name: _stage(p) for p in endpoint.processes if p.spec.name != "router"}
            up = all(stage == _LAST_STAGE for stage in now.values())
            now["router"] = (
                "waiting for the engines" if not up else "sending canaries" if missing else "ready"
            )
            if missing and endpoint.plan.attached:  # whose logs are not here: all that there is to see
                now["router"] = f"sending canaries: {missing}"
            waits_for[:] = [missing]
            if now != shown:
                shown = now
                on_progress(now)
            if up and not missing:
                return
            await asyncio.sleep(_POLL_SECONDS)


async def _what_router_waits_for(client: httpx.AsyncClient) -> str:
    """Empty when the router is ready and waits for nothing."""
    try:
        status = (await client.get("/ready")).json()
    except (httpx.TransportError, ValueError):
        return "the router does not answer"
    return str(status.get("reason") or "; ".join(status.get("unproved", [])))


def _stage(process: Process) -> str:
    text = tail(process.log, 256 * 1024)
    return next(name for name, seen in reversed(_STAGES) if seen.search(text))
