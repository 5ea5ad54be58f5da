"""One response as it comes in from an origin."""

import asyncio
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import httptools

from tandem.http._watchdog import Watchdog
from tandem.http._wire import framing_allowance
from tandem.http.errors import (
    BodyTooLarge,
    HeadTimeout,
    HTTPClientError,
    IdleTimeout,
    ProtocolError,
    UpstreamClosed,
)
from tandem.http.messages import Headers, find_header

Sink = Callable[[bytes], None]
"""Takes body bytes. Called from within the event loop's read, so it must not block."""

# What is kept of a body before anyone takes it; then the origin has to wait.
_UNREAD_BYTES = 64 * 1024


class Carrier(Protocol):
    """What a response needs of its connection."""

    watchdog: Watchdog

    def set_reading(self, wanted: bool) -> None: ...
    def close(self) -> None: ...


class Response:
    """A response whose head has come. Its body is taken once, by `read` or by `relay`.

    The task that holds it is woken for the head and for the end. In between, body bytes go to the sink from
    within the read that brought them, without a task switch.
    """

    def __init__(
        self,
        carrier: Carrier,
        origin: object,
        *,
        method: str,
        head_bytes: int,
        head_timeout: float,
        idle_timeout: float,
    ) -> None:
        self.status = 0
        self.headers: Headers = []
        self.complete = False
        """Whether the whole response has come."""
        self._carrier = carrier
        self._origin = origin
        self._request_is_head = method == "HEAD"
        self._head_bytes = head_bytes
        self._head_timeout = head_timeout
        self.idle_timeout = idle_timeout
        """The longest pause between two reads of the body, in seconds; changes hold from the next read on."""
        self._llhttp: Any = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._violation: ProtocolError | None = None
        self._sink: Sink | None = None
        self._unread: list[bytes] = []
        self._paused = False  # by the holder
        self._full = False  # nobody takes the body
        self._head_done = False
        self._interim = False  # within a 1xx response
        self._ends_by_close = False
        self._keep_alive = False
        self._wire_size = 0
        self._head_size = 0
        self._body_size = 0
        carrier.watchdog.set(head_timeout)

    def header(self, name: bytes) -> bytes | None:
        """The value of the field `name` (lower-case), or None; several are joined with ", "."""
        return find_header(self.headers, name)

    async def read(self, limit: int) -> bytes:
        """The whole body. Raises `BodyTooLarge` beyond `limit` bytes, and what `relay` raises."""
        body = bytearray()

        def collect(data: bytes) -> None:
            body.extend(data)
            if len(body) > limit:
                raise BodyTooLarge(self._origin, f"response body is larger than {limit} bytes")

        await self.relay(collect)
        return bytes(body)

    async def relay(self, sink: Sink) -> None:
        """Hand the body to `sink` as it comes, what came in one read as one piece; return when it is whole.

        What `sink` raises is raised here. Raises `IdleTimeout`, `UpstreamClosed` or `ProtocolError` after all
        that did come has been handed over. The connection is closed in each of these cases.
        """
        self._sink = sink
        self._full = False
        self._deliver()
        self._set_reading()
        try:
            if not self.complete and self._error is None:
                await self._wait()
        finally:
            self._sink = None
        if self._error is not None:
            raise self._error

    def pause(self) -> None:
        """Have the origin wait: nothing more is read until `resume`. Meanwhile the idle time-out rests."""
        self._paused = True
        self._set_reading()

    def resume(self) -> None:
        """Go on reading."""
        self._paused = False
        self._set_reading()

    # What the connection calls

    @property
    def reusable(self) -> bool:
        """Whether the connection may carry another request: the message is whole, nothing came behind it, and
        the origin means to keep the connection."""
        return self.complete and self._keep_alive and self._error is None

    async def wait_for_head(self) -> None:
        """Return when the head has come. Raises what kept it from coming."""
        if not self._head_done and self._error is None:
            await self._wait()
        if self._error is not None and not self._head_done:
            raise self._error

    def feed(self, data: bytes) -> None:
        """Take what came in one read."""
        if self._llhttp is None:
            self._keep_alive = False  # the message was whole, and something comes behind it
            return
        self._wire_size += len(data)
        try:
            self._llhttp.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._violation = ProtocolError(self._origin, "the origin switched protocols unasked")
        except httptools.HttpParserError as error:
            if self.complete:
                self._keep_alive = False  # the message was whole, but something came behind it
            else:
                self._violation = self._violation or ProtocolError(
                    self._origin, f"malformed response: {error}"
                )
        if self._wire_size - self._body_size > self._head_bytes:
            self._check_framing()
        if self._unread:
            self._deliver()
        if self._violation is not None:
            self._fail(self._violation)
        elif self.complete:
            self._end()
        elif self._head_done and self._error is None:
            self._carrier.watchdog.set(self.idle_timeout)

    def connection_closed(self, error: Exception | None) -> None:
        """Nothing more will come. `error` is None if the origin closed in good order."""
        if self.complete:
            return
        if self._head_done and self._ends_by_close and error is None:
            self.complete = True
            self._end()
            return
        where = "within the body" if self._head_done else "before the head of the response had come"
        reason = f" ({error})" if error is not None else ""
        message = f"connection closed {where}{reason}"
        self._fail(UpstreamClosed(self._origin, message, before_first_byte=self._wire_size == 0))

    def expired(self) -> None:
        """The deadline has passed."""
        error: HTTPClientError
        if not self._head_done:
            error = HeadTimeout(self._origin, f"no response within {self._head_timeout:g} s")
        elif self._paused or self._full:
            return  # not the origin's fault; reading again sets a new deadline
        else:
            error = IdleTimeout(self._origin, f"the response body paused for {self.idle_timeout:g} s")
        self._fail(error)

    # What llhttp calls

    def on_message_begin(self) -> None:
        if self.complete:
            self._violate("bytes behind the response")
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_size += len(name) + len(value) + 4
        if self._head_size > self._head_bytes:
            self._violate(f"more than {self._head_bytes} bytes of header fields")
        if not self._head_done:  # else a trailer, which nothing here has a use for
            self.headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        self.status = self._llhttp.get_status_code()
        if (version := self._llhttp.get_http_version()) not in ("1.1", "1.0"):
            self._violate(f"HTTP/{version} is not spoken here")
        if self.status < 200:
            if self.status < 100 or self.status == 101:
                self._violate(f"unexpected status {self.status}")
            self._interim = True
            return
        coding = self.header(b"transfer-encoding")
        if coding is not None and coding.lower() != b"chunked":
            self._violate(f"unsupported transfer coding {coding!r}")
        has_length = coding is not None or self.header(b"content-length") is not None
        self._ends_by_close = not has_length and self.status not in (204, 304)
        self._keep_alive = bool(self._llhttp.should_keep_alive())
        self._head_done = True
        self._wake()
        if self._request_is_head:
            # llhttp does not know that no body follows; so it cannot be used for another message.
            self.complete = True
            self._keep_alive = False

    def on_body(self, data: bytes) -> None:
        if not self.complete:
            self._body_size += len(data)
            self._unread.append(data)

    def on_message_complete(self) -> None:
        if self._interim:
            self._interim = False
        else:
            self.complete = True

    # Inside

    def _violate(self, message: str) -> NoReturn:
        violation = ProtocolError(self._origin, message)
        if not self.complete:
            self._violation = violation
        raise violation

    def _check_framing(self) -> None:
        overhead = self._wire_size - self._body_size
        if overhead > framing_allowance(self._head_bytes, self._body_size) and not self.complete:
            message = f"more than {self._head_bytes} bytes of head or framing"
            self._violation = ProtocolError(self._origin, message)

    def _deliver(self) -> None:
        unread = self._unread
        if self._sink is None:
            if self._error is None and not self._full and self._body_size > _UNREAD_BYTES:
                self._full = True
                self._set_reading()
            return
        if not unread:
            return
        data = unread[0] if len(unread) == 1 else b"".join(unread)
        unread.clear()
        try:
            self._sink(data)
        except Exception as error:
            self._fail(error)

    def _set_reading(self) -> None:
        if self.complete or self._error is not None:
            return  # the connection is no longer ours, or closed
        reading = not (self._paused or self._full)
        self._carrier.set_reading(reading)
        if reading and self._head_done:
            self._carrier.watchdog.set(self.idle_timeout)

    def _end(self) -> None:
        self._let_go_of_parser()
        self._carrier.watchdog.clear()
        self._wake()

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
            self._let_go_of_parser()
            self._carrier.watchdog.clear()
            self._carrier.close()
            self._wake()

    def _let_go_of_parser(self) -> None:
        """It holds the response, too: in a cycle both would wait for the garbage collection."""
        self._llhttp = None

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
