"""Routers as processes: started, waited for until they serve, ended; with their last words when they fail."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any

from tandem.bench.load import LoadError

READY_SECONDS = 60.0
_LAST_BYTES = 3000


@contextmanager
def last_words() -> Iterator[IO[bytes]]:
    """A file for what processes write. Its end is shown where the block ends with SystemExit."""
    with tempfile.TemporaryFile() as log:
        try:
            yield log
        except SystemExit:
            log.seek(0)
            sys.stderr.write(log.read()[-_LAST_BYTES:].decode("utf-8", "replace"))
            raise


async def start(command: Sequence[str], **where: Any) -> Process:
    return await asyncio.create_subprocess_exec(*command, **where, env={**os.environ, "RUST_LOG": ""})


async def until_ready(
    name: str, process: Process, ready: Callable[[], Awaitable[bool]], seconds: float = READY_SECONDS
) -> None:
    """Until `ready` says so; LoadError is a no. Raises SystemExit when the process ends or time is up."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.returncode is not None:
            raise SystemExit(f"{name} ended with {process.returncode}")
        with suppress(LoadError):
            if await ready():
                return
        await asyncio.sleep(0.2)
    raise SystemExit(f"{name} was not ready in {seconds:.0f} s")


async def end(process: Process) -> None:
    """Ask first; smg then drains for seconds, which nobody waits for."""
    for way in (process.terminate, process.kill):
        with suppress(ProcessLookupError):
            way()
        with suppress(TimeoutError):
            async with asyncio.timeout(1):
                await process.wait()
