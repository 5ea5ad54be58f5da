"""What a request costs the router with 2 engines and with 256, for every strategy.

A whole router process in front of simulated engines that answer at once and publish KV events; CPU time
is the process's, less what it uses while nothing is asked of it. Half of each prompt is shared. Both fleets
get as many requests a second: a busier router spends less on each, as it finds more to do whenever it wakes.
"""

from __future__ import annotations

import asyncio
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

import peers
import traces
from machine import Quietly, as_it_comes, cpu_seconds
from virtual import KV_BLOCK, STRATEGIES

import engines
from tandem.bench.load import ask
from tandem.http import Client, Origin
from tandem.sim import CostProfile

FEW, MANY = 2, 256
REQUESTS = 2000
AT_A_TIME = 32
PER_SECOND = 250
"""Well below what two of the simulated engines answer."""
TOKENS = 512
WARM_UP = 1000
"""Enough for a connection to every engine."""
IDLE_SECONDS = 2.0
TIME_SCALE = 200.0
_USERS = 512


def bodies(seed: int) -> list[dict[str, Any]]:
    """As many sessions, each with a prefix of its own, as are spread over the engines."""
    found = []
    for number in range(WARM_UP + REQUESTS):
        user = number % _USERS
        shared = traces.words(user, TOKENS // 2)
        alone = traces.words(1_000_000 * (seed + 1) + number, TOKENS - TOKENS // 2)
        prompt = " ".join([*shared, *alone])
        found.append({"model": engines.NAME, "prompt": prompt, "max_tokens": 1, "user": f"user {user}"})
    return found


async def measure(running: engines.Engines, folder: Path, strategy: str, seed: int) -> dict[str, float]:
    """CPU milliseconds of a request, and the CPU share of an idle router."""
    router = peers.Router("", "Tandem", strategy, "")
    setting = {"model": str(folder), "block_size": KV_BLOCK, "cache_tokens": 0}
    async with peers.serving(router, running.places, **setting) as served:
        client, origin, asked = Client(idle_per_origin=AT_A_TIME), Origin.parse(served.url), bodies(seed)

        async def drive(some: Sequence[dict[str, Any]]) -> None:
            waiting, begun = iter(enumerate(some)), time.monotonic()

            async def user() -> None:
                for number, body in waiting:
                    await asyncio.sleep(begun + number / PER_SECOND - time.monotonic())
                    await ask(client, origin, "/v1/completions", body)

            await asyncio.gather(*(user() for _ in range(AT_A_TIME)))

        pid = served.process.pid
        try:
            await drive(asked[:WARM_UP])
            cpu, begun = cpu_seconds(pid), time.monotonic()
            await asyncio.sleep(IDLE_SECONDS)
            idle = (cpu_seconds(pid) - cpu) / (time.monotonic() - begun)
            cpu, begun = cpu_seconds(pid), time.monotonic()
            await drive(asked[WARM_UP:])
            seconds = time.monotonic() - begun
            cpu = cpu_seconds(pid) - cpu - idle * seconds
        finally:
            await client.aclose()
    return {"cpu_ms": cpu / REQUESTS * 1000, "idle": idle, "per_s": REQUESTS / seconds}


async def _all(count: int, folder: Path, strategies: Sequence[str], seed: int) -> dict[str, dict[str, float]]:
    settings = engines.Settings(
        model=str(folder),
        engines=count,
        blocks=4096,
        block_size=KV_BLOCK,
        max_model_len=8192,
        time_scale=TIME_SCALE,
        profile=asdict(CostProfile()),
    )
    async with engines.started(settings) as running:
        return {strategy: await measure(running, folder, strategy, seed) for strategy in strategies}


def run(
    runs: int = 3,
    strategies: Sequence[str] = STRATEGIES,
    *,
    quietly: Quietly = as_it_comes,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = traces.write_model(Path(name))
        for number in range(runs):
            counts = (FEW, MANY) if number % 2 == 0 else (MANY, FEW)
            result = {}
            for n in counts:
                one = functools.partial(_all, n, folder, strategies, number)
                result[str(n)], _ = asyncio.run(quietly(one))
            found.append(result)
            for strategy in strategies:
                few, many = (result[str(n)][strategy]["cpu_ms"] for n in (FEW, MANY))
                told = f"{few:.2f} → {many:.2f} ms ({many / few:.2f} ×)"
                say(f"CPU of a request, run {number + 1}, {strategy}: {told}")
    rows = []
    for strategy in strategies:
        few, many = (statistics.median(r[str(n)][strategy]["cpu_ms"] for r in found) for n in (FEW, MANY))
        ratio = statistics.median(
            r[str(MANY)][strategy]["cpu_ms"] / r[str(FEW)][strategy]["cpu_ms"] for r in found
        )
        idle = statistics.median(r[str(MANY)][strategy]["idle"] for r in found)
        rows.append({"strategy": strategy, "few_ms": few, "many_ms": many, "ratio": ratio, "idle_many": idle})
    return {"few": FEW, "many": MANY, "tokens": TOKENS, "requests": REQUESTS, "runs": found, "rows": rows}


if __name__ == "__main__":
    print(json.dumps(run(1), indent=1))
