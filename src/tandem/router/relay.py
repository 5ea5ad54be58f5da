"""A streamed answer on its way from decoder to client: bytes as they come, timed and looked over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from tandem.http import Headers, Responder, Response, StreamScan
from tandem.router.answer import Answer
from tandem.router.reported import Usage


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Any = None
    """The engine's word: an answer is not worse for nonsense here."""
    error: msgspec.Raw = msgspec.Raw(b"null")


_answer = msgspec.json.Decoder(_Answer)


def judge(body: bytes) -> tuple[str | None, Usage]:
    """Why a whole answer with status 200 is none (broken off, an error, or an aborted choice), or None; and
    what it says of its tokens."""
    try:
        answer = _answer.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "a body that is not a whole answer", Usage()
    if bytes(answer.error) != b"null":
        return "an error", Usage()
    if not answer.choices:
        return "no choice", Usage()
    ended = {choice.finish_reason for choice in answer.choices} & {"abort", "error"}
    return (f"finish_reason {ended.pop()}" if ended else None), Usage.of(answer.usage)


_HELD_BYTES = 64 * 1024


class StreamRelay:
    """The sink of a decode leg's body. Called for every read from the engine: this is the hot path.

    Nothing is sent before the engine has shown that it generates: its first `silent_events` events come
    before any work was done (a chat's role, which vLLM sends even when the KV then cannot be loaded). They
    are held, at most 64 KiB, and go out with the next event, unless that is an error: then the answer has not
    started, and the leg can still be tried again.
    """

    __slots__ = (
        "_answer",
        "_clock",
        "_headers",
        "_held",
        "_last",
        "_observe_gap",
        "_on_first",
        "_responder",
        "_response",
        "_silent_events",
        "scan",
    )

    def __init__(
        self,
        answer: Answer,
        response: Response,
        headers: Headers,
        *,
        silent_events: int,
        on_first: Callable[[float], None],
        observe_gap: Callable[[float], None],
        clock: Callable[[], float],
    ) -> None:
        self._answer = answer
        self._responder: Responder | None = None
        self._response = response
        self._headers = headers
        self._silent_events = silent_events
        self._on_first = on_first
        self._observe_gap = observe_gap
        self._clock = clock
        self._held = b""
        self._last = 0.0
        self.scan = StreamScan()

    def __call__(self, data: bytes) -> None:
        now = self._clock()
        self.scan.feed(data)
        if self._responder is not None:
            self._observe_gap(now - self._last)
            self._last = now
            self._responder.write(data)
            return
        if self.scan.error is not None or self.scan.finish_reason is not None:
            return
        self._held += data
        if self.scan.events > self._silent_events or len(self._held) > _HELD_BYTES:
            self._start(now)

    def end(self) -> None:
        """The body is whole: what is still held goes out, unless it is an error."""
        self.scan.end()
        if self._responder is None and self.scan.done and not (self.scan.error or self.scan.finish_reason):
            self._start(self._clock())

    def _start(self, now: float) -> None:
        self._last = now
        self._responder = self._answer.start(self._response.status, self._headers, self._response)
        self._responder.write(self._held)
        self._held = b""
        self._on_first(now)
