"""The response to one request, and the flow control of the connection it goes out on."""

import asyncio
import socket
import struct
from collections.abc import Iterable
from typing import Protocol

from tandem.http._wire import date_field, encode_fields, status_line
from tandem.http.messages import Headers, end_to_end

_FINAL_CHUNK = b"0\r\n\r\n"
_NO_LINGER = struct.pack("ii", 1, 0)


class Source(Protocol):
    """Where a response's body comes from, if it can be told to wait."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...


class WriteFlow:
    """Whether the client keeps up, and the source that waits when it does not."""

    __slots__ = ("_source", "_writable", "paused")

    def __init__(self) -> None:
        self.paused = False
        self._source: Source | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    def attach(self, source: Source | None) -> None:
        self._source = source
        if self.paused and source is not None:
            source.pause()

    def pause(self) -> None:
        self.paused = True
        self._writable.clear()
        if self._source is not None:
            self._source.pause()

    def resume(self) -> None:
        self.paused = False
        self._writable.set()
        if self._source is not None:
            self._source.resume()

    async def drained(self) -> None:
        await self._writable.wait()


class Responder:
    """Sends one response: either `send`, or `start`, any number of `write`, and `finish`.

    The responder owns the framing. Header fields that speak of it, and hop-by-hop fields, are dropped from
    what is passed in, so an upstream's headers can be passed as they came. Once the client is gone, writing
    does nothing; the handler's task is cancelled then. Use out of order raises `RuntimeError`.
    """

    __slots__ = (
        "_added",
        "_chunked",
        "_flow",
        "_no_body",
        "_request_http10",
        "_request_is_head",
        "_transport",
        "aborted",
        "bytes_sent",
        "closed",
        "finished",
        "keep_alive",
        "started",
        "status",
    )

    def __init__(
        self,
        transport: asyncio.Transport,
        flow: WriteFlow,
        *,
        method: str,
        http_version: str,
        keep_alive: bool,
    ) -> None:
        self._transport = transport
        self._flow = flow
        self._request_is_head = method == "HEAD"
        self._request_http10 = http_version == "1.0"
        self._added: Headers = []
        self._chunked = False
        self._no_body = False
        self.keep_alive = keep_alive
        """Whether the connection outlives the response. May be set to False at any time."""
        self.status: int | None = None
        """The status sent, or None."""
        self.started = False
        """Whether any part of the response was sent."""
        self.finished = False
        """Whether the response was sent whole."""
        self.aborted = False
        self.closed = False
        """Whether the client is gone, or the response aborted: nothing more can be sent."""
        self.bytes_sent = 0
        """Bytes of body handed to the connection, without framing."""

    def add(self, headers: Headers) -> None:
        """Have these fields sent too, whatever the response will be."""
        self._added += headers

    def send(self, status: int, headers: Headers, body: bytes = b"") -> None:
        """Send a whole response. Raises `InvalidHeader`, and then nothing was sent."""
        bodiless = status in (204, 304)
        framing = b"" if bodiless else b"content-length: %d\r\n" % len(body)
        head = self._head(status, headers, framing)
        if self._request_is_head or bodiless:
            body = b""
        if not self.closed:
            self._transport.write(head + body)
            self.bytes_sent = len(body)
        self._finish()

    def start(self, status: int, headers: Headers) -> None:
        """Send the head; the body follows by `write`. Raises `InvalidHeader`, and then nothing was sent."""
        self._no_body = self._request_is_head or status in (204, 304)
        self._chunked = not self._request_http10 and status not in (204, 304)
        if self._request_http10:
            self.keep_alive = False  # the end of the connection is the end of the body
        self._write(self._head(status, headers, b"transfer-encoding: chunked\r\n" if self._chunked else b""))

    def write(self, data: bytes) -> None:
        """Send a piece of the body, as one chunk. Empty pieces are skipped: an empty chunk ends the body."""
        if not self.started or self.finished:
            raise RuntimeError("write() outside of start() and finish()")
        if self.closed or self._no_body or not data:
            return
        self.bytes_sent += len(data)
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def finish(self) -> None:
        """End the body. Only this makes the response look whole to the client."""
        if not self.started or self.finished:
            raise RuntimeError("finish() without start()")
        if self._chunked and not self._no_body:
            self._write(_FINAL_CHUNK)
        self._finish()

    def abort(self) -> None:
        """Close the connection so that the response never looks whole. What was written is still sent, except
        to an HTTP/1.0 client, for whom only a reset connection tells a broken body from a whole one."""
        if self.finished or self.closed:
            return
        self.aborted = True
        self.keep_alive = False
        self._flow.attach(None)
        self.closed = True
        if self.started and not self._chunked:
            sock = self._transport.get_extra_info("socket")
            if sock is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            self._transport.abort()
        else:
            self._transport.close()

    def attach(self, source: Source) -> None:
        """Have `source` paused while more than the high-water mark waits for the client, and resumed when it
        has drained; until the response ends or another source takes its place."""
        if not self.finished and not self.closed:
            self._flow.attach(source)

    async def drained(self) -> None:
        """Wait until the client has taken enough for more to be written."""
        await self._flow.drained()

    def client_left(self) -> None:
        """For the connection: there is no one to write to any more."""
        self.closed = True

    def _head(self, status: int, headers: Iterable[tuple[bytes, bytes]], framing: bytes) -> bytes:
        if self.started:
            raise RuntimeError("the response was started before")
        fields = [pair for pair in end_to_end(headers) if pair[0] != b"content-length"]
        date = b"" if any(name == b"date" for name, _ in fields) else date_field()
        closing = b"" if self.keep_alive else b"connection: close\r\n"
        fields += self._added
        head = b"".join((status_line(status), encode_fields(fields), date, framing, closing, b"\r\n"))
        self.started = True
        self.status = status
        return head

    def _write(self, data: bytes) -> None:
        if not self.closed:
            self._transport.write(data)

    def _finish(self) -> None:
        self.finished = True
        self._flow.attach(None)
