"""The listening side: accepts connections, counts them, and lets them go in good order."""

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus

from tandem.http._body_room import BodyRoom
from tandem.http._responder import Responder
from tandem.http._server_connection import Handler, ServerConnection
from tandem.http._tls_connection import TlsConnection
from tandem.http.messages import Limits
from tandem.http.tls import Tls

__all__ = ["Handler", "Responder", "Server", "serve"]

log = logging.getLogger("tandem.http")

_BACKLOG = 2048

_TOLD = 64
"""Connections beyond the limit that are told so at a time; further ones are closed without a word."""

_CLOSING = 10.0
"""Seconds after which `Server.close` gives up handlers that do not end when they are cancelled."""


class Server:
    """A running server; see `serve`."""

    def __init__(
        self,
        handler: Handler,
        limits: Limits,
        tls: Tls | None,
        on_refused: Callable[[HTTPStatus], None],
    ) -> None:
        self.handler = handler
        self.limits = limits
        self.bodies = BodyRoom(limits.held_bytes, limits.body_timeout)
        self.refused = on_refused
        self._tls = tls
        self._connections: set[ServerConnection] = set()
        self._turned_away: set[ServerConnection] = set()
        """Those of them that are only told that there are too many."""
        self._empty = asyncio.Event()
        self._empty.set()
        self._stopping = False
        self._listener: asyncio.Server
        self._port: int

    @property
    def port(self) -> int:
        """The port listened on; that of the first address if the host has several."""
        return self._port

    @property
    def connections(self) -> int:
        """Open connections, idle ones included, and closed ones whose handler has not ended."""
        return len(self._connections)

    async def drain(self, deadline_s: float) -> bool:
        """Stop accepting, close idle connections, and give running requests `deadline_s` seconds to finish.
        Returns whether all did. `close` is still to be called."""
        self._stopping = True
        self._listener.close()
        for connection in list(self._connections):
            connection.drain()
        try:
            async with asyncio.timeout(deadline_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Stop now: connections are cut and handlers cancelled; returns when they have ended, or after ten
        seconds all the same."""
        self._stopping = True
        self._listener.close()
        for connection in list(self._connections):
            connection.abort()
        try:
            async with asyncio.timeout(_CLOSING):
                await self._empty.wait()
        except TimeoutError:
            log.error("%d handlers have not ended though they were cancelled", len(self._connections))

    async def _listen(self, host: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._connection, host, port, backlog=_BACKLOG)
        self._port = self._listener.sockets[0].getsockname()[1]

    def _connection(self) -> asyncio.Protocol:
        connection = ServerConnection(self)
        return connection if self._tls is None else TlsConnection(self._tls.context, connection)

    # What a connection calls

    def opened(self, connection: ServerConnection) -> bool:
        self._connections.add(connection)
        self._empty.clear()
        over = len(self._connections) - len(self._turned_away) > self.limits.connections
        # The event loop may have accepted it before the listener was closed.
        if self._stopping:
            connection.abort()
            return True
        if over and len(self._turned_away) >= _TOLD:
            self.refused(HTTPStatus.SERVICE_UNAVAILABLE)
            connection.abort()
            return True
        if over:
            self._turned_away.add(connection)
        return not over

    def lost(self, connection: ServerConnection) -> None:
        self._connections.discard(connection)
        self._turned_away.discard(connection)
        if not self._connections:
            self._empty.set()


async def serve(
    handler: Handler,
    host: str,
    port: int,
    *,
    limits: Limits | None = None,
    tls: Tls | None = None,
    on_refused: Callable[[HTTPStatus], None] = lambda status: None,
) -> Server:
    """Listen on `host` and `port` (0: any free one) and answer requests with `handler`; over TLS where `tls`
    is given. `on_refused` is told of what the handler does not see: requests, and connections, that are
    refused as they come.

    Raises `OSError` if the address cannot be had.
    """
    server = Server(handler, limits or Limits(), tls, on_refused)
    await server._listen(host, port)
    return server
