"""The client: sends a request to an origin over a connection from the pool."""

import asyncio
from dataclasses import dataclass
from types import TracebackType

from tandem.http._names import Names
from tandem.http._pool import Connection, Origin, Pool
from tandem.http._response import Response, Sink
from tandem.http._wire import encode_fields, encode_request_line
from tandem.http.errors import ConnectFailed, UpstreamClosed
from tandem.http.messages import Headers, end_to_end

__all__ = ["Client", "Exchange", "Origin", "Response", "Sink"]

# Besides the hop-by-hop fields, these are the connection's own business. `Expect` needs no answer from the
# origin: the whole body is at hand.
_OURS = frozenset({b"content-length", b"expect", b"host"})
_BODYLESS = frozenset({"GET", "HEAD", "DELETE", "OPTIONS", "TRACE"})


class Client:
    """Requests to any number of origins, over kept connections."""

    def __init__(
        self,
        *,
        keep_alive: float = 4.0,
        idle_per_origin: int = 256,
        head_bytes: int = 64 * 1024,
        names: Names | None = None,
    ) -> None:
        """`keep_alive`: how long an idle connection is kept, in seconds; shorter than the servers keep theirs
        (uvicorn: 5), lest requests meet a closing one. `idle_per_origin`: how many idle ones are kept.
        `head_bytes`: the largest response head. `names` looks up host names."""
        self._pool = Pool(idle_timeout=keep_alive, idle_per_origin=idle_per_origin, names=names)
        self._head_bytes = head_bytes
        self._closed = False

    def stream(
        self,
        origin: Origin,
        method: str,
        target: bytes,
        headers: Headers,
        body: bytes = b"",
        *,
        connect_timeout: float = 5.0,
        head_timeout: float = 60.0,
        idle_timeout: float = 60.0,
        retry: bool = True,
    ) -> "Exchange":
        """Send a request; use as `async with client.stream(…) as response:`.

        Leaving the block before the response is whole closes the connection: to the origin, we have left.
        `Host`, framing and hop-by-hop fields are the client's own; such fields in `headers` are dropped.

        A kept connection may have been closed by the origin just when it is used again. If it ends before the
        first byte of the response, the request is sent once more on a new connection; not with `retry=False`,
        for a request that must not reach an origin twice. Times in seconds: to connect; from there to the
        whole response head; between two reads of the body.

        Raises `InvalidHeader` at once, and any `HTTPClientError` on entering the block.
        """
        if self._closed:
            raise RuntimeError("the client is closed")
        fields = [pair for pair in end_to_end(headers) if pair[0] not in _OURS]
        fields.insert(0, (b"host", origin.authority.encode("ascii")))
        if body or method not in _BODYLESS:
            fields.append((b"content-length", b"%d" % len(body)))
        head = encode_request_line(method, target) + encode_fields(fields) + b"\r\n"
        message = (head, body) if body else (head,)
        return Exchange(
            self._pool,
            origin,
            method,
            message,
            self._head_bytes,
            connect_timeout,
            head_timeout,
            idle_timeout,
            retry,
        )

    async def aclose(self) -> None:
        """Close all connections; exchanges under way end with `UpstreamClosed`."""
        self._closed = True
        await self._pool.aclose()


@dataclass(slots=True, eq=False)
class Exchange:
    """One request and its response, as an asynchronous context manager; see `Client.stream`."""

    _pool: Pool
    _origin: Origin
    _method: str
    _message: tuple[bytes, ...]
    _head_bytes: int
    _connect_timeout: float
    _head_timeout: float
    _idle_timeout: float
    _retry: bool
    _connection: Connection | None = None
    _response: Response | None = None

    async def __aenter__(self) -> Response:
        connection = self._pool.take(self._origin)
        if connection is not None:
            try:
                return await self._send(connection)
            except UpstreamClosed as error:
                if not (error.before_first_byte and self._retry):
                    raise
        return await self._send(await self._connect())

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        connection, response = self._connection, self._response
        assert connection is not None
        assert response is not None
        cancelled = exc is not None and not isinstance(exc, Exception)
        if response.reusable and connection.usable and not connection.unsent and not cancelled:
            self._pool.put(connection)
        else:
            connection.close()

    async def _connect(self) -> Connection:
        try:
            async with asyncio.timeout(self._connect_timeout):
                return await self._pool.connect(self._origin)
        except TimeoutError:
            message = f"no connection within {self._connect_timeout:g} s"
            raise ConnectFailed(self._origin, message) from None
        except OSError as error:
            raise ConnectFailed(self._origin, f"cannot connect: {error}") from error

    async def _send(self, connection: Connection) -> Response:
        if not connection.usable:
            raise UpstreamClosed(self._origin, "connection closed at once", before_first_byte=True)
        response = Response(
            connection,
            self._origin,
            method=self._method,
            head_bytes=self._head_bytes,
            head_timeout=self._head_timeout,
            idle_timeout=self._idle_timeout,
        )
        try:
            connection.send(self._message, response)
            await response.wait_for_head()
        except BaseException:
            connection.close()
            raise
        self._connection, self._response = connection, response
        self._message = ()  # it is not sent again
        return response
