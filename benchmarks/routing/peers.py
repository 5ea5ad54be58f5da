"""The routers that are measured: Tandem and its peers from PyPI, each in front of the same engines.

What the peers can do here:

- vllm-router 0.1.17. `cache_aware` guesses from what it sent: a tree of request texts for each engine.
  `kv_aware` follows the engines' KV events over ZMQ, and has an engine tokenize each prompt
  (`/tokenize`).
- smg 1.13. `cache_aware` in front of engines that speak HTTP is a tree of request texts, too. Its index
  of KV events is for `grpc://` workers alone ("non-gRPC worker, skipping KV event subscription", it says
  of others), so grpc_workers.py stands between: smg's own relay of vLLM's events, and a gRPC face for
  each engine.
"""

from __future__ import annotations

import itertools
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import free_ports
from packages import program
from processes import end, last_words, start, until_ready

from engines import NAME, Place
from tandem.bench.load import ask
from tandem.http import Client, Origin

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Setting:
    """What a router is started with."""

    engines: Sequence[Place]
    model: str
    """Folder with the tokenizer."""
    block_size: int
    cache_tokens: int
    """That all engines' caches hold."""
    port: int
    spare: int
    """A port for its metrics or administration."""
    workers: Sequence[int] = ()
    """Ports of the gRPC workers, where there are any."""


@dataclass(frozen=True)
class Router:
    """A router with one strategy. `tuned`: with settings that its documentation recommends here."""

    name: str
    product: str
    strategy: str
    how: str
    """In a few words, what it knows of the engines' caches."""
    tuned: tuple[str, ...] = ()
    over_grpc: bool = False
    floor: bool = False
    """Only there to show what knowing nothing gives."""

    def command(self, s: Setting) -> list[str]:
        make = {"Tandem": _tandem, "vllm-router": _vllm_router, "smg": _smg}[self.product]
        return [*make(self, s), *(word.format(**_sizes(s)) for word in self.tuned)]


def _sizes(s: Setting) -> dict[str, int]:
    characters = 4 * s.cache_tokens
    return {"characters": characters, "characters_each": characters // len(s.engines)}


def _tandem(router: Router, s: Setting) -> list[str]:
    words = [sys.executable, "-m", "tandem", "router", "--host", "127.0.0.1", "--port", str(s.port)]
    words += ["--admin-port", str(s.spare), "--model-path", s.model, "--log-level", "warning"]
    words += ["--routing-strategy", router.strategy, "--kv-block-size", str(s.block_size), "--engine"]
    if router.strategy == "kvaware":
        replays = [f",kv-replay={e.replay}" if e.replay else "" for e in s.engines]
        pairs = zip(s.engines, replays, strict=True)
        return [*words, *(f"{e.url},kv-events={e.events}{replay}" for e, replay in pairs)]
    return [*words, *(e.url for e in s.engines)]


def _vllm_router(router: Router, s: Setting) -> list[str]:
    words = [str(program("vllm-router")), "--host", "127.0.0.1", "--port", str(s.port)]
    words += ["--prometheus-port", str(s.spare), "--log-level", "warning", "--policy", router.strategy]
    words += ["--worker-startup-check-interval", "1", "--worker-urls", *(e.url for e in s.engines)]
    if router.strategy == "kv_aware":
        for engine in s.engines:
            words += ["--kv-event-source", f"{engine.url}={engine.events}"]
            words += ["--kv-event-replay-source", f"{engine.url}={engine.replay}"]
        words += ["--kv-event-block-size", str(s.block_size), "--kv-event-model", NAME]
    return words


def _smg(router: Router, s: Setting) -> list[str]:
    words = [str(program("smg")), "launch", "--host", "127.0.0.1", "--port", str(s.port)]
    words += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(s.spare), "--log-level", "warn"]
    words += ["--backend", "vllm", "--policy", router.strategy, "--block-size", str(s.block_size)]
    if router.over_grpc:
        urls = [f"grpc://127.0.0.1:{port}" for port in s.workers]
        return [*words, "--model-path", s.model, "--worker-urls", *urls]
    return [*words, "--worker-urls", *(e.url for e in s.engines)]


