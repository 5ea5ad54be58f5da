"""Child processes for tests: small Python programs, and what has become of them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

from tandem.local.process import ProcessSpec


def program(name: str, code: str, **options: object) -> ProcessSpec:
    """A process that runs Python code."""
    return ProcessSpec(name, (sys.executable, "-c", code), **options)  # type: ignore[arg-type]


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


async def eventually(holds: Callable[[], object]) -> None:
    """Wait until something holds; the test's own time-out is the limit."""
    while not holds():
        await asyncio.sleep(0.005)


async def written(log: Path) -> str:
    """What a process has written, once it has written something with an end of line."""

    def text() -> str:
        return log.read_text() if log.exists() else ""

    await eventually(lambda: text().endswith("\n"))
    return text()
