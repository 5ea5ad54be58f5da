"""A streamed answer on its way from decoder to client: bytes as they come, timed and looked over."""

from __future__ import annotations

from collections.abc import Callable

from tandem.http import Headers, Responder, Response, StreamScan


class StreamRelay:
    """The sink of a decode leg's body. Called for every read from the engine: this is the hot path.

    The client's answer starts with the first bytes, not with the engine's head: until then a failed leg
    can still be tried again. A first event that is an error does not start it either.
    """

    __slots__ = (
        "_clock",
        "_headers",
        "_last",
        "_observe_gap",
        "_on_first",
        "_responder",
        "_response",
        "scan",
    )

    def __init__(
        self,
        responder: Responder,
        response: Response,
        headers: Headers,
        *,
        on_first: Callable[[float], None],
        observe_gap: Callable[[float], None],
        clock: Callable[[], float],
    ) -> None:
        self._responder = responder
        self._response = response
        self._headers = headers
        self._on_first = on_first
        self._observe_gap = observe_gap
        self._clock = clock
        self._last: float | None = None
        self.scan = StreamScan()

    def __call__(self, data: bytes) -> None:
        now = self._clock()
        self.scan.feed(data)
        if self._last is not None:
            self._observe_gap(now - self._last)
        elif self.scan.error is not None:
            return
        else:
            self._responder.attach(self._response)
            self._responder.start(self._response.status, self._headers)
            self._on_first(now)
        self._last = now
        self._responder.write(data)
