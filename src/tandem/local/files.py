"""Files in whose place anything may lie by now: a FIFO, which would hold up whoever opens it, or a device,
which has no end."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def at_once(path: str, flags: int) -> int:
    """Open what may be anything, as a FIFO that nobody writes into, without waiting for it."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


def open_to_read(file: Path) -> BinaryIO:
    """Raises OSError, also where it is no file."""
    stream = open(file, "rb", opener=at_once)  # noqa: SIM115  # the caller's to close
    kind = stat.S_IFMT(os.fstat(stream.fileno()).st_mode)
    if kind != stat.S_IFREG:
        stream.close()
        raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'something else')} and no file", str(file))
    return stream


def open_to_append(file: Path, *, anew: bool) -> BinaryIO:
    """Open a file, `anew` an empty one, whose writes reach it at once. A FIFO that lies there is removed.
    Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISFIFO(file.stat().st_mode):
            file.unlink()
    if anew:
        open(file, "wb", opener=at_once).close()
    return open(file, "ab", buffering=0, opener=at_once)
