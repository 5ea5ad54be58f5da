"""Routers in real time, in front of the same eight simulated engines: hit rate, time to first token,
balance.

The trace runs faster than it was recorded, and the engines are faster too: at 8 times the speed they are
as busy as they would be at the trace's own, at 12 times half as busy again. A block of the trace is 64
tokens here instead of 512, with costs of a token to match, and answers are short: else the machine would
be measured. Each run has fresh engines and a fresh router; the order of the routers alternates from run
to run.
"""

from __future__ import annotations

import asyncio
import functools
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

import machine
import packages
import peers
import traces
from replay import figures, replay
from virtual import ENGINE_BLOCKS, ENGINES, KV_BLOCK
from virtual import PROFILE as VIRTUAL_PROFILE

import engines
from tandem.bench.load import ask
from tandem.http import Client, Origin

SPEEDS = (8.0, 12.0)
"""Times the trace's own."""
TIME_SCALE = 8.0
BLOCK = 64
"""Tokens here for a block of the trace."""
SHRUNK = traces.BLOCK // BLOCK
REQUESTS = 800
MOST_OUTPUT = 32
MAX_MODEL_LEN = traces.MAX_MODEL_LEN // SHRUNK
CACHE_BLOCKS = ENGINES * ENGINE_BLOCKS
"""Of the trace, over all engines."""
PROFILE = replace(
    VIRTUAL_PROFILE,
    prefill_token=VIRTUAL_PROFILE.prefill_token * SHRUNK,
    prefill_attention=VIRTUAL_PROFILE.prefill_attention * SHRUNK**2,
    decode_context=VIRTUAL_PROFILE.decode_context * SHRUNK,
    max_num_batched_tokens=VIRTUAL_PROFILE.max_num_batched_tokens // SHRUNK,
)
"""What virtual time has, where a token costs as much as all those that it stands for."""
_COUNTER = re.compile(r"^(vllm:prefix_cache_(?:queries|hits)_total)\{[^}]*\} (\S+)$", re.MULTILINE)


def load(requests: int) -> list[traces.TraceRequest]:
    return traces.load(requests=requests, block=BLOCK, most_output=MOST_OUTPUT)


def bound(requests: Sequence[traces.TraceRequest]) -> float:
    """The hit rate of one cache as large as all the engines'."""
    return traces.bound(requests, CACHE_BLOCKS, BLOCK)


async def measure(
    requests: Sequence[traces.TraceRequest], router: peers.Router, speed: float, folder: Path
) -> dict[str, float]:
    """One run, with fresh engines and a fresh router. `folder`: of the model."""
    settings = engines.Settings(
        model=str(folder),
        engines=ENGINES,
        blocks=ENGINE_BLOCKS * BLOCK // KV_BLOCK,
        block_size=KV_BLOCK,
        max_model_len=MAX_MODEL_LEN,
        time_scale=TIME_SCALE,
        profile=asdict(PROFILE),
    )
    setting = {"model": str(folder), "block_size": KV_BLOCK, "cache_tokens": CACHE_BLOCKS * BLOCK}
    async with (
        engines.started(settings) as running,
        peers.serving(router, running.places, **setting) as served,
    ):
        cpu = machine.cpu_seconds(served.process.pid)
        times, counters = await running.times(), await cache_counters(running.places)
        async with machine.watched() as idle:
            answers = await replay(requests, served.url, engines.NAME, speed=speed)
        queries, hits = (b - a for a, b in zip(counters, await cache_counters(running.places), strict=True))
        busy, work = zip(
            *((b - a, d - c) for (a, c), (b, d) in zip(times, await running.times(), strict=True)),
            strict=True,
        )
        cpu = machine.cpu_seconds(served.process.pid) - cpu
    found = figures(answers, speed)
    return {
        **found,
        "first_error": next((a.error for a in answers if a.error), ""),
        "hit_rate": hits / queries if queries else 0.0,
        "imbalance": imbalance(busy),
        "work_imbalance": imbalance(work),
        "busy": statistics.mean(busy) / TIME_SCALE / max(1e-9, found["seconds"]),
        "cpu_ms": cpu / len(requests) * 1000,
        "idle_least": idle.least,
        "idle_mean": idle.mean,
    }


def imbalance(loads: Sequence[float]) -> float:
    """The highest over the mean of all; 1 is even."""
    mean = statistics.mean(loads)
    return max(loads) / mean if mean else 1.0


async def cache_counters(places: Sequence[engines.Place]) -> tuple[float, float]:
    """Tokens that all engines looked up in their prefix caches, and found, since their start."""
    client = Client()
    try:
        pages = [await ask(client, Origin.parse(place.url), "/metrics") for place in places]
    finally:
        await client.aclose()
    sums = {"vllm:prefix_cache_queries_total": 0.0, "vllm:prefix_cache_hits_total": 0.0}
    for page in pages:
        for name, value in _COUNTER.findall(page.decode()):
            sums[name] += float(value)
    queries, hits = sums.values()
    return queries, hits


def orders(routers: Sequence[peers.Router], runs: int) -> list[list[peers.Router]]:
    """Of each run, every second time backwards. The floor and tuned peers take part in the first one only."""
    first, rest = list(routers), [r for r in routers if not (r.tuned or r.floor)]
    return [(rest if run else first)[:: -1 if run % 2 else 1] for run in range(runs)]


def run(
    runs: int = 3,
    requests: int = REQUESTS,
    routers: Sequence[peers.Router] = peers.ROUTERS,
    speeds: Sequence[float] = SPEEDS,
    quietly: machine.Quietly = machine.as_it_comes,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """All routers at all speeds, `runs` times."""
    packages.python()
    load = traces.load(requests=requests, block=BLOCK, most_output=MOST_OUTPUT)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = traces.write_model(Path(name))
        for number, order in enumerate(orders(routers, runs)):
            moved = traces.spread(load, number)
            for speed in speeds:
                for router in order:
                    one = functools.partial(measure, moved, router, speed, folder)
                    # On asyncio's own loop: uvloop's clock counts whole milliseconds.
                    result, others = asyncio.run(quietly(one))
                    told = {"router": router.name, "speed": speed, "run": number, "others": others}
                    found.append({**told, **result})
                    say(summary(found[-1]))
    return {
        "requests": len(load),
        "most_output": MOST_OUTPUT,
        "block_tokens": BLOCK,
        "blocks": CACHE_BLOCKS,
        "engines": ENGINES,
        "time_scale": TIME_SCALE,
        "profile": asdict(PROFILE),
        "bound": bound(load),
        "routers": [asdict(r) for r in routers],
        "runs": found,
    }


def summary(found: dict[str, Any]) -> str:
    ms = {name: f"{found[name] * 1000:.0f}" for name in ("ttft_p50", "ttft_p99", "late")}
    return (
        f"run {found['run'] + 1}, {found['speed']:g} × {found['router']}: hits {found['hit_rate']:.1%}, "
        f"TTFT {ms['ttft_p50']} / {ms['ttft_p99']} ms, imbalance {found['imbalance']:.2f} / "
        f"{found['work_imbalance']:.2f}, engines busy {found['busy']:.0%}, {found['errors']} errors, router "
        f"{found['cpu_ms']:.1f} ms a request, idle {found['idle_least']:.0%}-{found['idle_mean']:.0%}, "
        f"late {ms['late']} ms"
    )


if __name__ == "__main__":
    names = sys.argv[3:]
    chosen = [r for r in peers.ROUTERS if not names or r.name in names]
    run(1, int(sys.argv[1]), chosen, [float(sys.argv[2])])
