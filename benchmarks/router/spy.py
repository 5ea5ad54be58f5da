"""Where Tandem's CPU time goes: py-spy, which is among the peers' packages, watches it under a load."""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import routers
import uvloop
from measure import Load, under_load
from packages import program

RATE = 200
"""Looks a second. At each of them the router stands still for a moment."""
SECONDS = 20.0
SHOWN = 25
_PYTHON = re.compile(r"\((?P<file>[^()]*\.pyx?):\d+\)$")
_CALLS = {
    *("read", "readv", "recv", "recvmsg", "write", "writev", "send", "sendmsg", "sendto"),
    *("epoll_wait", "epoll_pwait", "epoll_ctl", "accept4", "connect", "socket", "close", "getrandom"),
}
_NAMES = {"asyncio": "event loop, parser in C", "logging": "log", "prometheus_client": "metrics"}


@dataclass(frozen=True)
class Profile:
    """How often each was found at work, of all looks that found any at work."""

    looks: int
    groups: Counter[str]
    """Kinds of work."""
    python: Counter[str]
    """By the innermost Python function: what C code does for it is its own."""
    inner: Counter[str]
    """By the innermost function of any kind."""


def read(lines: Iterable[str]) -> Profile:
    """Of py-spy's raw format: frames from the outermost on, and how often they were found."""
    groups: Counter[str] = Counter()
    python: Counter[str] = Counter()
    inner: Counter[str] = Counter()
    for line in lines:
        stack, _, times = line.strip().rpartition(" ")
        if not stack:
            continue
        frames = stack.split(";")
        groups[_group(frames)] += int(times)
        python[next((f for f in reversed(frames) if _PYTHON.search(f)), "(no Python)")] += int(times)
        inner[frames[-1]] += int(times)
    return Profile(inner.total(), groups, python, inner)


def _group(frames: Sequence[str]) -> str:
    if any(frame.startswith("gc_collect") for frame in frames):
        return "garbage collection"
    files = [found["file"] for frame in frames if (found := _PYTHON.search(frame))]
    if any(file.startswith("logging/") for file in files):
        return "log"
    if frames[-1].partition(" ")[0].removeprefix("__") in _CALLS:
        return "system calls"
    package = next(("/".join(file.split("/")[:-1]) or "" for file in reversed(files)), "")
    if package.startswith("tandem/"):
        return "/".join(package.split("/")[:2])
    return _NAMES.get(package, "Python's library and others")


def top(found: Counter[str], looks: int, cpu_ms: float) -> str:
    """Shares of the time, and microseconds of a request."""
    lines = [
        f"{times / looks:6.1%} {times / looks * cpu_ms * 1000:7.1f} µs  {name}"
        for name, times in found.most_common(SHOWN)
    ]
    return "\n".join(lines)


async def record(router: routers.Running, seconds: float) -> Profile:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "stacks"
        words = ["record", "--pid", str(router.pid), "--duration", f"{seconds:.0f}", "--rate", str(RATE)]
        words += ["--format", "raw", "--native", "--function", "--output", str(file)]
        process = await asyncio.create_subprocess_exec(
            str(program("py-spy")), *words, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
        )
        _, said = await process.communicate()
        if process.returncode or not file.exists():
            raise SystemExit(f"py-spy failed: {said.decode('utf-8', 'replace')[-1000:]}")
        return read(file.read_text("utf-8").splitlines())


def run(load: Load, seconds: float | None) -> tuple[dict[str, Any], str]:
    """Tandem's profile under a load: what is kept of it, and all of it as text."""
    profiles: list[Profile] = []

    async def then(router: routers.Running) -> None:
        profiles.append(await record(router, seconds or SECONDS))

    asked = replace(load, seconds=seconds or load.seconds)
    figures, _ = uvloop.run(under_load(routers.TANDEM, asked, 0, then=then))
    (profile,) = profiles
    cpu = figures["cpu_ms"]
    kinds = {
        "by kind of work": profile.groups,
        "by Python function, with what C code does for it": profile.python,
        "by innermost function": profile.inner,
    }
    parts = [f"{title}:\n{top(found, profile.looks, cpu)}" for title, found in kinds.items()]
    text = "\n\n".join([f"{load.name}: {cpu:.3f} ms of CPU a request, {profile.looks} looks", *parts])
    shares = {name: times / profile.looks for name, times in profile.groups.most_common()}
    return {"load": load.name, "cpu_ms": cpu, "shares": shares}, f"{text}\n"
