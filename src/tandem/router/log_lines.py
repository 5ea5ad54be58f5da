"""The router's log on its way to stderr: what one turn of the event loop says is written at once.

A disaggregated request logs five lines. Each written for itself costs a system call; and the time, rendered
anew for each, as much again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any, TextIO

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

    def format(self, record: logging.LogRecord) -> str:
        if record.exc_info or record.exc_text or record.stack_info:
            return super().format(record)
        return f"{_TIMES.formatTime(record)} [{record.levelname}] {record.getMessage()}"

    def flush(self) -> None:
        with self.lock:  # type: ignore[union-attr]  # a handler has one
            held, self._held = self._held, []
            if held:
                self.stream.write("".join(held))
            super().flush()


class LineRecord(logging.LogRecord):
    """What a line shows. Where in the code it was said, and in which thread, is not found out: that would
    take longer than the line. To be set as the record factory."""

    def __init__(
        self,
        name: str,
        level: int,
        pathname: str,
        lineno: int,
        msg: object,
        args: Any,
        exc_info: Any,
        func: str | None = None,
        sinfo: str | None = None,
        **kwargs: object,
    ) -> None:
        self.name, self.levelno, self.levelname = name, level, logging.getLevelName(level)
        self.msg = str(msg)
        # One mapping alone is for a message with names in it.
        self.args = args[0] if args and len(args) == 1 and args[0] and isinstance(args[0], Mapping) else args
        self.exc_info, self.exc_text, self.stack_info = exc_info, None, sinfo
        self.created = time.time()
        self.msecs = float(int(self.created % 1 * 1000))


class _Formatter(logging.Formatter):
    """As the standard one writes the time; rendered once a second."""

    _second = -1
    _text = ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        second = int(record.created)
        if second != self._second:
            self._second, self._text = second, time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))
        return f"{self._text},{int(record.msecs):03d}"


_TIMES = _Formatter()
