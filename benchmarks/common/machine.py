"""This machine while something is measured: free ports, what of its CPU is idle, what a process uses."""

from __future__ import annotations

import asyncio
import itertools
import os
import platform
import random
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
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


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for parent in found:
        for thread in Path(f"/proc/{parent}/task").glob("*"):
            with suppress(OSError):  # gone
                found += map(int, (thread / "children").read_text().split())
    return found


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, its threads and its children, ended ones included."""
    ticks = 0
    for each in tree(pid):
        with suppress(OSError):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / _TICK


def resident(pid: int) -> int:
    """Bytes of memory of one process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """What is started within the block runs on one core of the machine, and so does all that it starts."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def open_files(wanted: int) -> None:
    """Let this process, and what it starts, have so many files open. Raises SystemExit where it may not."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, wanted))
            return
        raise SystemExit(f"{wanted:,} open files are needed, and {most:,} are allowed: raise `ulimit -Hn`")
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


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
