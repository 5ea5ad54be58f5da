"""The processes and sockets of one endpoint, as /proc tells of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Iterator
from pathlib import Path

_ESTABLISHED, _CLOSE_WAIT = "01", "08"


def children(pid: int) -> list[int]:
    """A process and all below it that live."""
    parents = {}
    for each, stat in _stats():
        if stat[0] != "Z":
            parents[each] = int(stat[1])
    found = [pid] if pid in parents else []
    for parent in found:
        found += [child for child, its in parents.items() if its == parent]
    return found


def alive(pids: Collection[int]) -> list[int]:
    return [pid for pid, stat in _stats() if pid in pids and stat[0] != "Z"]


def working(pids: Collection[int]) -> list[int]:
    """Without Python's resource trackers: an engine does not miss its own, and would not be restarted."""
    return [pid for pid in pids if "multiprocessing.resource_tracker" not in _command(pid)]


def send(pids: Collection[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def connections(ports: Collection[int]) -> int:
    """TCP connections of this machine from and to some ports; each counts at the side that has the port."""
    found = 0
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            at = int(local.rpartition(":")[2], 16)
            found += at in ports and state in (_ESTABLISHED, _CLOSE_WAIT)
    return found


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text("utf-8", "replace")
    except OSError:
        return ""


def _stats() -> Iterator[tuple[int, list[str]]]:
    """(pid, fields of /proc/PID/stat from the state on)."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path(f"/proc/{entry}/stat").read_text("utf-8", "replace")
            except OSError:
                continue
            yield int(entry), stat.rpartition(")")[2].split()
