"""Ends what `tandem up` started when `tandem up` cannot do so itself, as after kill -9.

A small process of its own, which reads process groups from a pipe: `+123` was started, `-123` has ended;
and folders, `/tmp/…`, to be removed in the end. The kernel closes the pipe with the death of `tandem up`;
what is still listed then is ended. (A death signal for children would not do: an engine's own children would
outlive it.)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

_PATIENCE_SECONDS = 10.0


class Reaper:
    """The writing end."""

    def __init__(self, pipe: asyncio.StreamWriter) -> None:
        self._pipe = pipe

    def started(self, group: int) -> None:
        self._pipe.write(b"+%d\n" % group)

    def ended(self, group: int) -> None:
        self._pipe.write(b"-%d\n" % group)

    def made(self, folder: Path) -> None:
        """A folder (an absolute path without a line break) that goes when all processes have ended."""
        self._pipe.write(os.fsencode(folder) + b"\n")


@contextlib.asynccontextmanager
async def reaper(*held: int) -> AsyncIterator[Reaper]:
    """A reaper for the length of the block; whatever is still listed at its end is ended or removed then.

    It holds the file descriptors `held`, too, until all that is done."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-P", "-m", "tandem.local.reaper"),  # -P: files in the working directory are no modules
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        start_new_session=True,  # a terminal's Ctrl-C is not for it
        pass_fds=held,
    )
    assert process.stdin is not None
    try:
        yield Reaper(process.stdin)
    finally:
        process.stdin.close()
        await process.wait()


def end_groups(groups: Iterable[int], patience: float = _PATIENCE_SECONDS) -> None:
    """Send SIGTERM to process groups, and SIGKILL to those that are still there after `patience` seconds."""
    left = {g for g in groups if _signal(g, signal.SIGTERM)}
    deadline = time.monotonic() + patience
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = {g for g in left if _signal(g, 0)}
    for group in left:
        _signal(group, signal.SIGKILL)


def _signal(group: int, number: int) -> bool:
    """Whether the group was there to be signalled."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def main(lines: Iterable[str]) -> None:
    groups: set[int] = set()
    folders: list[str] = []
    for line in lines:
        match line[0]:
            case "+":
                groups.add(int(line[1:]))
            case "-":
                groups.discard(int(line[1:]))
            case _:
                folders.append(line.removesuffix("\n"))
    end_groups(groups)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(map(os.fsdecode, sys.stdin.buffer))
