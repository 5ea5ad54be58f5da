"""Keeps the processes of an endpoint up: what dies, or hangs, is started again, for ever."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path

import httpx

from tandem.local import proc
from tandem.local.errors import LocalError
from tandem.local.listeners import listener
from tandem.local.log import keep_small, stage, taken_port
from tandem.local.process import Process, ProcessSpec
from tandem.local.reaper import Reaper
from tandem.local.record import Condition, ProcessState

_FIRST_DELAY, _LONGEST_DELAY, _STEADY = 1.0, 30.0, 60.0
_LOOK_STARTING, _LOOK = 1.0, 5.0
_ANSWER_SECONDS = 5.0
_TOLD_HUNG = 15.0
_UNSEEN = 60.0
"""Seconds without a look after which it is we who were stopped, as by Ctrl-Z, perhaps with all the others."""
_WORKS = 0.3
"""CPU seconds a second from which on a silent process is taken to work. Timers and NIXL's thread take less: a
test holds a whole idle endpoint below 0.1. An engine deep in a prefill uses a core, or its share of one."""

Health = Callable[[str], Awaitable[int]]
"""The status with which a process at a URL answers; 0 of one that does not."""
UseOf = Callable[[Collection[int]], Mapping[int, proc.Use]]
"""What process groups use; asked of all at once, as it reads of every process of the machine."""
Tell = Callable[[str], None]
"""Called with a line for a person."""


class Member:
    """A process of an endpoint over all its starts; `state` is what is known of it outside."""

    def __init__(self, spec: ProcessSpec, log: Path, state: ProcessState, guard: Reaper) -> None:
        self.spec = spec
        self.log = log
        self.state = state
        self.ready_since: float | None = None
        """By the supervisor's clock; None until the last start has come to answering."""
        self._guard = guard
        self._process: Process | None = None
        self._asked: asyncio.Future[str] | None = None

    def ask_for_restart(self, why: str) -> None:
        """It runs, and is to be started again all the same."""
        if self._asked is not None and not self._asked.done():
            self._asked.set_result(why)

    async def asked_for_restart(self) -> str:
        """Wait until it is asked for; returns why."""
        self._asked = asyncio.get_running_loop().create_future()
        return await self._asked

    @property
    def process(self) -> Process:
        """Of the last start."""
        assert self._process is not None, "not started yet"
        return self._process

    async def start(self) -> None:
        """Raises LocalError."""
        self.ready_since = None
        self._process = await Process.start(
            self.spec, self.log, restart=self.state.restarts, announce=self._guard.started
        )
        self.state.pid = self._process.pid
        self.state.restart_at = None
        self.become("starting")

    async def stop(self) -> None:
        """End it, or what an ended one has left behind."""
        if self._process is not None:
            await self._process.stop()
            self._guard.ended(self._process.pid)
            self.state.pid = None

    @property
    def listens(self) -> bool:
        """Whether what answers on its port is this very process."""
        found = listener(self.state.port)
        return found is not None and found.pid in proc.members(self.process.pid)

    @property
    def waits_in_vain(self) -> str | None:
        """Why an engine that starts will never answer, though it runs; None: it may."""
        port = taken_port(self.log) if self.state.role != "router" else None
        if port is None:
            return None
        whose = listener(port) or "another program"
        return f"{self.spec.name} cannot listen on port {port}: it was taken meanwhile ({whose})"

    def become(self, state: Condition, doing: str = "") -> bool:
        """Note how it is; whether that is news."""
        before = (self.state.state, self.state.doing)
        self.state.state, self.state.doing = state, doing
        return before != (state, doing)


class Backoff:
    """How long to wait before a process that died is started again."""

    def __init__(self) -> None:
        self._next = _FIRST_DELAY

    def after(self, up_seconds: float) -> float:
        """Seconds: 1, and twice as many each time up to 30; 1 again when it had been up for a minute."""
        if up_seconds >= _STEADY:
            self._next = _FIRST_DELAY
        delay, self._next = self._next, min(2 * self._next, _LONGEST_DELAY)
        return delay


