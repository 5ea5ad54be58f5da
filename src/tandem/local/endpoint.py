"""A running local endpoint: its processes started together, watched together, stopped together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx

from tandem.local.errors import LocalError
from tandem.local.listeners import listens
from tandem.local.log import CONSOLE, LAST_STAGE, remove_old, stage
from tandem.local.plan import LocalPlan
from tandem.local.process import Process
from tandem.local.reaper import Reaper, reaper
from tandem.local.record import EndpointState, ProcessState, hold, hold_again, load, this_process
from tandem.local.sockets import make_private
from tandem.local.supervisor import Member, Supervisor, Tell

_POLL_SECONDS = 0.25
_SAVE_AGAIN_SECONDS = 5.0
_ANSWER_SECONDS = 10.0

OnProgress = Callable[[dict[str, str]], None]
"""Called with process name → what it is doing, each time one of them changes."""


class RunningEndpoint:
    """Every process of a plan. To those who are given one it is up, and proved by the router's canaries."""

    def __init__(self, plan: LocalPlan, state: EndpointState, guard: Reaper, lock: int) -> None:
        """`state` is kept; `lock`: file descriptor of what is held while it runs."""
        self.plan = plan
        self._state = state
        self._lock = lock
        self.members = [
            Member(spec, plan.logs / f"{spec.name}.log", of_process, guard)
            for spec, of_process in zip(plan.processes, state.processes, strict=True)
        ]
        self.save()

    @property
    def processes(self) -> list[Process]:
        return [member.process for member in self.members]

    @property
    def has_port(self) -> bool:
        """Whether it is its own router that listens where it is to listen."""
        port = self.plan.router.port
        return any(listens(m.process.pid, port) for m in self.members if m.state.role == "router")

    def save(self) -> None:
        """Write down how it is, for `tandem status`."""
        self._saved = self._state.save(self.plan.logs)

    async def start(self) -> None:
        """Start every process. Raises LocalError."""
        for member in self.members:
            await member.start()
        self.save()

    async def stop(self, why: str) -> None:
        """Stop every process. `why` it ended is written down."""
        self._state.become("stopping", why)
        self.save()
        await asyncio.gather(*(m.stop() for m in self.members))
        for member in self.members:
            member.become("stopped")
        self._state.become("ended")
        self.save()

    def note(self, doing: dict[str, str]) -> None:
        """What each process is doing while the endpoint starts."""
        for member in self.members:
            member.become("starting", doing[member.spec.name])
        self.save()

    def came_up(self) -> None:
        """All are up, and proved."""
        for member in self.members:
            member.become("ready")
        self._state.become("running")
        self.save()

    async def keep_up(self, tell: Tell, *, hung_after: float) -> None:
        """Restart what dies or hangs (see Supervisor), for ever; each death and each return is told."""
        await Supervisor(
            self.members,
            tell=tell,
            changed=self.save,
            hung_after=hung_after,
            more_logs=[self.plan.logs / CONSOLE],
            renews_prefillers=self.plan.router.connector == "lmcache",
        ).run()

    async def save_again(self) -> None:
        """Write down what could not be, as on a disk that was full, or was removed; for ever."""
        while True:
            await asyncio.sleep(_SAVE_AGAIN_SECONDS)
            hold_again(self.plan.logs, self._lock)
            if not self._saved or load(self.plan.logs) is None:
                self.save()

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


def _begun(plan: LocalPlan) -> EndpointState:
    """Of an endpoint that this process is about to start."""
    pid, pid_started = this_process()
    state = EndpointState(
        name=plan.name, url=plan.url, port=plan.router.port, pid=pid, pid_started=pid_started
    )
    where = {e.name: (e.role.value, e.url, e.port) for e in plan.engines}
    for spec in plan.processes:
        role, url, port = where.get(spec.name, ("router", plan.url, plan.router.port))
        known = {"name": spec.name, "role": role, "url": url, "port": port}
        state.processes.append(ProcessState.model_validate(known))
    return state


