"""The router's log on its way to stderr: what one turn of the event loop says is written at once.

A disaggregated request logs five lines. Each written for itself costs a system call; and the time, rendered
anew for each, as much again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TextIO

FORMAT = "%(asctime)s [%(levelname)s] %(message)s"


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
    """As the standard one writes the time; rendered once a second."""

    _second = -1
    _text = ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        second = int(record.created)
        if second != self._second:
            self._second, self._text = second, time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))
        return f"{self._text},{int(record.msecs):03d}"
