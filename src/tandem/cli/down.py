"""`tandem down`: stops endpoints of this machine."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING

from tandem.cli import FAILURE, OK, USAGE, complain
from tandem.cli.endpoints import add_which, list_of, none_found

if TYPE_CHECKING:
    from tandem.local.record import Found

_PATIENCE_SECONDS = 30.0
_POLL_SECONDS = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_which(parser)
    parser.add_argument(
        "--all", action="store_true", help="stop every one that is meant, if there are several"
    )


def run(arguments: argparse.Namespace) -> int:
    from tandem.local.record import find

    running = [found for found in find(arguments.name, arguments.port) if found.running]
    if not running:
        return none_found(arguments.name, arguments.port, running=True)
    if len(running) > 1 and not arguments.all:
        complain(f"Several endpoints run: {list_of(running)}. Name one, or stop them with --all.")
        return USAGE
    return stop(running)


def stop(running: list[Found], patience: float = _PATIENCE_SECONDS) -> int:
    """Stop endpoints, all at once; returns the exit code. `patience`: seconds until they are killed."""
    for found in running:
        _signal(found, signal.SIGTERM)
        _signal(found, signal.SIGCONT)  # one that was stopped, as by Ctrl-Z, would not hear it
    left = _still_there(running, patience)
    for found in left:
        complain(f"{found.title} did not end in {patience:g} s and is killed")
        _signal(found, signal.SIGKILL)
    left = _still_there(left, patience)  # the reaper ends what it had started
    for found in running:
        processes = ", ".join(p.name for p in found.state.processes)
        if found in left:
            complain(f"{found.title} is still there: {processes}. Its logs: {found.folder}")
        else:
            print(f"stopped {found.title}: {processes}")
    return FAILURE if left else OK


def _still_there(running: list[Found], seconds: float) -> list[Found]:
    """Those of the endpoints that have not ended, after so many seconds at the latest."""
    deadline = time.monotonic() + seconds
    while (left := [f for f in running if _is_there(f)]) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return left


def _is_there(found: Found) -> bool:
    if found.has_up:  # it gives up its lock a moment before it ends
        return True
    now = found.refresh()
    return now.running and now.state.pid_started == found.state.pid_started  # else it is the next one


def _signal(found: Found, number: signal.Signals) -> None:
    """Signal the `tandem up` of an endpoint, and never another process that has its pid by now."""
    if found.has_up:
        with contextlib.suppress(ProcessLookupError):
            os.kill(found.state.pid, number)
