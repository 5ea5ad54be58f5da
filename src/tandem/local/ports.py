"""TCP ports of a local endpoint."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO

from tandem.engine import EnginePorts
from tandem.local.errors import LocalError
from tandem.local.folders import require_private
from tandem.local.listeners import listener

_FIRST_ENGINE_PORT = 8100
_FIRST_SIDE_CHANNEL_PORT = 5600
_FIRST_LMCACHE_PORT = 7300
_FIRST_NOTIFY_PORT = 7500
_TRIED = 1000
_OF_THE_PORT = (errno.EADDRINUSE, errno.EACCES, errno.EPERM)
"""Errors that another port may not have."""

# An engine binds its ports seconds after they were chosen; until this process ends, no other takes them.
_claimed: list[IO[bytes]] = []


def engine_ports(count: int, host: str, *, but: Collection[int] = (), ranks: int = 0) -> list[EnginePorts]:
    """Ports for `count` engines: the first free ones from 8100 (HTTP), from 5600 (NIXL side channel), and
    from 7300 where so many ranks of each take KV through LMCache; without those in `but`, which somebody else
    is about to take.

    They are claimed for as long as this process lives: another `tandem up` of this user takes others.
    """
    http, side = _free(_FIRST_ENGINE_PORT, host, but), _free(_FIRST_SIDE_CHANNEL_PORT, host, but)
    lmcache = _free(_FIRST_LMCACHE_PORT, host, but)

    def several() -> tuple[int, ...]:
        return tuple(next(lmcache) for _ in range(ranks))

    return [
        EnginePorts(http=next(http), side_channel=next(side), init=several(), alloc=several())
        for _ in range(count)
    ]


def notify_port(host: str, *, but: Collection[int] = ()) -> int:
    """A port on which a router is told of LMCache's hand-offs: the first free one from 7500, claimed, too."""
    return next(_free(_FIRST_NOTIFY_PORT, host, but))


def free_port(first: int, host: str) -> int:
    """The first port from `first` that can be listened on. Raises LocalError."""
    return next(_free(first, host, ()))


def require_free(port: int, host: str) -> None:
    """Raise LocalError when a port that was asked for cannot be listened on."""
    try:
        _bind(port, host)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise LocalError(f"Port {port} of {host} is taken{_by_whom(port, host)}") from None
        raise LocalError(f"Cannot listen on {host}:{port}: {error.strerror}") from None


def _by_whom(port: int, host: str) -> str:
    found = listener(port)
    if found is None:
        return " by another program. Choose another with --port."
    if found.is_router:
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        return (
            f" by another endpoint ({found.endpoint()}). Stop that one, choose another port with "
            f"--port, or prove that one with `tandem demo --url {url}`."
        )
    return f" ({found}). Stop it, or choose another port with --port."


def _free(first: int, host: str, but: Collection[int]) -> Iterator[int]:
    for port in range(first, first + _TRIED):
        if port in but:
            continue
        try:
            _bind(port, host)
        except OSError as error:
            if error.errno in _OF_THE_PORT:
                continue
            raise LocalError(f"Cannot listen on {host}: {error.strerror}") from None
        if _claim(port):
            yield port
    raise LocalError(f"There are not enough free ports from {first} to {first + _TRIED - 1}.")


def _claim(port: int) -> bool:
    """Whether no other process has claimed a port; it is claimed then."""
    try:
        folder = Path(tempfile.gettempdir()) / f"tandem-ports-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        require_private(folder, "notes of taken ports")
        file = (folder / str(port)).open("wb")
    except OSError as error:
        told = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        raise LocalError(
            f"Cannot note which ports are taken: {told}. Make room or mend its rights, or set TMPDIR."
        ) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return False
    _claimed.append(file)
    return True


def _bind(port: int, host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
