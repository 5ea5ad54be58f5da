"""One client's connection: reads requests, runs the handler for one after another, and minds the clock."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Protocol, cast

from tandem.http._body_room import SMALL_BODY, BodyRoom, Share, room_of
from tandem.http._request_parser import NO_ROOM, Phase, Refusal, RequestParser
from tandem.http._responder import Responder, WriteFlow
from tandem.http._watchdog import Watchdog
from tandem.http.messages import Headers, Limits, Request, error_body

log = logging.getLogger("tandem.http")

Handler = Callable[[Request, Responder], Awaitable[None]]
"""Answers one request through its responder. Runs in a task of its own, which is cancelled when the client
leaves before the response is whole."""

# At its last answer a client may still be sending. Closing at once would reset the connection, and it might
# never see the answer; so we stop writing, and swallow what comes for this long (seconds).
_LINGER = 2.0

_LOGGED = 200
"""Bytes of a request's path that are logged."""

_JSON: Headers = [(b"content-type", b"application/json")]
_LATER: Headers = [*_JSON, (b"retry-after", b"1")]


class ConnectionOwner(Protocol):
    """What a connection needs of its server."""

    handler: Handler
    limits: Limits
    bodies: BodyRoom
    refused: Callable[[HTTPStatus], None]

    def opened(self, connection: "ServerConnection") -> bool:
        """Whether there is room for one more."""

    def lost(self, connection: "ServerConnection") -> None:
        """The connection is closed and its last handler has ended."""


