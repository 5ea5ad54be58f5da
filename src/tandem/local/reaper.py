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

_PATIENCE_SECONDS = 10.0
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
