"""Where Tandem's CPU time goes: py-spy, which is among the peers' packages, watches it under a load."""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import routers
import uvloop
from measure import Load, under_load
from packages import program

RATE = 200
"""Looks a second. At each of them the router stands still for a moment."""
SECONDS = 15
SHOWN = 25
_PYTHON = re.compile(r"\.pyx?:\d+\)$")


@dataclass(frozen=True)
class Profile:
    """How often each function was found at work itself, of all looks that found any at work."""

    looks: int
    python: Counter[str]
    """By the innermost Python function: what C code does for it is its own."""
    inner: Counter[str]
    """By the innermost function of any kind."""


def read(lines: Iterable[str]) -> Profile:
    """Of py-spy's raw format: frames from the outermost on, and how often they were found."""
    python: Counter[str] = Counter()
    inner: Counter[str] = Counter()
    for line in lines:
        stack, _, times = line.strip().rpartition(" ")
        if not stack:
            continue
        frames = stack.split(";")
        inner[frames[-1]] += int(times)
        of = next((frame for frame in reversed(frames) if _PYTHON.search(frame)), "(no Python)")
        python[of] += int(times)
    return Profile(inner.total(), python, inner)


def table(found: Counter[str], looks: int, cpu_ms: float) -> str:
    """The top: share of the time, and microseconds of a request."""
    lines = [
        f"{times / looks:6.1%} {times / looks * cpu_ms * 1000:7.1f} µs  {name}"
        for name, times in found.most_common(SHOWN)
    ]
    return "\n".join(lines)


async def record(router: routers.Running) -> Profile:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "stacks"
        words = ["record", "--pid", str(router.pid), "--duration", str(SECONDS), "--rate", str(RATE)]
        words += ["--format", "raw", "--native", "--function", "--output", str(file)]
        process = await asyncio.create_subprocess_exec(
            str(program("py-spy")), *words, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
        )
        _, said = await process.communicate()
        if process.returncode or not file.exists():
            raise SystemExit(f"py-spy failed: {said.decode('utf-8', 'replace')[-1000:]}")
        return read(file.read_text("utf-8").splitlines())


def run(load: Load) -> str:
    """Tandem's profile under a load, as text."""
    profiles: list[Profile] = []

    async def then(router: routers.Running) -> None:
        profiles.append(await record(router))

    figures, _ = uvloop.run(under_load(routers.TANDEM, load, 0, then=then))
    (profile,) = profiles
    cpu = figures["cpu_ms"]
    return (
        f"{load.name}: {cpu:.3f} ms of CPU a request, {figures['per_s']:.0f} requests/s\n\n"
        f"by Python function, with what C code does for it:\n{table(profile.python, profile.looks, cpu)}\n\n"
        f"by innermost function:\n{table(profile.inner, profile.looks, cpu)}\n"
    )
