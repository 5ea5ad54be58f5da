"""`tandem status`: this user's endpoints on this machine, and how each of their processes is."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tandem.cli import FAILURE, OK
from tandem.cli.endpoints import add_which, none_found

if TYPE_CHECKING:
    import httpx

    from tandem.local.record import Found, ProcessState

_ANSWER_SECONDS = 2.0
_ENDED_SECONDS = 86_400.0
"""How long one that has ended is shown to those who do not ask for it."""
_IN_HAND = {
    "router": ("tandem_requests_running", "tandem_requests_waiting"),
    "engine": ("vllm:num_requests_running", "vllm:num_requests_waiting"),
}
_KV_USE = "vllm:kv_cache_usage_perc"
_CACHES = {
    "l1_read": "vllm:lmcache_l1_hit_bytes_total",
    "l2_read": "vllm:lmcache_l2_hit_bytes_total",
    "l2_written": "vllm:lmcache_l2_write_bytes_total",
}
"""Of an engine that hands over through LMCache: what it has had from its caches of KV, and written."""


@dataclass(frozen=True)
class Seen:
    """A process: what `tandem up` knows of it, and what is seen of it now. None: it does not tell."""

    known: ProcessState
    memory_bytes: int | None = None
    requests: int | None = None
    kv_use: float | None = None
    """The part of its KV cache that is in use, from 0 to 1."""
    waits_for: str | None = None
    """What keeps a router from being ready."""
    cache_bytes: dict[str, int] | None = None
    """By the names of `_CACHES`, since its start."""

    @property
    def ready(self) -> bool:
        return self.known.state == "ready" and not self.waits_for

    @property
    def shown(self) -> str:
        """Its state in a few words."""
        if self.known.state == "ready":
            return "not ready" if self.waits_for else "ready"
        if self.known.restart_at is not None:
            return f"restarting in {max(0.0, self.known.restart_at - time.time()):.0f} s"
        return f"{self.known.state} {self.known.doing}".rstrip()

    def as_dict(self) -> dict[str, Any]:
        return {
            **self.known.model_dump(),
            "ready": self.ready,
            "waits_for": self.waits_for or None,
            "memory_bytes": self.memory_bytes,
            "requests": self.requests,
            "kv_use": self.kv_use,
            "cache_bytes": self.cache_bytes,
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_which(parser)
    parser.add_argument("--json", action="store_true", help="print it as JSON on stdout")


def run(arguments: argparse.Namespace) -> int:
    from tandem.local.record import find

    found = find(arguments.name, arguments.port)
    if arguments.name is None and arguments.port is None:
        found = [f for f in found if f.running or time.time() - f.last_sign < _ENDED_SECONDS]
    seen = list(zip(found, asyncio.run(_look(found)), strict=True))
    if arguments.json:
        print(json.dumps([_as_dict(*each) for each in seen], indent=2))
    else:
        from tandem.cli.console import show_endpoint

        for endpoint, processes in seen:
            show_endpoint(endpoint, processes)
    running = [each for each in seen if each[0].running]
    if not running:
        return none_found(arguments.name, arguments.port, running=True)
    return OK if all(_is_ready(*each) for each in running) else FAILURE


async def _look(found: list[Found]) -> list[list[Seen]]:
    """Every process of every endpoint, all asked at once."""
    import httpx

    from tandem.local import proc

    groups = [p.pid for each in found if each.running for p in each.state.processes if p.pid is not None]
    used = proc.use_of(groups)

    async with httpx.AsyncClient(timeout=_ANSWER_SECONDS, trust_env=False) as client:

        async def look(each: Found, process: ProcessState) -> Seen:
            if not each.running or process.pid is None:
                return Seen(process)
            return await _ask(client, process, used[process.pid].memory_bytes)

        async def look_at_all(each: Found) -> list[Seen]:
            return await asyncio.gather(*(look(each, p) for p in each.state.processes))

        return await asyncio.gather(*map(look_at_all, found))


async def _ask(client: httpx.AsyncClient, process: ProcessState, memory_bytes: int) -> Seen:
    import httpx

    from tandem.bench.scrape import read_sums
    from tandem.local.endpoint import what_router_waits_for

    is_router = process.role == "router"
    in_hand = _IN_HAND["router" if is_router else "engine"]
    waits_for = await what_router_waits_for(client, process.url) if is_router else None
    try:
        async with asyncio.timeout(3 * _ANSWER_SECONDS):  # httpx has limits for each piece of it only
            answer = await client.get(f"{process.url}/metrics")
        sums = read_sums(answer.text, [*in_hand, _KV_USE, *_CACHES.values()])
    except (
        httpx.HTTPError,
        httpx.InvalidURL,
        TimeoutError,
        ValueError,
    ):  # what answers there is something else
        sums = {}
    requests = int(sum(sums.get(name, 0.0) for name in in_hand)) if in_hand[0] in sums else None
    caches = {name: int(sums[metric]) for name, metric in _CACHES.items() if metric in sums} or None
    return Seen(process, memory_bytes, requests, sums.get(_KV_USE), waits_for, caches)


def _is_ready(endpoint: Found, processes: list[Seen]) -> bool:
    return endpoint.phase == "running" and all(p.ready for p in processes)


def _as_dict(endpoint: Found, processes: list[Seen]) -> dict[str, Any]:
    known = endpoint.state
    return {
        "name": known.name,
        "url": known.url,
        "port": known.port,
        "pid": known.pid if endpoint.running else None,
        "state": endpoint.phase,
        "ready": _is_ready(endpoint, processes),
        "since": known.since,
        "cause": None if endpoint.running else endpoint.cause_of_end,
        "logs": str(endpoint.folder),
        "processes": [p.as_dict() for p in processes] if endpoint.running else [],
    }