_EVENTS, _TEXT = "KV events", "texts it sent"
ROUTERS = (
    Router("tandem kvaware", "Tandem", "kvaware", _EVENTS),
    Router("tandem prefixaware", "Tandem", "prefixaware", "token blocks it sent"),
    Router("tandem roundrobin", "Tandem", "roundrobin", "nothing", floor=True),
    Router("vllm-router kv_aware", "vllm-router", "kv_aware", _EVENTS),
    Router("vllm-router cache_aware", "vllm-router", "cache_aware", _TEXT),
    # docs/load_balancing/README.md of vllm-project/router; the tree as large as the cache.
    Router(
        "vllm-router cache_aware, tuned",
        "vllm-router",
        "cache_aware",
        _TEXT,
        tuned=(
            *("--cache-threshold", "0.5", "--balance-abs-threshold", "32", "--balance-rel-threshold", "1.1"),
            *("--eviction-interval-secs", "5", "--max-tree-size", "{characters_each}"),
        ),
    ),
    Router("smg cache_aware, gRPC", "smg", "cache_aware", f"{_EVENTS} (gRPC)", over_grpc=True),
    # `smg launch --help`: "set a little above the engine's KV-event lag", "anti-hotspot decay"; 60 seconds of
    # warm-up and 10 between looks at loads are short here, where time runs eight times as fast.
    Router(
        "smg cache_aware, gRPC, tuned",
        "smg",
        "cache_aware",
        f"{_EVENTS} (gRPC)",
        tuned=(
            *("--selection-accounting-ttl-ms", "500", "--overlap-decay", "1.0"),
            *("--kv-index", "chain", "--worker-warmup-secs", "7", "--load-monitor-interval", "1"),
        ),
        over_grpc=True,
    ),
    Router("smg cache_aware, HTTP", "smg", "cache_aware", _TEXT),
    # docs/concepts/routing/cache-aware.md of smg: low thresholds for bursts; the tree as large as the cache.
    Router(
        "smg cache_aware, HTTP, tuned",
        "smg",
        "cache_aware",
        _TEXT,
        tuned=(
            *("--cache-threshold", "0.2", "--balance-abs-threshold", "4", "--balance-rel-threshold", "1.1"),
            *("--eviction-interval-secs", "5", "--max-tree-size", "{characters}"),
        ),
    ),
)


@dataclass
class Running:
    """A router that answers."""

    url: str
    process: Process


@asynccontextmanager
async def serving(router: Router, engines: Sequence[Place], **setting: Any) -> AsyncIterator[Running]:
    """Start a router, and wait until it uses every engine. Raises SystemExit after its last words."""
    port, spare, *workers = free_ports(2 + len(engines))
    s = Setting(engines=engines, port=port, spare=spare, workers=workers, **setting)
    started: list[Process] = []
    try:
        with last_words() as log:
            if router.over_grpc:
                started.append(await start(_workers(s), stdout=PIPE, stderr=log))
                assert started[0].stdout
                await started[0].stdout.readline()
            started.append(await start(router.command(s), stdout=log, stderr=log))
            await _ready(router, s, started[-1])
            yield Running(f"http://127.0.0.1:{port}", started[-1])
    finally:
        for process in reversed(started):
            await end(process)


def _workers(s: Setting) -> list[str]:
    pairs = zip(s.engines, s.workers, strict=True)
    engines = [f"{e.url}={port}={e.events}={e.replay}" for e, port in pairs]
    return [str(program("python")), str(HERE / "grpc_workers.py"), s.model, NAME, *engines]


async def _ready(router: Router, s: Setting, process: Process) -> None:
    """Until it knows all engines and has answered a request."""
    client, origin = Client(), Origin.parse(f"http://127.0.0.1:{s.port}")
    numbers = itertools.count()

    async def ready() -> bool:
        # Text: smg takes no token ids for workers over gRPC.
        body = {"model": NAME, "prompt": f"ready {next(numbers)}", "max_tokens": 1}
        if known := await _engines_known(client, router, s):
            await ask(client, origin, "/v1/completions", body)
        return known

    try:
        await until_ready(router.name, process, ready)
    finally:
        await client.aclose()


async def _engines_known(client: Client, router: Router, s: Setting) -> bool:
    if router.product == "smg":  # workers come one by one, after it listens
        listed = json.loads(await ask(client, Origin.parse(f"http://127.0.0.1:{s.port}"), "/workers"))
        healthy = [w for w in listed["workers"] if w.get("is_healthy")]
        return len(healthy) == len(s.engines)
    path = "/ready" if router.product == "Tandem" else "/health"
    await ask(client, Origin.parse(f"http://127.0.0.1:{s.port}"), path)
    return True
