"""Connections to origins, and those of them that wait for another request."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

from tandem.http._names import Names
from tandem.http._response import Response
from tandem.http._watchdog import Watchdog


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a server listens. Prints as a URL."""

    host: str
    port: int

    @classmethod
    def parse(cls, url: str) -> "Origin":
        """From `http://host[:port]`. Raises `ValueError` for anything else, https included."""
        parts = urlsplit(url)
        if parts.scheme != "http":
            raise ValueError(f"only http:// is supported: {url!r}")
        if not parts.hostname or parts.username is not None or parts.query or parts.fragment:
            raise ValueError(f"not of the form http://host:port: {url!r}")
        if parts.path not in ("", "/"):
            raise ValueError(f"an origin has no path: {url!r}")
        try:
            port = parts.port
        except ValueError:
            raise ValueError(f"not a port number, in {url!r}") from None
        return cls(parts.hostname, 80 if port is None else port)

    @property
    def authority(self) -> str:
        """`host:port`, an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"http://{self.authority}"


class Connection(asyncio.Protocol):
    """One connection to an origin: idle in the pool, or carrying one exchange."""

    def __init__(self, origin: Origin, pool: "Pool") -> None:
        self.origin = origin
        self.closed = asyncio.get_running_loop().create_future()
        self.watchdog = Watchdog(asyncio.get_running_loop(), self._expired)
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._response: Response | None = None
        self._reading = True

    @property
    def usable(self) -> bool:
        """Whether a request can be written to it."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def unsent(self) -> int:
        """Bytes of the request that the origin has not taken yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def send(self, pieces: Iterable[bytes], response: Response) -> None:
        """Write a request whose response goes to `response`."""
        assert self._transport is not None
        self._response = response
        self._transport.writelines(pieces)

    def release(self) -> None:
        """The exchange is over and the connection idle."""
        self._response = None
        self.set_reading(True)

    def set_reading(self, wanted: bool) -> None:
        if wanted != self._reading and self.usable:
            self._reading = wanted
            assert self._transport is not None
            if wanted:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def close(self) -> None:
        """Close at once; what is unsent is not sent."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._response is not None:
            self._response.feed(data)
        else:
            self.close()  # bytes nobody asked for: whatever they answer, it is not our next request

    def eof_received(self) -> None:
        if self._response is not None:
            self._response.connection_closed(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.watchdog.close()
        self._pool.lost(self)
        if self._response is not None:
            self._response.connection_closed(exc)
            self._response = None
        if not self.closed.done():
            self.closed.set_result(None)

    def _expired(self) -> None:
        if self._response is not None:
            self._response.expired()
        else:
            self.close()


class Pool:
    """Idle connections by origin. The one used last is taken first, so that the others grow old and go."""

    def __init__(self, *, idle_timeout: float, idle_per_origin: int, names: Names | None = None) -> None:
        self._names = names or Names()
        self._idle_timeout = idle_timeout
        self._idle_per_origin = idle_per_origin
        self._idle: dict[Origin, list[Connection]] = {}
        self._open: set[Connection] = set()
        self._closed = False

    async def connect(self, origin: Origin) -> Connection:
        """A new connection, which may have been closed since. The addresses of a name are tried one after
        another. Raises `OSError`."""
        failures: list[OSError] = []
        for address in await self._names.addresses(origin.host):
            try:
                return await self._connect_to(address, origin)
            except OSError as error:
                failures.append(error)
        if len(failures) == 1:
            raise failures[0]
        raise OSError("; ".join(map(str, failures)))

    async def _connect_to(self, address: str, origin: Origin) -> Connection:
        connection = Connection(origin, self)
        loop = asyncio.get_running_loop()
        try:
            await loop.create_connection(lambda: connection, address, origin.port)
        except BaseException:
            connection.close()  # uvloop may have called connection_made, and then never calls connection_lost
            raise
        if self._closed:
            connection.close()
            raise OSError("the client was closed")
        if not connection.closed.done():
            self._open.add(connection)
        return connection

    def take(self, origin: Origin) -> Connection | None:
        """An idle connection, if there is one."""
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()
            if not idle:
                del self._idle[origin]
            if connection.usable:
                return connection
        return None

    def put(self, connection: Connection) -> None:
        """Keep a connection for the next request, or close it if enough are kept."""
        if len(self._idle.get(connection.origin, ())) >= self._idle_per_origin:
            connection.close()
            return
        connection.release()
        connection.watchdog.set(self._idle_timeout)
        self._idle.setdefault(connection.origin, []).append(connection)

    def lost(self, connection: Connection) -> None:
        """Forget a connection that was closed."""
        self._open.discard(connection)
        idle = self._idle.get(connection.origin)
        if idle is not None and connection in idle:
            idle.remove(connection)
            if not idle:
                del self._idle[connection.origin]

    async def aclose(self) -> None:
        """Close all connections, those in use too; those being made are closed as soon as they are."""
        self._closed = True
        connections = list(self._open)
        for connection in connections:
            connection.close()
        for connection in connections:
            await connection.closed
