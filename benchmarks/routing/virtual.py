"""Every strategy before eight simulated engines, in virtual time: hit rates, times to first token, balance.

    python benchmarks/routing/virtual.py [--out FILE] [--runs N] [--workers N] [--requests N]

Replays the Mooncake conversation trace at 1 × and 2 × its speed, and requests of which four in five begin
with the same 8,000 tokens; prints a table, and writes JSON to FILE. About twenty minutes on two cores.

Router, engines and client share one process and one event loop. What a run draws is when requests come within
the 3 seconds to which the trace rounds their times, and what strategies draw themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import traces
from prometheus_client.parser import text_string_to_metric_families
from replay import figures, replay
from traces import TraceRequest

from tandem.bench.load import LoadError, ask
from tandem.config import RouterConfig
from tandem.http import Client, Origin
from tandem.prompt import load as load_counter
from tandem.router.app import running
from tandem.router.kv_events import Subscriber
from tandem.sim import CostProfile, EngineServer, EngineSpec, Fleet, parse, virtual

ENGINES = 8
ENGINE_BLOCKS = 2000
"""Blocks of the trace, 512 tokens each, that an engine's cache holds."""
KV_BLOCK = 16
"""vLLM's, and the smallest common divisor of what prompts share."""
STRATEGIES = ("kvaware", "prefixaware", "session", "roundrobin")
HOT_STRATEGIES = ("kvaware", "prefixaware")
SPEEDS = (1.0, 2.0)
MOST_OUTPUT = 128
"""Tokens that an answer is cut to: most of a run's time goes into them, and choosing hardly depends on it."""
HOT_REQUESTS, HOT_PER_SECOND = 2000, 60.0
MODEL = "m"

PROFILE = CostProfile(
    name="about Llama 3.1 8B (bfloat16, KV in 8 bits) on one H200",
    step=0.006,
    prefill_token=1 / 25_000,
    prefill_attention=1e-9,
    decode_sequence=5e-5,
    decode_context=1.5e-8,
    kv_bytes_per_token=65_536,
    block_size=KV_BLOCK,
    max_num_batched_tokens=8192,
    max_num_seqs=256,
)


@dataclass(frozen=True)
class Run:
    """`speed`: times the trace's; of hot prefixes always 1."""

    workload: str
    strategy: str
    speed: float
    seed: int
    requests: int | None = None
    """None: all."""

    def trace(self) -> list[TraceRequest]:
        if self.workload == "trace":
            whole = traces.load(requests=self.requests, most_output=MOST_OUTPUT)
            return traces.spread(whole, self.seed)
        return traces.hot_prefix(self.requests or HOT_REQUESTS, HOT_PER_SECOND, seed=self.seed)


class Meter:
    """A cost profile that adds up what an engine's steps take."""

    def __init__(self, profile: CostProfile) -> None:
        self._profile = profile
        self.busy = 0.0
        self.work = 0.0
        """Without the fixed part of each step, which an engine spends on one stream as well as on many."""

    def step_seconds(self, chunks: Iterable[tuple[int, int]], contexts: Iterable[float]) -> float:
        seconds = self._profile.step_seconds(chunks, contexts)
        self.busy += seconds
        self.work += seconds - self._profile.step
        return seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._profile, name)


class Patience:
    """Stops virtual time while KV events are under way.

    ZMQ carries them in threads of its own. That takes real time, a fraction of a millisecond, in which the
    clock would jump from step to step. A loop that has something to do does not jump.
    """

    def __init__(self, fleet: Fleet) -> None:
        """To be made before engines publish anything."""
        self.real_seconds = 0.0
        self.failed = False
        """Whether some batch did not arrive within a minute."""
        self._subscriber: Subscriber | None = None
        self._published = 0
        self._since = 0.0
        self._waiting = False
        self._loop = asyncio.get_running_loop()
        for server in fleet.engines:
            watched = _Watched(server.engine.publisher, self._on_batch)
            server.engine.publisher = watched  # type: ignore[assignment]

    def follow(self, subscriber: Subscriber) -> None:
        """To be called when all engines are followed; from then on each batch is waited for."""
        self._subscriber = subscriber
        self._wait(subscriber)

    def _on_batch(self) -> None:
        self._published += 1
        if self._subscriber is not None and not self._waiting:
            self._wait(self._subscriber)

    def _wait(self, subscriber: Subscriber) -> None:
        self._waiting = True
        self._since = time.perf_counter()
        self._loop.call_soon(self._look, subscriber)

    def _look(self, subscriber: Subscriber) -> None:
        waited = time.perf_counter() - self._since
        if subscriber.idle and subscriber.batches >= self._published:
            self._waiting = False
            self.real_seconds += waited
        elif waited < 60:
            self._loop.call_soon(self._look, subscriber)
        else:
            self.failed = True


