"""Three mixed loads, none of them used in calibration; the same lengths and times for the same seed.

What the prompts say is new each time, or a load that is repeated would find them in the prefix caches.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tandem.bench.load import Prompts, Timing, completion, timed
from tandem.http import Client, Origin


@dataclass
class Target:
    """A pair and its router, real or simulated."""

    client: Client
    model: str
    router: Origin
    prefill: Origin
    decode: Origin


@dataclass
class Traffic:
    """Requests under way and the timings of those that ended, by kind of request."""

    target: Target
    seed: str
    seconds: float
    timings: dict[str, list[Timing]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prompts = Prompts()
        self.end = asyncio.get_running_loop().time() + self.seconds

    @property
    def going(self) -> bool:
        return asyncio.get_running_loop().time() < self.end

    async def send(self, kind: str, to: Origin, prompt: int, answer: int) -> None:
        body = completion(self.target.model, self.prompts(prompt), answer)
        timing = await timed(self.target.client, to, body)
        self.timings.setdefault(kind, []).append(timing)

    async def user(self, number: int, kind: str, to: Origin, prompt: range, answer: range) -> None:
        """Sends its next request when the last one is answered."""
        rng = random.Random(f"user {number} {self.seed}")
        while self.going:
            await self.send(kind, to, rng.choice(prompt), rng.choice(answer))


async def disaggregated(traffic: Traffic) -> None:
    """Four users with short prompts, and every eight seconds a prompt that goes through the prefiller."""
    router = traffic.target.router

    async def long_ones(group: asyncio.TaskGroup) -> None:
        await asyncio.sleep(3)
        while traffic.going:
            group.create_task(traffic.send("long", router, 1500, 48))
            await asyncio.sleep(8)

    async with asyncio.TaskGroup() as group:
        for i in range(4):
            group.create_task(traffic.user(i, "short", router, range(30, 31), range(96, 97)))
        group.create_task(long_ones(group))


async def one_engine(traffic: Traffic) -> None:
    """Six users with short prompts and answers of all lengths, on the decoder alone."""
    async with asyncio.TaskGroup() as group:
        for i in range(6):
            group.create_task(traffic.user(i, "short", traffic.target.decode, range(8, 160), range(16, 96)))


async def colocated(traffic: Traffic) -> None:
    """Prompts of middle length at random times, each engine prefilling and decoding every second one."""
    rng = random.Random(f"arrivals {traffic.seed}")
    engines = (traffic.target.prefill, traffic.target.decode)
    async with asyncio.TaskGroup() as group:
        number = 0
        while traffic.going:
            prompt, answer = rng.randrange(200, 900), rng.randrange(24, 64)
            group.create_task(traffic.send("middle", engines[number % 2], prompt, answer))
            number += 1
            await asyncio.sleep(rng.expovariate(0.7))


@dataclass(frozen=True)
class Load:
    name: str
    what: str
    seconds: float
    run: Callable[[Traffic], Awaitable[None]]


LOADS = (
    Load("A", "4 users 30 → 96 tokens, every 8 s one of 1,500 → 48; router", 51, disaggregated),
    Load("B", "6 users 8-159 → 16-95 tokens; one engine", 30, one_engine),
    Load("C", "200-899 → 24-63 tokens, 0.7 a second; both engines alike", 50, colocated),
)


async def run(target: Target, load: Load, seed: str) -> dict[str, list[Timing]]:
    """Put a load on a target; returns when all answers have come. Raises ExceptionGroup of LoadErrors."""
    traffic = Traffic(target, seed, load.seconds)
    await load.run(traffic)
    return traffic.timings
