"""Many streams at once through one router process: whether all come whole, and the memory it takes.

First 5,000 streams of a token a second, then 1,000 of ten a second. Each is so long that all of them are open
together most of the time.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import routers
import uvloop
from cost import orders
from machine import Quietly, on_core, open_files, resident
from streams import Clients, without_pauses
from texts import chat, prose

FILES = 16_000
"""That may be open: a router has two connections for each stream, and keeps those of prefill legs."""
BEGIN_RATE = 250.0
"""New streams a second."""
_SAMPLE_SECONDS = 0.5


@dataclass(frozen=True)
class Crowd:
    streams: int
    per_second: float
    """Tokens of each."""
    tokens: int


CROWDS = Crowd(5_000, 1.0, 60), Crowd(1_000, 10.0, 300)


@dataclass
class Memory:
    """The most that was seen, in bytes."""

    router: int = 0
    """The process that serves."""
    all: int = 0
    """With its helper processes."""
    samples: int = field(default=0, repr=False)


@asynccontextmanager
async def watched(router: routers.Running) -> AsyncIterator[Memory]:
    """Watch a router's memory within the block."""
    memory = Memory()

    def look() -> None:
        sizes = []
        for pid in router.processes():
            with suppress(OSError):  # gone
                sizes.append(resident(pid))
        memory.router = max(memory.router, *sizes[:1])
        memory.all = max(memory.all, sum(sizes))

    async def watch() -> None:
        while True:
            look()
            await asyncio.sleep(_SAMPLE_SECONDS)

    task = asyncio.create_task(watch())
    try:
        yield memory
    finally:
        task.cancel()
        look()


async def measure(name: str, seed: int, crowds: tuple[Crowd, ...]) -> list[dict[str, Any]]:
    """One router; each crowd after the other."""
    found = []
    with on_core(routers.cores()[1]), without_pauses():
        async with routers.engines() as behind, routers.serving(name, behind) as router:
            for crowd in crowds:
                await behind.asked(tokens=crowd.tokens, interval=1 / crowd.per_second)
                clients = Clients(router.port, crowd.tokens)
                bodies = (chat(text, crowd.tokens) for text in prose(1_000, 8_000, seed))
                async with watched(router) as memory:
                    some = itertools.islice(bodies, crowd.streams)
                    await clients.at_rate(BEGIN_RATE, some)
                asked = await behind.asked()
                clients.close()
                faults = [answer.fault for answer in clients.answers if answer.fault]
                found.append(
                    {
                        "streams": crowd.streams,
                        "per_second": crowd.per_second,
                        "open": asked["most_open"],
                        "errors": len(faults),
                        "first_error": faults[0] if faults else "",
                        "router_mb": memory.router / 1e6,
                        "all_mb": memory.all / 1e6,
                    }
                )
    return found


def run(
    runs: int, *, crowds: tuple[Crowd, ...] = CROWDS, quietly: Quietly, say: Callable[[str], None]
) -> dict[str, Any]:
    """Tandem every time, its peers the first time."""
    open_files(FILES)
    found = []
    for number, name in orders(routers.known()[:-1], runs):
        if number and name != routers.TANDEM:
            continue
        one = functools.partial(measure, name, number, crowds)
        results, others = uvloop.run(quietly(one))
        for result in results:
            found.append({"router": name, "run": number, "others": others, **result})
            errors = f", {result['errors']} ERRORS: {result['first_error']}" if result["errors"] else ""
            say(
                f"{result['streams']:,} streams, run {number + 1}, {name}: {result['open']:,} open at once, "
                f"{result['all_mb']:.0f} MB ({result['router_mb']:.0f} MB without helpers){errors}"
            )
    return {"runs": found}
