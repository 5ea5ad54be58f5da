"""Who listens on a TCP port of this machine, as far as /proc tells this user."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tandem.api.problem import one_line
from tandem.local import proc

_LISTENING = "0A"
_PROC = Path("/proc")
_LONGEST = 200  # characters of a command line that are told


@dataclass(frozen=True)
class Listener:
    pid: int
    command: tuple[str, ...]

    @property
    def is_router(self) -> bool:
        return self._tandem[1:2] == ("router",)

    def endpoint(self) -> Listener:
        """The `tandem up` or `tandem demo` that a router belongs to, else the process itself."""
        parent = proc.parent(self.pid)
        starter = None if parent is None else _process(parent)
        return starter if starter is not None and starter._tandem[1:2] in (("up",), ("demo",)) else self

    @property
    def _tandem(self) -> tuple[str, ...]:
        """Its command line from `tandem` on, of `.venv/bin/tandem …` and `python -m tandem …`; else empty."""
        found = (i for i, word in enumerate(self.command) if word.rpartition("/")[2] == "tandem")
        start = next(found, None)
        return () if start is None else ("tandem", *self.command[start + 1 :])

    def __str__(self) -> str:
        written = one_line(shlex.join(self._tandem or self.command))
        return f"process {self.pid}: {written if len(written) <= _LONGEST else f'{written[:_LONGEST]}…'}"


def listener(port: int) -> Listener | None:
    """The process that listens on a port; None where nobody does, or it is another user's."""
    sockets = {f"socket:[{inode}]" for inode in _inodes(port)}
    if not sockets:
        return None
    for folder in _PROC.glob("[0-9]*"):
        try:
            if any(os.readlink(file) in sockets for file in (folder / "fd").iterdir()):
                return _process(int(folder.name))
        except OSError:
            continue  # another user's, or it has just ended
    return None


def listens(pid: int, port: int) -> bool:
    """Whether it is this process that listens on a port, or one of those that do."""
    sockets = {f"socket:[{inode}]" for inode in _inodes(port)}
    try:
        return any(os.readlink(file) in sockets for file in (_PROC / str(pid) / "fd").iterdir())
    except OSError:  # it has just ended, or closed a file
        return False


def _inodes(port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        try:
            lines = (_PROC / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == _LISTENING and int(local.rpartition(":")[2], 16) == port:
                yield inode


def _process(pid: int) -> Listener | None:
    words = proc.command(pid)
    return None if words is None else Listener(pid, words)
