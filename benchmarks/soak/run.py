"""A local endpoint of real engines under load, while its processes are killed and frozen one after another.

    python benchmarks/soak/run.py [--requests N] [--period SECONDS] [--seed N]        (or `make soak`)

Starts `tandem up` with two prefillers and two decoders, learns from a decoder what the answers are, and sends
mixed requests, some of whose clients leave. In every period something is done to one process. In the end all
is left alone until it is back, and what is left behind is looked for. Prints a table; ends with 1 when a
request got what the policy promises it will not get, or when anything was left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import endpoint
import machine
from clients import Clients, known
from faults import BACK_WITHIN, Faults
from promises import broken

from tandem.http import Origin

HERE = Path(__file__).resolve().parent
SETTLED_WITHIN = 45.0
"""Seconds in which all that is leased or kept for a while ends: a prefiller's KV blocks, for one."""


@dataclass
class Result:
    rows: list[tuple[str, object]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """What should not be."""

    def check(self, what: str, found: list[str]) -> None:
        self.rows.append((what, len(found)))
        self.wrong += found

    def table(self) -> str:
        return "\n".join(["| | |", "| --- | --- |", *(f"| {what} | {value} |" for what, value in self.rows)])


def say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {what}", file=sys.stderr, flush=True)


async def soak(requests: int, at_once: int, period: float, seed: int, file: Path, port: int) -> Result:
    result = Result()
    shared, began = machine.shared_memory(), time.monotonic()

    def now() -> float:
        return time.monotonic() - began

    async with endpoint.up(file, port) as up:
        say(f"{up.url} is ready after {now():.0f} s")
        prefillers, decoders = (up.of(role) for role in ("prefill", "decode"))
        prompts = await known(up.client, Origin.parse(up.urls[decoders[0]]), seed)
        processes, began_load = len(machine.children(up.pid)), now()
        names = {url: name for name, url in up.urls.items()}
        clients = Clients(up.client, up.router, prompts, requests, seed, now, names)
        faults = Faults(up, seed, now, say)
        async with background(faults.watch()):
            async with background(faults.strike(period)), background(tell_progress(clients)):
                await clients.run(at_once)
            took = now() - began_load
            await until(lambda: not faults.missing, BACK_WITHIN)
            await until(up.at_rest, SETTLED_WITHIN)
        result.rows += [("requests", requests), ("in seconds", f"{took:.0f}")]
        result.rows += [(f"… {end}", number) for end, number in clients.ends.most_common()]
        tries = Counter[str](exchange.end for exchange in clients.exchanges)
        result.rows += [("tries", f"{tries.total()}: {told(tries)}"), ("faults", told(faults.done))]
        result.rows.append(("legs that failed", told(await up.counted("tandem_leg_failures_total"))))
        verdicts = (broken(each, faults.timeline, prefillers, decoders) for each in clients.exchanges)
        result.check("promises broken", [verdict for verdict in verdicts if verdict])
        result.check("processes not back in use in time", [*faults.late, *faults.missing])
        result.check("requests, reservations, KV blocks held on", await up.in_hand())
        more = len(machine.children(up.pid)) - processes
        result.check("processes more than at the start", [f"a process more, of {more}"] * more)
        await up.client.aclose()
        await until(lambda: not open_still(up), SETTLED_WITHIN)
        result.check("connections left open", open_still(up))
    left = machine.alive(faults.pids)
    result.check("processes left after the end", [f"process {pid} is still there" for pid in left])
    # Anybody's, so it is told only.
    segments = len(machine.shared_memory() - shared)
    result.rows.append(("segments of shared memory that were not there before, on this machine", segments))
    return result


def open_still(up: endpoint.Endpoint) -> list[str]:
    """Connections of clients; and of the router to an engine more than the one over which it looks at it."""
    kept = {Origin.parse(url).port: 1 for url in up.urls.values()} | {up.router.port: 0}
    found = {port: machine.connections([port]) for port in kept}
    return [f"{n} connections to port {port}" for port, n in found.items() if n > kept[port]]


async def tell_progress(clients: Clients) -> None:
    while True:
        await asyncio.sleep(30)
        say(f"{clients.ends.total()} of {clients.requests} requests: {told(clients.ends)}")


def told(counts: Mapping[Any, float]) -> str:
    return (
        ", ".join(f"{n:g} {what}" for what, n in sorted(counts.items(), key=lambda item: -item[1])) or "none"
    )


async def until(condition: Callable[[], object] | Callable[[], Awaitable[object]], within: float) -> None:
    """Wait for something that should come; what is wrong with it is told elsewhere."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        met = condition()
        if await met if isinstance(met, Awaitable) else met:
            return
        await asyncio.sleep(0.25)


@asynccontextmanager
async def background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Some work for the length of a block. What it raises is raised at the block's end."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        (ended,) = await asyncio.gather(task, return_exceptions=True)
        if not isinstance(ended, asyncio.CancelledError):
            raise ended if isinstance(ended, BaseException) else RuntimeError("it should not end")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=2000, help="default: 2000")
    parser.add_argument("--at-once", type=int, default=8, help="clients at once (default: 8)")
    parser.add_argument("--period", type=float, default=20.0, help="seconds between faults (default: 20)")
    parser.add_argument("--seed", type=int, default=1, help="of requests and faults (default: 1)")
    parser.add_argument("--file", type=Path, default=HERE / "endpoint.yaml", help="manifest to run")
    parser.add_argument("--port", type=int, default=0, help="of the router (default: a free one)")
    given = parser.parse_args()
    result = asyncio.run(
        soak(given.requests, given.at_once, given.period, given.seed, given.file, given.port or free_port())
    )
    print(result.table())
    for line in result.wrong:
        print(f"wrong: {line}")
    return 1 if result.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
