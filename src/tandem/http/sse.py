"""What a router must see in a streamed answer that it relays without decoding it."""

import json
import re
from typing import Any

# Inside a JSON string every quote is escaped, so a quoted word can only be a key or a whole value.
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_ERROR_FIRST = re.compile(rb'\s*\{\s*"error"\s*:\s*[{"]')
_FAILED = frozenset({"abort", "error"})
# The last byte is left out: a quote ends many words, and a search for a needle that ends with it is slower.
_MARKERS = (b'"usage', b'"error', b'"abort', b"[DONE")
# Looking costs the same for one event as for many: so they wait until there are about so many bytes of them.
_HELD_BYTES = 8 * 1024


class StreamScan:
    """Follows the bytes of an OpenAI-style event stream, however they are split, and notes what they tell.

    Lines end with LF or CRLF. Events are not decoded unless one carries a word that matters, so the common
    event costs a few substring searches. They are looked at some at a time, and at once when something is
    asked of them. A line is looked at up to `line_bytes`; memory is bounded by that.
    """

    __slots__ = (
        "_done",
        "_error",
        "_events",
        "_finish_reason",
        "_held",
        "_held_bytes",
        "_line_bytes",
        "_partial",
        "_usage",
    )

    def __init__(self, *, line_bytes: int = 64 * 1024) -> None:
        self._events = 0
        self._done = False
        self._usage: dict[str, Any] | None = None
        self._error: dict[str, Any] | None = None
        self._finish_reason: str | None = None
        self._line_bytes = line_bytes
        self._held: list[bytes] = []  # not looked at yet
        self._held_bytes = 0
        self._partial = bytearray()  # the line that has not ended yet

    @property
    def events(self) -> int:
        """Events (`data:` lines) seen, without the closing `[DONE]`."""
        self._look()
        return self._events

    @property
    def done(self) -> bool:
        """Whether `data: [DONE]` was seen."""
        self._look()
        return self._done

    @property
    def usage(self) -> dict[str, Any] | None:
        """The last `usage` object."""
        self._look()
        return self._usage

    @property
    def error(self) -> dict[str, Any] | None:
        """The first error sent as an event: its `error` object, or `{"message": …}` if that was no object."""
        self._look()
        return self._error

    @property
    def finish_reason(self) -> str | None:
        """ "error" or "abort", if a choice ended so: the engine failed although the stream looks whole."""
        self._look()
        return self._finish_reason

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        self._held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes >= _HELD_BYTES:
            self._look()

    def end(self) -> None:
        """The stream is over: what stands behind the last line end is a line, too."""
        self._look()
        self._end_line()

    def _look(self) -> None:
        held = self._held
        if not held:
            return
        data = held[0] if len(held) == 1 else b"".join(held)
        held.clear()
        self._held_bytes = 0
        if self._partial or len(data) > self._line_bytes or not data.endswith(b"\n"):
            self._feed_lines(data)
        else:
            self._scan(data)

    def _end_line(self) -> None:
        if self._partial:
            line = bytes(self._partial)
            self._partial.clear()
            self._scan(line)

    def _feed_lines(self, data: bytes) -> None:
        start = 0
        end = data.find(b"\n") + 1
        while end:
            if self._partial or end - start > self._line_bytes:
                self._keep(data[start:end])
                self._end_line()
            else:
                self._scan(data[start:end])
            start = end
            end = data.find(b"\n", start) + 1
        self._keep(data[start:])

    def _keep(self, data: bytes) -> None:
        self._partial += data[: self._line_bytes - len(self._partial)]

    def _scan(self, lines: bytes) -> None:
        """Look at whole lines."""
        self._events += lines.startswith(b"data:") + lines.count(b"\ndata:")
        for start in _marked_lines(lines):
            if lines.startswith(b"data:", start):
                self._look_at(_line_at(lines, start + 5).strip())

    def _look_at(self, payload: bytes) -> None:
        if payload == b"[DONE]":
            self._events -= 1
            self._done = True
        elif b'"error"' in payload or b'"abort"' in payload or _USAGE.search(payload):
            self._decode(payload)

    def _decode(self, payload: bytes) -> None:
        try:
            event = json.loads(payload)
        except (ValueError, RecursionError):
            # Too long to have been kept whole, or broken. An error must be seen nevertheless.
            if _ERROR_FIRST.match(payload) and self._error is None:
                self._error = {"message": payload[:1000].decode("utf-8", "replace")}
            return
        if not isinstance(event, dict):
            return
        if isinstance(event.get("usage"), dict):
            self._usage = event["usage"]
        error = event if event.get("object") == "error" else event.get("error")
        if error and self._error is None:
            self._error = error if isinstance(error, dict) else {"message": str(error)}
        choices = event.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict) and choice.get("finish_reason") in _FAILED:
                self._finish_reason = choice["finish_reason"]


def _line_at(lines: bytes, start: int) -> bytes:
    end = lines.find(b"\n", start)
    return lines[start:end] if end >= 0 else lines[start:]


def _marked_lines(lines: bytes) -> list[int]:
    """Where the lines that hold a marker begin, in order: a read may bring many events and one marker."""
    starts = set()
    for marker in _MARKERS:
        at = lines.find(marker)
        while at >= 0:
            starts.add(lines.rfind(b"\n", 0, at) + 1)
            line_end = lines.find(b"\n", at)
            at = lines.find(marker, line_end) if line_end >= 0 else -1
    return sorted(starts)