class _Watched:
    """A publisher that tells of each batch."""

    def __init__(self, publisher: Any, on_batch: Callable[[], None]) -> None:
        self._publisher = publisher
        self._on_batch = on_batch

    def publish(self, *batch: Any) -> None:
        self._publisher.publish(*batch)
        self._on_batch()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._publisher, name)


async def measure(run: Run, folder: Path) -> dict[str, Any]:
    """One replay, with fresh engines and a fresh router."""
    requests = run.trace()
    async with Fleet(_specs(folder), profile=PROFILE, environment={}) as fleet:
        patience = Patience(fleet)
        config = RouterConfig(
            port=0,
            engine=tuple(_described(server) for server in fleet.engines),
            routing_strategy=run.strategy,
            session_field="user",
            kv_block_size=KV_BLOCK,
            log_level="error",
        )
        # The tokenizer is not named in the configuration: a process that counts would live in real time.
        async with running(config, load_counter(folder)) as (server, app):
            if app.knowledge is not None:
                while len(app.fleet.engines) < ENGINES:  # noqa: ASYNC110 - the loop must not rest
                    await asyncio.sleep(0)
                patience.follow(app.knowledge.subscriber)
            url = f"http://127.0.0.1:{server.port}"
            client = Client()
            try:
                await _ready(client, url)
                before = [await _cache_counters(client, engine) for engine in fleet.urls]
                meters = [_metered(server) for server in fleet.engines]
                begun = time.perf_counter()
                answers = await replay(requests, url, MODEL, speed=run.speed, fields=_session)
                wall = time.perf_counter() - begun
                after = [await _cache_counters(client, engine) for engine in fleet.urls]
                (fallbacks,) = await _metrics(client, url, "tandem_kvaware_fallbacks_total")
            finally:
                await client.aclose()
    if patience.failed:
        raise RuntimeError(f"{run}: KV events did not arrive")
    queries, hits = (sum(b[i] - a[i] for a, b in zip(before, after, strict=True)) for i in (0, 1))
    found = figures(answers, run.speed)
    first_error = next((a.error for a in answers if a.error), "")
    return {
        **asdict(run),
        **found,
        "first_error": first_error,
        "hit_rate": hits / queries,
        "imbalance": _imbalance([m.busy for m in meters]),
        "work_imbalance": _imbalance([m.work for m in meters]),
        "busy": statistics.mean(m.busy for m in meters) / found["seconds"],
        "work": statistics.mean(m.work for m in meters) / found["seconds"],
        "wall": wall,
        "waited_for_events": patience.real_seconds,
        "fallbacks": fallbacks,
    }


