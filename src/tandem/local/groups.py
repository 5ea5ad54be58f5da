"""Process groups: how all that a program has started is ended with it."""

from __future__ import annotations

import contextlib
import os
import signal

from tandem.local import proc

_TRACKER = "multiprocessing.resource_tracker"


def send(group: int, number: int) -> bool:
    """Signal a group; 0 only looks. Whether it was there to be signalled."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def ask_to_end(group: int) -> bool:
    """SIGTERM, also to one that is stopped (SIGSTOP). Whether it was there."""
    return send(group, signal.SIGTERM) and send(group, signal.SIGCONT)


def kill(group: int) -> None:
    """SIGKILL to all but Python's resource trackers. These free what the others have left in /dev/shm, once
    nobody else is there, and end by themselves."""
    if not send(group, 0):
        return
    for pid in proc.members(group):
        if not any(_TRACKER in word for word in proc.command(pid) or ()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
