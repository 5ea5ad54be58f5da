"""TCP ports of a local endpoint."""

from __future__ import annotations

import errno
import socket
from collections.abc import Collection, Iterator

from tandem.engine import EnginePorts
from tandem.local.errors import LocalError

_FIRST_ENGINE_PORT = 8100
_FIRST_SIDE_CHANNEL_PORT = 5600
_TRIED = 1000


def engine_ports(count: int, host: str, *, but: Collection[int] = ()) -> list[EnginePorts]:
    """Ports for `count` engines: the first free ones from 8100 (HTTP) and from 5600 (NIXL side channel),
    without those in `but`, which somebody else is about to take."""
    http, side = _free(_FIRST_ENGINE_PORT, host, but), _free(_FIRST_SIDE_CHANNEL_PORT, host, but)
    return [EnginePorts(http=next(http), side_channel=next(side)) for _ in range(count)]


def require_free(port: int, host: str) -> None:
    """Raise LocalError when a port that was asked for cannot be listened on."""
    try:
        _bind(port, host)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise LocalError(
                f"Port {port} of {host} is taken. Is another endpoint up? Choose another with --port."
            ) from None
        raise LocalError(f"Cannot listen on {host}:{port}: {error.strerror}") from None


def _free(first: int, host: str, but: Collection[int]) -> Iterator[int]:
    for port in range(first, first + _TRIED):
        if port in but:
            continue
        try:
            _bind(port, host)
        except OSError:
            continue
        yield port
    raise LocalError(f"There are not enough free ports from {first} to {first + _TRIED - 1}.")


def _bind(port: int, host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
