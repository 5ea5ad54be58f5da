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
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path

from tandem.local import groups

_PATIENCE_SECONDS, _KILLED_SECONDS = 10.0, 3.0
_PAUSE_SECONDS = 0.5


class Reaper:
    """The writing end. A process that dies is replaced by another, which is told all again."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._groups: set[int] = set()
        self._folders: list[Path] = []
        self.use(process)

    def use(self, process: asyncio.subprocess.Process) -> None:
        """Tell this process from now on, and all that was told before."""
        assert process.stdin is not None
        self.process = process
        self._pipe = process.stdin
        for group in self._groups:
            self._pipe.write(b"+%d\n" % group)
        for folder in self._folders:
            self._pipe.write(os.fsencode(folder) + b"\n")

    def started(self, group: int) -> None:
        self._groups.add(group)
        self._pipe.write(b"+%d\n" % group)

    def ended(self, group: int) -> None:
        self._groups.discard(group)
        self._pipe.write(b"-%d\n" % group)

    def made(self, folder: Path) -> None:
        """A folder (an absolute path without a line break) that goes when all processes have ended."""
        self._folders.append(folder)
        self._pipe.write(os.fsencode(folder) + b"\n")

    async def keep_up(self, held: Sequence[int]) -> None:
        """Replace the process whenever it dies, for ever."""
        while True:
            await self.process.wait()
            await asyncio.sleep(_PAUSE_SECONDS)
            with contextlib.suppress(OSError):
                self.use(await _start(held))

    async def end(self) -> None:
        """Let the process do its work, and end. One that cannot, as it was stopped, is killed."""
        self._pipe.close()
        try:
            async with asyncio.timeout(2 * _PATIENCE_SECONDS):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()


@contextlib.asynccontextmanager
async def reaper(*held: int) -> AsyncIterator[Reaper]:
    """A reaper for the length of the block; whatever is still listed at its end is ended or removed then.

    It holds the file descriptors `held`, too, until all that is done."""
    guard = Reaper(await _start(held))
    keeper = asyncio.create_task(guard.keep_up(held))
    try:
        yield guard
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        await guard.end()


async def _start(held: Sequence[int]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-P", "-m", "tandem.local.reaper"),  # -P: files in the working directory are no modules
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        start_new_session=True,  # a terminal's Ctrl-C is not for it
        pass_fds=held,
    )


def end_groups(listed: Iterable[int], patience: float = _PATIENCE_SECONDS) -> None:
    """Send SIGTERM to process groups, and SIGKILL to those that are still there after `patience` seconds; see
    that nothing is left."""
    left = _still_there([group for group in listed if groups.ask_to_end(group)], patience)
    for group in left:
        groups.kill(group)
    for group in _still_there(left, _KILLED_SECONDS):
        groups.send(group, signal.SIGKILL)


def _still_there(listed: list[int], seconds: float) -> list[int]:
    """Those that have not ended, after so many seconds at the latest."""
    deadline = time.monotonic() + seconds
    while (left := [group for group in listed if groups.send(group, 0)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def main(lines: Iterable[str]) -> None:
    started: set[int] = set()
    folders: list[str] = []
    for line in lines:
        match line[0]:
            case "+":
                started.add(int(line[1:]))
            case "-":
                started.discard(int(line[1:]))
            case _:
                folders.append(line.removesuffix("\n"))
    end_groups(started)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(map(os.fsdecode, sys.stdin.buffer))