def _specs(folder: Path) -> list[EngineSpec]:
    blocks = ENGINE_BLOCKS * traces.BLOCK // KV_BLOCK + 1  # vLLM keeps one of them for itself
    events = {"enable_kv_cache_events": True, "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}
    flags = ["--model", str(folder), "--served-model-name", MODEL, "--block-size", str(KV_BLOCK)]
    flags += ["--num-gpu-blocks-override", str(blocks), "--kv-events-config", json.dumps(events)]
    return [EngineSpec(parse(flags)) for _ in range(ENGINES)]


def _described(server: EngineServer) -> str:
    """For `--engine`: with the ports that were free."""
    publisher = server.engine.publisher
    assert publisher is not None
    assert publisher.replay_endpoint is not None
    ports = (endpoint.rpartition(":")[2] for endpoint in (publisher.endpoint, publisher.replay_endpoint))
    events, replays = (f"tcp://127.0.0.1:{port}" for port in ports)
    return f"{server.url},kv-events={events},kv-replay={replays}"


def _session(request: TraceRequest) -> dict[str, str]:
    return {"user": request.session}


def _metered(server: EngineServer) -> Meter:
    meter = Meter(server.engine.profile)
    server.engine.profile = meter  # type: ignore[assignment]
    return meter


async def _ready(client: Client, url: str) -> None:
    for _ in range(1000):
        try:
            await ask(client, Origin.parse(url), "/ready")
        except LoadError:
            await asyncio.sleep(0.1)
        else:
            return
    raise RuntimeError(f"{url} does not get ready")


async def _cache_counters(client: Client, engine: str) -> list[float]:
    """Tokens that an engine looked up in its prefix cache, and those it found."""
    names = (f"vllm:prefix_cache_{what}_total" for what in ("queries", "hits"))
    return await _metrics(client, engine, *names)


async def _metrics(client: Client, url: str, *names: str) -> list[float]:
    """The sums of some metrics' samples; 0 where there are none."""
    text = (await ask(client, Origin.parse(url), "/metrics")).decode()
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return [sum(s.value for s in samples if s.name == name) for name in names]


def _imbalance(loads: Sequence[float]) -> float:
    return max(loads) / statistics.mean(loads)


# --- many runs ---


def plan(runs: int, requests: int | None) -> list[Run]:
    """The longest first, so that no process has to wait for the other's last one."""
    planned = [
        Run("trace", strategy, speed, seed, requests)
        for seed in range(1, runs + 1)
        for speed in SPEEDS
        for strategy in STRATEGIES
    ]
    hot = [
        Run("hot", strategy, 1.0, seed, requests)
        for seed in range(1, runs + 1)
        for strategy in HOT_STRATEGIES
    ]
    return planned + hot


def one(run: Run) -> dict[str, Any]:
    """To be called in a process of its own."""
    logging.basicConfig(level="ERROR")
    with tempfile.TemporaryDirectory() as folder:
        return virtual.run(measure(run, traces.write_model(Path(folder))))


def measure_all(runs: int, workers: int, requests: int | None = None) -> dict[str, Any]:
    """All of it; see `report` for what the result holds."""
    planned = plan(runs, requests)
    context = multiprocessing.get_context("spawn")
    found = []
    # One process for each run, so that none finds another's garbage.
    with ProcessPoolExecutor(workers, mp_context=context, max_tasks_per_child=1) as pool:
        for number, result in enumerate(pool.map(one, planned), 1):
            found.append(result)
            say(f"{number} of {len(planned)}: {summary(result)}")
    return {
        "profile": asdict(PROFILE),
        "engines": ENGINES,
        "blocks": ENGINES * ENGINE_BLOCKS,
        "block_tokens": traces.BLOCK,
        "kv_block_tokens": KV_BLOCK,
        "bound": traces.bound(traces.load(requests=requests), ENGINES * ENGINE_BLOCKS),
        "runs": found,
        "rows": rows(found),
    }


FIGURES = ("hit_rate", "ttft_p50", "ttft_p99", "imbalance", "work_imbalance", "busy", "work", "errors")


def rows(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians of each workload, speed and strategy, with the lowest and highest run."""
    groups: dict[tuple[str, float, str], list[dict[str, Any]]] = {}
    for each in runs:
        groups.setdefault((each["workload"], each["speed"], each["strategy"]), []).append(each)
    return [
        {
            "workload": workload,
            "speed": speed,
            "strategy": strategy,
            **{name: statistics.median(r[name] for r in group) for name in FIGURES},
            "lowest": {name: min(r[name] for r in group) for name in FIGURES},
            "highest": {name: max(r[name] for r in group) for name in FIGURES},
        }
        for (workload, speed, strategy), group in groups.items()
    ]


def table(result: dict[str, Any]) -> str:
    """Markdown. Seconds; imbalance is the highest engine's over the mean."""
    header = ["workload", "strategy", "hit rate", "TTFT p50, s", "p99, s"]
    header += ["imbalance", "without fixed part", "busy"]
    lines = [header, ["---"] * len(header)]
    lines.append(["trace", "bound: one cache", f"{result['bound']:.1%}", *[""] * 5])
    for row in result["rows"]:
        name = f"trace, {row['speed']:g} ×" if row["workload"] == "trace" else "hot prefix"
        cells = [f"{row['hit_rate']:.1%}", f"{row['ttft_p50']:.2f}", f"{row['ttft_p99']:.1f}"]
        cells += [f"{row['imbalance']:.2f}", f"{row['work_imbalance']:.2f}", f"{row['busy']:.0%}"]
        lines.append([name, row["strategy"], *cells])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def summary(result: dict[str, Any]) -> str:
    return (
        f"{result['workload']} {result['speed']:g} × {result['strategy']}: hits {result['hit_rate']:.1%}, "
        f"TTFT {result['ttft_p50']:.2f} / {result['ttft_p99']:.1f} s, imbalance {result['imbalance']:.2f} / "
        f"{result['work_imbalance']:.2f}, {result['errors']} errors, took {result['wall']:.0f} s"
    )


def say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {what}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    parser.add_argument("--runs", type=int, default=3, help="of each kind (default: 3)")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time (default: 2)")
    parser.add_argument("--requests", type=int, help="only the first so many, for a quick look")
    arguments = parser.parse_args()
    result = measure_all(arguments.runs, arguments.workers, arguments.requests)
    print(table(result))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