class ServerConnection(asyncio.Protocol):
    """The connection is in one of three states: waiting for (the rest of) a request, running a handler, or
    closing. One watchdog serves them all."""

    def __init__(self, owner: ConnectionOwner) -> None:
        self._owner = owner
        self._limits = owner.limits
        self._share = Share(owner.bodies, self._make_way)
        self._serving = 0  # room that the body of the running request takes
        self._flow = WriteFlow()
        self._loop = asyncio.get_running_loop()
        self._watchdog = Watchdog(self._loop, self._expired)
        self._waiting_in: Phase | None = Phase.HEAD  # the phase whose deadline is set
        self._body_begun = 0.0
        self._responder: Responder | None = None
        self._refusal: Refusal | None = None
        self._draining = False
        self._closing = False
        self._lost = False
        self._reading = True
        self._unsent = 0
        self.task: asyncio.Task[None] | None = None
        """The running handler."""

    # What the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self._limits.write_high_water)
        peer = transport.get_extra_info("peername")
        self._parser = RequestParser(self._limits, peer[0] if isinstance(peer, tuple) else "", self._share)
        if self._owner.opened(self):
            self._watchdog.set(self._limits.head_timeout)
        else:
            self._refuse(Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections"))

    def data_received(self, data: bytes) -> None:
        if self._closing or self._refusal is not None:
            return
        try:
            self._parser.feed(data)
        except Refusal as refusal:
            self._refusal = refusal
        self._advance()
        if self._parser.body_size > SMALL_BODY and self._reading:
            # Others first: uvloop would read 8 MiB at a time, which takes long where chunks are tiny.
            self._read(False)
            self._loop.call_soon(self._read_on)

    def eof_received(self) -> None:
        # A half-closed connection cannot be told from one that was left, and the latter is the common one.
        self._client_left()
        self._watch_closing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = self._lost = True
        self._watchdog.close()
        self._parser.close()
        self._client_left()
        self._drop_unserved()
        self._share.close()
        self._flow.attach(None)
        self._flow.resume()
        if self.task is None:
            self._owner.lost(self)

    def pause_writing(self) -> None:
        self._flow.pause()
        self._watch_sending()

    def resume_writing(self) -> None:
        self._flow.resume()
        if not self._closing:
            self._watchdog.clear()
            self._waiting_in = None
            self._advance()

    # What the server calls

    def drain(self) -> None:
        """Close as soon as no request is under way."""
        self._draining = True
        if self._responder is not None:
            self._responder.keep_alive = False
        elif not self._closing:
            self._advance()

    def abort(self) -> None:
        """Close now, and cancel the handler whatever it is at."""
        if self._responder is not None:
            self._responder.client_left()
        if self.task is not None:
            self.task.cancel()
        self._closing = True
        self._transport.abort()

    # Requests

    def _advance(self) -> None:
        """Do what comes next."""
        if self.task is not None or self._flow.paused:
            if self._parser.ready:
                self._read(False)  # enough read ahead
            return
        if self._closing:
            return
        if self._parser.ready:
            self._start(self._parser.ready.popleft())
        elif self._refusal is not None:
            self._refuse(self._refusal)
        elif self._draining and self._parser.phase is Phase.IDLE:
            self._close()
        else:
            self._read(True)
            self._await_request()

    def _start(self, request: Request) -> None:
        self._serving = room_of(request.body)
        if self._serving:
            request.on_body_dropped = self._body_dropped
        self._watchdog.clear()
        self._waiting_in = None
        responder = self._responder = Responder(
            self._transport,
            self._flow,
            method=request.method,
            http_version=request.http_version,
            keep_alive=request.keep_alive and not self._draining,
        )
        self.task = self._loop.create_task(self._run(request, responder))
        self.task.add_done_callback(partial(self._handled, responder))
        self._read(not self._parser.ready)

    async def _run(self, request: Request, responder: Responder) -> None:
        try:
            await self._owner.handler(request, responder)
            if not responder.finished and not responder.closed:
                raise RuntimeError("the handler returned without finishing the response")
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and responder.closed:
                raise  # by us
            # As sent: decoded it could end the line. What is behind it may be nobody's business.
            path = request.target.partition(b"?")[0][:_LOGGED]
            log.exception("%s %s failed", request.method, path.decode("ascii", "backslashreplace"))
            if not responder.started:
                status = HTTPStatus.INTERNAL_SERVER_ERROR
                responder.send(status, _JSON, error_body("internal error", status))

    def _handled(self, responder: Responder, task: asyncio.Task[None]) -> None:
        """The handler's task has ended, or was cancelled before it began."""
        responder.abort()  # does nothing to a finished response
        self.task = self._responder = None
        self._body_dropped()
        if self._lost:
            self._owner.lost(self)
        elif responder.aborted:
            self._watch_closing()
        elif responder.keep_alive and not self._draining:
            self._advance()
        elif self._reading:
            self._close()
        else:  # what the client has sent ahead is not read
            self._linger()

    def _client_left(self) -> None:
        responder = self._responder
        if responder is None or responder.closed:
            return
        responder.client_left()
        if self.task is not None and not responder.finished:
            self.task.cancel()

    def _await_request(self) -> None:
        if self._parser.awaits_continue:
            self._parser.awaits_continue = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        phase = self._parser.phase
        begun, self._waiting_in = phase is not self._waiting_in, phase
        if phase is Phase.BODY:
            if begun:
                self._body_begun = self._loop.time()
            self._watchdog.set(self._patience())
        elif begun:  # later bytes do not earn the head more time
            head = phase is Phase.HEAD
            self._watchdog.set(self._limits.head_timeout if head else self._limits.keep_alive_timeout)

    def _patience(self) -> float:
        """How long the next bytes of a body may take: those that came earn time for those that follow."""
        pause, rate = self._limits.body_timeout, self._limits.body_rate
        if not rate:
            return pause
        earned = pause + self._parser.body_size / rate - (self._loop.time() - self._body_begun)
        return max(0.0, min(pause, earned))

    # Closing, reading, time

    def _refuse(self, refusal: Refusal) -> None:
        self._owner.refused(refusal.status)
        responder = Responder(self._transport, self._flow, method="", http_version="1.1", keep_alive=False)
        headers = _LATER if refusal.status == HTTPStatus.SERVICE_UNAVAILABLE else _JSON
        responder.send(refusal.status, headers, error_body(refusal.message, refusal.status))
        self._linger()

    def _close(self) -> None:
        self._transport.close()
        self._watch_closing()

    def _linger(self) -> None:
        with suppress(OSError):  # the client has reset the connection, as we shall hear when we read
            self._transport.write_eof()
        self._read(True)
        self._watch_closing(None if self._transport.get_write_buffer_size() else _LINGER)

    def _make_way(self) -> None:
        """Give up the request that is coming: others wait for the room that it takes."""
        self._refusal = Refusal(HTTPStatus.SERVICE_UNAVAILABLE, NO_ROOM)
        self._parser.drop_body()
        self._advance()

    def _body_dropped(self) -> None:
        if self._serving:
            self._share.give(self._serving)
            self._serving = 0

    def _drop_unserved(self) -> None:
        self._parser.drop_body()
        self._parser.ready.clear()
        self._share.give(self._share.held - self._serving)

    def _watch_closing(self, seconds: float | None = None) -> None:
        if not self._closing:
            self._closing = True
            self._drop_unserved()
            self._watch_sending(seconds)

    def _watch_sending(self, seconds: float | None = None) -> None:
        self._unsent = self._transport.get_write_buffer_size()
        self._watchdog.set(self._limits.write_timeout if seconds is None else seconds)

    def _read(self, wanted: bool) -> None:
        if wanted != self._reading and not self._transport.is_closing():
            self._reading = wanted
            if wanted:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def _read_on(self) -> None:
        """Go on with a large body, now that others have had their turn."""
        if not self._parser.ready:
            self._read(True)

    def _expired(self) -> None:
        if self._closing or self._flow.paused:
            if 0 < self._transport.get_write_buffer_size() < self._unsent:
                self._watch_sending()  # slow, but alive
            else:
                self._transport.abort()
        elif self._parser.phase is Phase.IDLE:
            self._close()
        else:
            self._refuse(Refusal(HTTPStatus.REQUEST_TIMEOUT, "the request did not arrive in time"))
