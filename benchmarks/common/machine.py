"""This machine while something is measured: free ports, what of its CPU is idle, what a process uses."""

from __future__ import annotations

import asyncio
import itertools
import os
import platform
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Quietly = Callable[[Callable[[], Awaitable[Any]]], Awaitable[tuple[Any, float]]]
"""Makes a measurement while other processes rest, and tells their share of the CPU; see quiet.py."""

_TICK = os.sysconf("SC_CLK_TCK")
_SAMPLE_SECONDS = 2.0
_PORTS = 10_000, 32_000


async def as_it_comes(measure: Callable[[], Awaitable[Any]]) -> tuple[Any, float]:
    """Whatever others do."""
    return await measure(), 0.0


def free_ports(count: int) -> tuple[int, ...]:
    """Ports that nothing listens on, below those that the system gives to outgoing connections."""
    found: list[int] = []
    for port in itertools.chain(
        range(begin := random.randrange(*_PORTS), _PORTS[1]), range(_PORTS[0], begin)
    ):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return tuple(found)
    raise SystemExit(f"{count} ports are wanted, and {len(found)} are free")


def name() -> str:
    """Such as "2 cores (AMD EPYC)"."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} cores ({names[0] if names else platform.machine()})"


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, its threads and its children, ended ones included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sum(map(int, fields[11:15])) / _TICK + sum(cpu_seconds(int(child)) for child in children)


def _times() -> tuple[int, int]:
    """Clock ticks of all cores since the machine started: idle, and all."""
    numbers = list(map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9]))
    return numbers[3] + numbers[4], sum(numbers)


@dataclass
class Idle:
    """Parts of the machine's CPU, 0 to 1, that nobody used, in samples of two seconds."""

    samples: list[float] = field(default_factory=list)

    @property
    def least(self) -> float:
        return min(self.samples, default=1.0)

    @property
    def mean(self) -> float:
        return sum(self.samples) / len(self.samples) if self.samples else 1.0


@asynccontextmanager
async def watched() -> AsyncIterator[Idle]:
    """Watch the CPU within the block."""
    idle = Idle()

    async def watch() -> None:
        before = _times()
        while True:
            await asyncio.sleep(_SAMPLE_SECONDS)
            now = _times()
            idle.samples.append((now[0] - before[0]) / max(1, now[1] - before[1]))
            before = now

    task = asyncio.create_task(watch())
    try:
        yield idle
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
