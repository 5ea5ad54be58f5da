"""What a load costs a router, and what its clients see of it.

The router and all its processes have one core, engines and clients another. CPU time is that of the whole
process tree, helper processes included, as /proc tells it: in the kernel too, where sending on the loopback
interface includes the other side's receiving.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import routers
from machine import cpu_seconds, on_core
from streams import Answer, Clients, without_pauses
from texts import chat, prose


@dataclass(frozen=True)
class Load:
    """Streams of so many tokens, `interval` seconds between two of them (0: all at once), for prompts of
    `low` to `high` bytes. Either so many users, each of whom asks again when answered, or `rate` new ones a
    second.
    """

    name: str
    interval: float = 0.0
    users: int = 0
    rate: float = 0.0
    low: int = 1_000
    high: int = 8_000
    tokens: int = 64
    warm_up: float = 4.0
    seconds: float = 15.0
    texts: Callable[[int, int, int], Iterator[str]] = prose

    async def drive(self, clients: Clients, seed: int) -> None:
        bodies = (chat(text, self.tokens) for text in self.texts(self.low, self.high, seed))
        if self.users:
            await clients.in_turn(self.users, bodies, over=self.tokens * self.interval)
        else:
            await clients.at_rate(self.rate, bodies, seed=seed)


@asynccontextmanager
async def going_on(work: asyncio.Task[None]) -> AsyncIterator[Callable[[float], Any]]:
    """A load for the length of the block, whose value waits for so many seconds of it."""

    async def wait(seconds: float) -> None:
        await asyncio.wait([work], timeout=seconds)
        if work.done():
            await work
            raise SystemExit("there was nothing more to ask")

    try:
        yield wait
    finally:
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work


async def under_load(
    name: str,
    load: Load,
    seed: int,
    *,
    more: Sequence[str] = (),
    pairs: int = 1,
    rest: float = 0.0,
    then: Callable[[routers.Running], Awaitable[None]] | None = None,
) -> tuple[dict[str, Any], list[Answer]]:
    """Figures of a router under a load, and the answers that ended meanwhile. `more`: words for its command
    line. `rest`: seconds in which it is looked at idle first; what it uses then is taken off. `then`: what
    else is done under the load, after the measurement.

    Raises SystemExit where a router that should disaggregates not."""
    with on_core(routers.cores()[1]), without_pauses():
        async with routers.engines(pairs) as behind, routers.serving(name, behind, more) as router:
            idle = await _idle(router, rest)
            await behind.asked(tokens=load.tokens, interval=load.interval)
            clients = Clients(router.port, load.tokens)
            async with going_on(asyncio.create_task(load.drive(clients, seed))) as wait:
                await wait(load.warm_up)
                await behind.asked()
                before, begun, answered = _cpu(router, behind), time.monotonic(), len(clients.answers)
                await wait(load.seconds)
                after, seconds = _cpu(router, behind), time.monotonic() - begun
                asked, answers = await behind.asked(), clients.answers[answered:]
                if then is not None:
                    await then(router)
            clients.close()
    used, others = (b - a for a, b in zip(before, after, strict=True))
    faults = [answer.fault for answer in answers if answer.fault]
    decodes = max(1, asked["handed_over"] + asked["alone"])
    if name in routers.DISAGGREGATING and asked["handed_over"] < 0.98 * decodes:
        raise SystemExit(f"{name} did not disaggregate {asked['alone']} of {decodes} requests")
    figures = {
        "cpu_ms": (used - idle * seconds) / max(1, len(answers)) * 1000,
        "busy": used / seconds,
        "load_busy": others / seconds,
        "per_s": len(answers) / seconds,
        "requests": len(answers),
        "errors": len(faults),
        "first_error": faults[0] if faults else "",
        "idle": idle,
    }
    return figures, answers


def _cpu(router: routers.Running, behind: routers.Engines) -> tuple[float, float]:
    """CPU seconds so far: the router's, and those of engines and clients."""
    own = cpu_seconds(router.pid) if router.pid is not None else 0.0
    mine = os.times()
    return own, cpu_seconds(behind.process.pid) + mine.user + mine.system


async def _idle(router: routers.Running, seconds: float) -> float:
    """The share of a core that a router uses without requests."""
    if not seconds or router.pid is None:
        return 0.0
    before, begun = cpu_seconds(router.pid), time.monotonic()
    await asyncio.sleep(seconds)
    return (cpu_seconds(router.pid) - before) / (time.monotonic() - begun)
