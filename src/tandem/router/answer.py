"""What one client is told: an answer, perhaps a stream that heartbeats open before there is any of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from tandem.http import Headers, Responder, Source
from tandem.router.errors import ApiError, bad_gateway

_BEAT = b": heartbeat\n\n"
_EVENT_STREAM = (b"content-type", b"text/event-stream; charset=utf-8")


class Answer:
    """A request's responder, as the parts of the router see it that answer.

    Once a heartbeat has gone out, so has the status 200: from then on an error is an event of the stream, and
    what an engine says in headers is not relayed.
    """

    def __init__(self, responder: Responder) -> None:
        self._responder = responder
        self._beat: asyncio.TimerHandle | None = None
        self.status: int | None = None
        """What it says, which may be an error in a stream that was opened with 200; None before any of it was
        sent, of which heartbeats are none."""

    @property
    def started(self) -> bool:
        """Whether any of it was sent."""
        return self.status is not None

    @contextmanager
    def beating(self, seconds: float | None, headers: Headers) -> Iterator[None]:
        """Send a comment line for every so many seconds of the block in which there is no answer. `headers`:
        of the stream, beside its type."""
        if seconds is None:
            yield
            return
        loop = asyncio.get_running_loop()

        def beat() -> None:
            if not self._responder.started:
                self._responder.start(200, [_EVENT_STREAM, *headers])
            self._responder.write(_BEAT)
            self._beat = loop.call_later(seconds, beat)

        self._beat = loop.call_later(seconds, beat)
        try:
            yield
        finally:
            self._stop_beating()

    def send(self, status: int, headers: Headers, body: bytes) -> None:
        """Answer whole. Raises ApiError for an answer that is no error where a stream has been opened."""
        self._stop_beating()
        if not self._responder.started:
            self._responder.send(status, headers, body)
        elif status < 400:
            raise bad_gateway("The engine does not stream its answer.")
        else:
            self.break_off(_event(status, body))
        self.status = status

    def start(self, status: int, headers: Headers, source: Source) -> Responder:
        """Answer with a stream; its pieces are written to what is returned, as `source` has them."""
        self._stop_beating()
        self._responder.attach(source)
        if not self._responder.started:
            self._responder.start(status, headers)
        self.status = status
        return self._responder

    def finish(self) -> None:
        """The stream is whole."""
        self._responder.finish()

    def break_off(self, event: bytes = b"") -> None:
        """End a stream so that it does not look whole, with this as its last words."""
        if event:
            self._responder.write(event)
        self._responder.abort()

    def _stop_beating(self) -> None:
        if self._beat is not None:
            self._beat.cancel()
            self._beat = None


def _event(status: int, body: bytes) -> bytes:
    """An error answer as an event; one that does not say so in JSON in the router's words."""
    try:
        told: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        told = None
    if not isinstance(told, dict) or "error" not in told:
        return ApiError(status, f"The engine answered HTTP {status}.", kind="engine_error").event()
    return b"data: " + msgspec.json.encode(told) + b"\n\n"
