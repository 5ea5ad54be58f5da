"""`tandem logs`: what the processes of an endpoint of this machine have written."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from tandem.cli import ENVIRONMENT, OK, USAGE, complain
from tandem.cli.endpoints import add_which, list_of, none_found

if TYPE_CHECKING:
    from tandem.local.record import Found

_POLL_SECONDS = 0.2


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
    try:
        for tail in tails:
            tail.show_last(arguments.lines, final=not arguments.follow)
        while arguments.follow:
            ended = not found.refresh().running  # looked at first: what it wrote last is shown, too
            for tail in tails:
                tail.show_new(final=ended)
            if ended:
                break
            time.sleep(_POLL_SECONDS)
    except BrokenPipeError:  # as when `head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        if error.filename is None:  # stdout's
            raise
        complain(f"Cannot read {error.filename}: {error.strerror}")
        return ENVIRONMENT
    return OK


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
    """The end of a log that grows, and that may be emptied meanwhile, or begun anew."""

    def __init__(self, name: str, log: Path) -> None:
        self._prefix = f"{name} | ".encode() if name else b""
        self._log = log
        self._shown = 0
        self._file = 0

    def show_last(self, count: int, *, final: bool) -> None:
        """Show the last lines; one that is not finished only if this is `final`. Raises OSError."""
        if self._log.exists():
            with self._log.open("rb") as stream:
                self._show(deque(stream, maxlen=count), stream, final)

    def show_new(self, *, final: bool) -> None:
        """Show the lines that came since; of a log that begins anew, all. Raises OSError."""
        if not self._log.exists():
            self._shown = 0
        else:
            with self._log.open("rb") as stream:
                now = os.fstat(stream.fileno())
                if now.st_ino == self._file and now.st_size >= self._shown:
                    stream.seek(self._shown)
                self._show(list(stream), stream, final)

    def _show(self, new: Sequence[bytes], stream: IO[bytes], final: bool) -> None:
        self._file, self._shown = os.fstat(stream.fileno()).st_ino, stream.tell()
        for line in new:
            if line.endswith(b"\n") or final:
                sys.stdout.buffer.write(self._prefix + line.removesuffix(b"\n") + b"\n")
            else:
                self._shown -= len(line)  # the last one; it is read again, once it is whole
        sys.stdout.buffer.flush()
