"""Messages between hand-off kinds of engines in different processes: requests and replies over TCP.

A message is four bytes of length and msgpack. It stands in for NIXL's handshake, reads and notifications.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

_LARGEST = 256 * 1024 * 1024


class PeerLost(Exception):
    """Nobody listens there, or the connection ended."""


Answer = Callable[[dict[str, Any]], dict[str, Any]]


class Listener:
    """Answers each message with `answer`."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises OSError."""
        try:
            self._server = await asyncio.start_server(self._serve, host, port)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{host}:{port} cannot be the NIXL side channel, where decode engines ask for KV: {error}. "
                "Set VLLM_NIXL_SIDE_CHANNEL_PORT to a free port",
            ) from None
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in list(self._open):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            while True:
                writer.write(_packed(self._answer(await _read(reader))))
                await writer.drain()
        except (PeerLost, OSError, msgspec.DecodeError):
            pass
        finally:
            self._open.discard(writer)
            writer.close()


async def ask(host: str, port: int, message: dict[str, Any], *, timeout: float = 5.0) -> dict[str, Any]:
    """One message and its reply over a connection of its own. Raises PeerLost."""
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(_packed(message))
                return await _read(reader)
            finally:
                writer.close()
    except (OSError, OverflowError, TimeoutError, msgspec.DecodeError) as error:
        raise PeerLost(f"{host}:{port}: {error}") from None


def _packed(message: dict[str, Any]) -> bytes:
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(4, "big") + data


async def _read(reader: asyncio.StreamReader) -> dict[str, Any]:
    try:
        size = int.from_bytes(await reader.readexactly(4), "big")
        if size > _LARGEST:
            raise PeerLost(f"a message of {size} bytes")
        return msgspec.msgpack.decode(await reader.readexactly(size), type=dict[str, Any])
    except asyncio.IncompleteReadError:
        raise PeerLost("the connection ended") from None