class Supervisor:
    """Watches members that are all up."""

    def __init__(
        self,
        members: Sequence[Member],
        *,
        tell: Tell,
        changed: Callable[[], None],
        hung_after: float,
        more_logs: Sequence[Path] = (),
        renews_prefillers: bool = False,
        health: Health | None = None,
        use_of: UseOf = proc.use_of,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`changed` is called after each change of a member's state. A process that neither answers nor works
        for `hung_after` seconds is restarted; 0: never. `more_logs` are kept small with those of the members.
        `renews_prefillers`: a prefiller cannot find a decoder again that was restarted, so it is, too.

        The rest is for tests: how a process answers, what process groups have used, the time."""
        self._members = members
        self._tell = tell
        self._changed = changed
        self._hung_after = hung_after
        self._logs = [*(m.log for m in members), *more_logs]
        self._renews_prefillers = renews_prefillers
        self._decoder_lost: asyncio.Event = asyncio.Event()
        self._lost_decoder = ""
        self._health = health
        self._use_of = use_of
        self._used: Mapping[int, proc.Use] = {}
        self._used_at = 0.0
        """When that was read."""
        self._clock = clock
        self._sleep = sleep

    async def run(self) -> None:
        """Never returns."""
        limits = httpx.Limits(max_keepalive_connections=0)  # who answered before may be dead
        async with httpx.AsyncClient(timeout=_ANSWER_SECONDS, limits=limits, trust_env=False) as client:
            health = self._health or (lambda url: _health(client, url))
            async with asyncio.TaskGroup() as tasks:
                for member in self._members:
                    member.ready_since = self._clock()
                    tasks.create_task(self._keep_up(member, health))
                tasks.create_task(self._keep_logs_small())
                if self._renews_prefillers:
                    tasks.create_task(self._renew_prefillers())

    async def _keep_up(self, member: Member, health: Health) -> None:
        backoff = Backoff()
        state = member.state
        why: str | None = None
        while True:
            why = why or await self._end_of(member, health)
            since = member.ready_since
            delay = backoff.after(0.0 if since is None else self._clock() - since)
            state.restarts, state.cause = state.restarts + 1, why
            member.become("restarting")
            self._changed()
            self._tell(f"{why}; restart {state.restarts} in {delay:g} s. Its log: {member.log}")
            await member.stop()
            state.restart_at = time.time() + delay
            if state.role == "decode":
                self._lost_decoder = state.name
                self._decoder_lost.set()
            self._changed()
            await self._sleep(delay)
            why = None
            try:
                await member.start()
            except LocalError as error:
                why = str(error)
            self._changed()

    async def _end_of(self, member: Member, health: Health) -> str:
        """Wait until a member dies, hangs or is to be restarted; returns why."""
        causes = [
            asyncio.create_task(member.process.ended()),
            asyncio.create_task(self._hang(member, health)),
            asyncio.create_task(member.asked_for_restart()),
        ]
        try:
            done, _ = await asyncio.wait(causes, return_when=asyncio.FIRST_COMPLETED)
            return next(cause for cause in causes if cause in done).result()
        finally:
            for cause in causes:
                cause.cancel()
            await asyncio.gather(*causes, return_exceptions=True)

    async def _renew_prefillers(self) -> None:
        """Start prefillers again after a decoder was lost, one at a time: other decoders need them."""
        while True:
            await self._decoder_lost.wait()
            self._decoder_lost.clear()
            for member in self._members:
                if member.state.role != "prefill" or member.ready_since is None:
                    continue  # one that starts has met no decoder yet
                member.ask_for_restart(
                    f"{member.spec.name} is to be started again: it cannot find {self._lost_decoder} again, "
                    "which was"
                )
                restarts = member.state.restarts
                while member.state.restarts == restarts or member.state.state != "ready":
                    await self._sleep(_LOOK_STARTING)

    async def _hang(self, member: Member, health: Health) -> str:
        """Watch a process that runs; return when it has hung for too long, or waits in vain, with what to say
        of that."""
        began = looked = progress = self._clock()
        used = self._cpu_seconds(member)
        while True:
            # All look at the same times, so that what they use need be read only once.
            period = _LOOK_STARTING if member.ready_since is None else _LOOK
            await self._sleep(period - self._clock() % period)
            now, used_before = self._clock(), used
            used = self._cpu_seconds(member)
            status = await health(member.state.url)
            # While it starts, weights may come from a slow disk: little is enough.
            enough = 0.0 if member.ready_since is None else _WORKS * (now - looked)
            unseen, looked = now - looked > _UNSEEN, now
            if status or unseen or used - used_before > enough:
                progress = now
            silent = now - progress
            if self._hung_after and silent >= self._hung_after:
                return f"{member.spec.name} was hung: for {silent:.0f} s it neither answered nor worked"
            if not status and member.ready_since is None and (why := member.waits_in_vain):
                return why
            if status == 200 and member.ready_since is None:
                member.ready_since = now
                self._tell(
                    f"{member.spec.name} is back after {now - began:.0f} s (restart {member.state.restarts})"
                )
            self._note(member, silent)

    def _cpu_seconds(self, member: Member) -> float:
        """What a member has used, as it was less than half a second ago."""
        group = member.process.pid
        if group not in self._used or self._clock() - self._used_at >= _LOOK_STARTING / 2:
            self._used = self._use_of([each.process.pid for each in self._members])
            self._used_at = self._clock()
        return self._used[group].cpu_seconds

    def _note(self, member: Member, silent: float) -> None:
        """Note how a process is that runs, and that neither answers nor works for `silent` seconds now."""
        if member.ready_since is None:
            self._become(member, "starting", stage(member.log) if member.state.role != "router" else "")
        elif silent < _TOLD_HUNG:
            self._become(member, "ready")
        elif member.state.state != "hung":
            since = time.localtime(time.time() - silent)
            self._become(member, "hung", time.strftime("since %H:%M:%S", since))

    def _become(self, member: Member, state: Condition, doing: str = "") -> None:
        if member.become(state, doing):
            self._changed()

    async def _keep_logs_small(self) -> None:
        while True:
            for log in self._logs:
                with contextlib.suppress(RuntimeError):  # no thread can be started now
                    await asyncio.to_thread(keep_small, log)
            await self._sleep(_LOOK)


async def _health(client: httpx.AsyncClient, url: str) -> int:
    for path in ("/health", "/metrics"):
        with contextlib.suppress(httpx.HTTPError, TimeoutError):
            async with asyncio.timeout(2 * _ANSWER_SECONDS):  # httpx has limits for each piece of it only
                return (await client.get(url + path)).status_code
    return 0
