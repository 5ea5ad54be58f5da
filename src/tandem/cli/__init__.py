"""The command `tandem`: one small module for each subcommand, imported when it runs."""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import io
import os
import select
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import TextIO

# Name → what it does. The module is tandem.cli.<name>, with add_arguments(parser) and run(arguments) -> int.
COMMANDS = {
    "demo": "prove on this machine, or on a running endpoint, that disaggregation works",
    "up": "run an endpoint on this machine",
    "chat": "talk to an endpoint, and see the path and the times of each answer",
    "status": "show this machine's endpoints and their processes",
    "logs": "show what the processes of an endpoint have written",
    "down": "stop an endpoint of this machine",
    "router": "run the router alone",
    "keys": "make API keys for the router, and check the file that lists them",
    "operator": "run endpoints on Kubernetes",
    "sim": "run simulated vLLM engines",
    "validate": "find every mistake in manifests of the resource",
    "render": "print every Kubernetes object of an endpoint, for kubectl apply",
    "crd": "print the CustomResourceDefinition of the resource, for kubectl apply",
    "calibrate": "measure a vLLM engine, for simulated ones that take as long",
}

OK, FAILURE, USAGE, ENVIRONMENT, INTERRUPTED = 0, 1, 2, 3, 130
"""Exit codes: done; it ran and failed; the command or the resource is wrong; this machine lacks something;
stopped by a signal before there was a result."""

_OF_OUTPUT = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Errors of writing a result, where they name no file; EIO: to a terminal that is gone."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns its exit code."""
    if os.getpid() == 1:
        # A container's first process gets no signal that it has no handler for: a router whose pod is deleted
        # while it starts would stay for its whole grace period. Once it works it has its own.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(INTERRUPTED))
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        # So does whoever started us, and passes it on; how our own processes end could not be known.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _open_what_is_closed()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for what a locale has no character for
    try:
        arguments = parse(sys.argv[1:] if argv is None else argv)
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        let_go(sys.stdout)
        return INTERRUPTED
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            complain(f"{error.strerror}: raise the limit, as by `ulimit -n 4096`")
            return ENVIRONMENT
        if error.filename is not None or error.errno not in _OF_OUTPUT:
            raise
        return _unwritten(error)
    except Exception as error:
        from tandem.local.errors import LocalError

        if not isinstance(error, LocalError):
            raise
        complain(error)
        return ENVIRONMENT
    return code


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The arguments of a command line; exits with USAGE, and the reason on stderr, when it is wrong."""
    parser = argparse.ArgumentParser(
        prog="tandem", description="Disaggregated prefill and decode for LLM inference."
    )
    parser.add_argument("--version", action="version", version=f"tandem {version('tandem-dpd')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    named = next((w for w in words if not w.startswith("-")), None)
    for name, what in COMMANDS.items():
        # An abbreviation in a manifest would become ambiguous, or another flag, with a later version.
        command = commands.add_parser(
            name, help=what, description=what[0].upper() + what[1:] + ".", allow_abbrev=False
        )
        if name == named:
            module = importlib.import_module(f"tandem.cli.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run, words=tuple(words))
    if not words:
        parser.print_help(sys.stderr)
        raise SystemExit(USAGE)
    arguments, unknown = parser.parse_known_args(words)
    if unknown:  # argparse would show the usage of `tandem`, and not of the command that lacks them
        commands.choices[arguments.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    return arguments


def emit(text: str) -> int:
    """Write a command's result to stdout: all of it, and in UTF-8 whatever the locale, as clusters read it.

    Returns OK; FAILURE where whoever reads it has gone, as `head` does; ENVIRONMENT where it cannot be
    written, which is told."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        return _unwritten(error)
    return OK


def _unwritten(error: OSError) -> int:
    """The exit code of a result that cannot be written, as `emit` has it."""
    _silence(sys.stdout)
    if isinstance(error, BrokenPipeError):
        return FAILURE
    complain(f"cannot write the result: {error.strerror}")
    return ENVIRONMENT


def complain(message: object) -> None:
    """Say on stderr why a command ends."""
    remark(f"tandem: {message}")


def remark(line: str) -> None:
    """Say something on stderr. Where that cannot be written nothing is said; the result counts."""
    try:
        print(line, file=sys.stderr)
    except OSError:
        _silence(sys.stderr)


def let_go(stream: TextIO) -> None:
    """Write no more to a stream whose reader has stopped reading, where writing would wait for ever."""
    with contextlib.suppress(OSError, ValueError):  # it need not be a file of the system's
        if not select.select([], [stream], [], 0)[1]:
            _silence(stream)


def _silence(stream: TextIO) -> None:
    """What a stream still holds is written when Python ends, which would fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _open_what_is_closed() -> None:
    """Standard streams that were closed (`2>&-`): Python has None in their place, and prints to stdout what
    is meant for such a stderr."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # for as long as Python runs
