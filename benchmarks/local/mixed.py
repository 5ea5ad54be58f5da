"""The load: four users with short prompts, one request after the other, and long prompts at fixed times.

Prompts are new each time, so no prefix cache has anything of them; their lengths are the same in every run.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from layouts import Place
from loads import Target, Traffic

from tandem.bench.load import LoadError, Timing
from tandem.http import Client, Origin

USERS = 4
SHORT, LONG = (30, 96), (1500, 48)
"""Tokens of a prompt and of its answer."""
FIRST_LONG = 1.0
"""Seconds after the users begin."""
AFTER_FAILURE = 1.0
"""Seconds that a user waits before the next request."""


@dataclass(frozen=True)
class Load:
    name: str
    every: float = 0.0
    """Seconds from one long prompt to the next; 0: there are none."""
    apart: bool = False
    """Long prompts go to the prefiller alone, for one token: it computes and nothing is handed over."""


WITHOUT = Load("without")
APART = Load("apart", 3.5, apart=True)
LIGHT = Load("light", 8.0)
HEAVY = Load("heavy", 3.5)


@dataclass(frozen=True)
class Seen:
    """What came of a load. Seconds, on the loop's clock where they are times."""

    begun: float
    seconds: float
    short: Sequence[Timing]
    long: Sequence[Timing]
    short_failed: Sequence[str]
    long_failed: Sequence[str]
    """Of requests that were not answered in full: why."""


@dataclass
class Counted(Traffic):
    """Goes on when a request fails, and notes why, by kind of request."""

    failed: dict[str, list[str]] = field(default_factory=dict)

    async def send(self, kind: str, to: Origin, prompt: int, answer: int) -> None:
        try:
            await super().send(kind, to, prompt, answer)
        except LoadError as error:
            self.failed.setdefault(kind, []).append(str(error))
            await asyncio.sleep(AFTER_FAILURE)


async def put(place: Place, router: Origin, load: Load, seconds: float) -> Seen:
    """Put a load on a layout through one of its routers; returns when all answers have come, or failed."""
    client = Client()
    target = Target(client, place.model, router, place.engines[0], place.engines[-1])
    traffic = Counted(target, "", seconds)
    begun = asyncio.get_running_loop().time()
    try:
        async with asyncio.TaskGroup() as group:
            for number in range(USERS):
                group.create_task(traffic.user(number, "short", router, *map(_exactly, SHORT)))
            if load.every:
                group.create_task(_long_ones(traffic, load, begun, group))
    finally:
        await client.aclose()
    timings, failed = traffic.timings, traffic.failed
    return Seen(
        begun,
        seconds,
        timings.get("short", ()),
        timings.get("long", ()),
        failed.get("short", ()),
        failed.get("long", ()),
    )


def _exactly(tokens: int) -> range:
    return range(tokens, tokens + 1)


async def _long_ones(traffic: Traffic, load: Load, begun: float, group: asyncio.TaskGroup) -> None:
    loop = asyncio.get_running_loop()
    to = traffic.target.prefill if load.apart else traffic.target.router
    prompt, answer = LONG
    for number in itertools.count():
        await asyncio.sleep(begun + FIRST_LONG + number * load.every - loop.time())
        if not traffic.going:
            return
        group.create_task(traffic.send("long", to, prompt, 1 if load.apart else answer))
