"""Whether the machine is ours: a time measured beside other work says nothing about an engine."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

QUIET = 0.1
"""Of the machine's CPU, what other processes may use during a measurement."""
_LOOK_SECONDS = 3.0
_WAIT_SECONDS = 300.0
_TICK = os.sysconf("SC_CLK_TCK")


class Meter:
    """Counts the CPU time of processes that are neither this one nor descend from it."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._ours, self._busy = _ours(), _busy()

    def others(self) -> float:
        """Their share of the machine's CPU since this meter was made, 0 to 1."""
        seconds = time.monotonic() - self._started
        used = _busy() - self._busy - (_ours() - self._ours)
        return max(0.0, used / (seconds * (os.cpu_count() or 1)))


def _busy() -> float:
    """CPU seconds used by anyone since the machine started."""
    user, nice, system, _, _, irq, softirq, *_ = map(
        int, Path("/proc/stat").read_text().split("\n")[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) / _TICK


def _ours() -> float:
    """CPU seconds of this process, its descendants, and what they have waited for."""
    parents: dict[int, int] = {}
    used: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # Behind the name, which may hold anything: state, parent, …, 4 times.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # gone
            continue
        parents[int(entry.name)] = int(fields[1])
        used[int(entry.name)] = sum(map(int, fields[11:15]))
    total = 0
    for pid, ticks in used.items():
        ancestor = pid
        while ancestor not in (0, os.getpid()):
            ancestor = parents.get(ancestor, 0)
        total += ticks if ancestor else 0
    return total / _TICK


async def undisturbed(
    measure: Callable[[], Awaitable[T]], *, attempts: int, say: Callable[[str], None]
) -> tuple[T, float]:
    """Measure while others rest, again if they did not. With the others' share; the least disturbed one
    where all were."""
    best: tuple[T, float] | None = None
    for _ in range(attempts):
        if attempts > 1:
            await _wait(say)
        meter = Meter()
        result = await measure()
        share = meter.others()
        if best is None or share < best[1]:
            best = result, share
        if share <= QUIET:
            break
        say(f"others used {share:.0%} of the CPU meanwhile")
    assert best is not None
    return best


async def _wait(say: Callable[[str], None]) -> None:
    deadline = time.monotonic() + _WAIT_SECONDS
    told = False
    while time.monotonic() < deadline:
        meter = Meter()
        await asyncio.sleep(_LOOK_SECONDS)
        if (share := meter.others()) <= QUIET / 2:
            return
        if not told:
            say(f"others use {share:.0%} of the CPU; waiting for them")
            told = True
