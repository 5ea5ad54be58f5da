"""The router's log on its way to stderr: what one turn of the event loop says is written at once.

A disaggregated request logs five lines. Each written for itself costs a system call; and the time, rendered
anew for each, as much again.

Clients, and engines, have words in it: model names, fields, reasons. Whatever they are, one message is one
line of bounded length, and what belongs to it (a traceback) is indented, so that nobody can write lines that
look like the router's, nor take over a terminal that shows them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, TextIO

FORMAT = "%(asctime)s [%(levelname)s] %(message)s"

_MOST = 4096
"""Characters of one line."""
_MOST_LINES = 200
"""Lines of one traceback."""


class LogLines(logging.StreamHandler[TextIO]):
    """Lines are held until the loop's next turn; without a loop, and from a warning on, they go out at
    once, with those that are held."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.setFormatter(_Formatter(FORMAT))
        self._held: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._held.append(self.format(record) + self.terminator)
            if record.levelno >= logging.WARNING:
                self.flush()
            elif len(self._held) == 1:
                asyncio.get_running_loop().call_soon(self.flush)
        except RuntimeError:  # no loop runs here
            self.flush()
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        with self.lock:  # type: ignore[union-attr]  # a handler has one
            held, self._held = self._held, []
            if held:
                self.stream.write("".join(held))
            super().flush()


class _Formatter(logging.Formatter):
    """As the standard one writes the time; rendered once a second. Messages and tracebacks as told above."""

    _second = -1
    _text = ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        second = int(record.created)
        if second != self._second:
            self._second, self._text = second, time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))
        return f"{self._text},{int(record.msecs):03d}"

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = _line(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        lines = super().formatException(ei).splitlines()
        if len(lines) > _MOST_LINES:
            lines[_MOST_LINES // 2 : -_MOST_LINES // 2] = [f"({len(lines) - _MOST_LINES} lines)"]
        return "\n".join("  " + _line(line) for line in lines)


def _line(text: str) -> str:
    """Text with everything escaped that is no printable character, and cut where it is long."""
    if len(text) > _MOST:
        text = f"{text[:_MOST]}… ({len(text)} characters)"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
