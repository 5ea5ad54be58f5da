"""`tandem logs`: what the processes of an endpoint of this machine have written."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from tandem.cli import ENVIRONMENT, OK, USAGE, complain
from tandem.cli.endpoints import add_which, list_of, none_found
from tandem.local.files import open_to_read

if TYPE_CHECKING:
    from tandem.local.record import Found

_POLL_SECONDS = 0.2
_LONGEST_LINE = 64 << 10  # bytes that are shown of one
_REST = b" [the rest of this line is left out]"
_BLOCK = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_which(parser)
    parser.add_argument(
        "process", nargs="?", metavar="PROCESS", help="one process: prefill-0, router … (default: all)"
    )
    parser.add_argument(
        "-f", "--follow", action="store_true", help="go on with what is written from now on, until it ends"
    )
    parser.add_argument(
        "-n", "--lines", type=lines, default=100, help="how many lines of each (default: %(default)s)"
    )


def lines(text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of lines")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    found = _choose(arguments)
    if isinstance(found, int):
        return found
    logs = _logs(found)
    if arguments.process is not None:
        if arguments.process not in logs:
            complain(f"{found.title} has no process {arguments.process}; it has {', '.join(logs)}.")
            return USAGE
        logs = {"": logs[arguments.process]}
    tails = [Tail(name, log) for name, log in logs.items()]
    told: set[str] = set()

    def each(show: Callable[[Tail], None]) -> None:
        """Show something of each; of those that cannot be read it is told, once."""
        for tail in tails:
            try:
                show(tail)
            except OSError as error:
                if error.filename is None:  # stdout's
                    raise
                why = f"Cannot read {error.filename}: {error.strerror}"
                if why not in told:
                    complain(why)
                told.add(why)

    try:
        each(lambda tail: tail.show_last(arguments.lines, final=not arguments.follow))
        while arguments.follow:
            ended = not found.refresh().running  # looked at first: what it wrote last is shown, too
            each(lambda tail, ended=ended: tail.show_new(final=ended))  # type: ignore[misc]
            if ended:
                break
            time.sleep(_POLL_SECONDS)
    except BrokenPipeError:  # as when `head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return ENVIRONMENT if told else OK


def _choose(arguments: argparse.Namespace) -> Found | int:
    """The one endpoint that is meant: of several, the one that runs. A single word may name a process."""
    from tandem.local.record import find

    found = find(arguments.name, arguments.port)
    if not found and arguments.name is not None and arguments.process is None:
        of_process = [f for f in find(None, arguments.port) if arguments.name in _logs(f)]
        if of_process:
            found, arguments.name, arguments.process = of_process, None, arguments.name
    if not found:
        return none_found(arguments.name, arguments.port, running=False)
    found = [f for f in found if f.running] or found
    if len(found) > 1:
        complain(f"Several endpoints could be meant: {list_of(found)}. Name one.")
        return USAGE
    return found[0]


def _logs(found: Found) -> dict[str, Path]:
    """By process, and `up` of one that was detached."""
    from tandem.local.log import CONSOLE

    names = [CONSOLE] if (found.folder / CONSOLE).exists() else []
    names += [f"{p.name}.log" for p in found.state.processes]
    return {name.removesuffix(".log"): found.folder / name for name in names}


class Tail:
    """The end of a log that grows, and that may be emptied meanwhile, or begun anew. However long its lines
    are, little of it is held in memory."""

    def __init__(self, name: str, log: Path) -> None:
        self._prefix = f"{name} | ".encode() if name else b""
        self._log = log
        self._file = 0
        self._shown = 0
        """Bytes of it that have been dealt with."""
        self._cut = False
        """Whether these end in a line of which the rest is left out."""

    def show_last(self, count: int, *, final: bool) -> None:
        """Show the last lines; one that is not finished only if this is `final`. Raises OSError."""
        with self._open() as stream:
            self._shown = _start_of_last(count, stream)
            self._show(stream, final)

    def show_new(self, *, final: bool) -> None:
        """Show the lines that came since; of a log that begins anew, all. Raises OSError."""
        with self._open() as stream:
            self._show(stream, final)

    def _open(self) -> BinaryIO:
        try:
            stream = open_to_read(self._log)
        except FileNotFoundError:
            self._file, self._shown, self._cut = 0, 0, False
            return BytesIO()
        now = os.fstat(stream.fileno())
        if now.st_ino != self._file or now.st_size < self._shown:
            self._file, self._shown, self._cut = now.st_ino, 0, False
        return stream

    def _show(self, stream: BinaryIO, final: bool) -> None:
        stream.seek(self._shown)
        while piece := stream.readline(_LONGEST_LINE):
            ends = piece.endswith(b"\n")
            if not (ends or final or len(piece) == _LONGEST_LINE):
                break  # it is read again, once it is whole
            self._shown += len(piece)
            if not self._cut:
                rest = b"" if ends or len(piece) < _LONGEST_LINE else _REST
                sys.stdout.buffer.write(self._prefix + piece.removesuffix(b"\n") + rest + b"\n")
            self._cut = not ends
        sys.stdout.buffer.flush()


def _start_of_last(count: int, stream: BinaryIO) -> int:
    """Where the last lines of a file begin."""
    end = stream.seek(0, os.SEEK_END)
    if not count:
        return end
    until = end - 1  # what stands last begins no line
    while until > 0:
        at = max(0, until - _BLOCK)
        stream.seek(at)
        block = stream.read(until - at)
        begun = len(block)
        while (begun := block.rfind(b"\n", 0, begun)) >= 0:
            count -= 1
            if not count:
                return at + begun + 1
        until = at
    return 0