@asynccontextmanager
async def running(plan: LocalPlan, *, on_progress: OnProgress) -> AsyncIterator[RunningEndpoint]:
    """Start a plan; the block runs once a canary has gone through every path. Stops all on the way out.

    Raises ProcessDied when a process ends first, with the cause from its log; LocalError on time-out, or when
    the endpoint runs already.
    """
    with hold(plan.logs) as lock:
        state = _begun(plan)
        state.save(plan.logs)  # before all else: till then the one before it seems to run
        remove_old(plan.logs)
        async with reaper(lock) as guard:
            endpoint = RunningEndpoint(plan, state, guard, lock)
            saving = asyncio.create_task(endpoint.save_again())
            why = "it was stopped"
            try:
                if plan.sockets is not None:
                    make_private(plan.sockets)
                    guard.made(plan.sockets)
                await endpoint.start()
                await _until_ready(endpoint, on_progress)
                endpoint.came_up()
                yield endpoint
            except Exception as error:
                why = str(error) or type(error).__name__
                raise
            finally:
                saving.cancel()
                await endpoint.stop(why)


async def _until_ready(endpoint: RunningEndpoint, on_progress: OnProgress) -> None:
    timeout = endpoint.plan.ready_timeout
    waits_for: list[str] = []

    def progress(doing: dict[str, str]) -> None:
        endpoint.note(doing)
        on_progress(doing)

    try:
        await endpoint.while_alive(_poll(endpoint, progress, waits_for), within=timeout)
    except TimeoutError:
        why = "".join(waits_for) or "no engine answered"
        raise LocalError(
            f"The endpoint was not ready after {timeout:g} s: {why}. Logs: {endpoint.plan.logs}"
        ) from None


async def _poll(endpoint: RunningEndpoint, on_progress: OnProgress, waits_for: list[str]) -> None:
    """Return when every engine is in use and every pair proved. `waits_for` tells what is missing till then.

    The router's word is not enough: what answers on a port is ours only once our own engine has come to
    answering, as it dies if somebody else has the port; and another router may have taken ours meanwhile. An
    engine's log says so; where it is told to say little (`--uvicorn-log-level`), who listens tells. Raises
    LocalError when an engine waits in vain.
    """
    shown: dict[str, str] = {}
    async with httpx.AsyncClient(timeout=5.0, trust_env=False) as client:
        while True:
            missing = await what_router_waits_for(client, endpoint.plan.url)
            engines = [m for m in endpoint.members if m.state.role != "router"]
            now = {m.spec.name: stage(m.log) for m in engines}
            for engine in engines:
                if now[engine.spec.name] != LAST_STAGE and (why := engine.waits_in_vain):
                    way_out = "Stop that, or start again: another port is chosen then."
                    raise LocalError(f"{why}. {way_out}\nIts log: {engine.log}")
            up = all(
                now[engine.spec.name] == LAST_STAGE or (not missing and engine.listens) for engine in engines
            )
            now["router"] = (
                "waiting for the engines" if not up else "sending canaries" if missing else "ready"
            )
            if missing and endpoint.plan.attached:  # whose logs are not here: all that there is to see
                now["router"] = f"sending canaries: {missing}"
            waits_for[:] = [missing]
            if now != shown:
                shown = now
                on_progress(now)
            if up and not missing and endpoint.has_port:
                return
            await asyncio.sleep(_POLL_SECONDS)


async def what_router_waits_for(client: httpx.AsyncClient, url: str) -> str:
    """Empty when the router is ready and waits for nothing."""
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):  # httpx has limits for each piece of it only
            status = (await client.get(f"{url}/ready")).json()
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError, RecursionError):
        return "the router does not answer"
    if not isinstance(status, dict):
        return "what answers on its port is no router of Tandem's"
    return str(status.get("reason") or "; ".join(status.get("unproved", [])))
