"""What Linux tells in /proc of the processes of this machine."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
# Positions in /proc/PID/stat behind the command's name, see proc_pid_stat(5).
_STATE, _PARENT, _GROUP, _TIMES, _STARTED, _PAGES = 0, 1, 2, slice(11, 15), 19, 21


@dataclass(frozen=True)
class Use:
    """What the processes of a group use. `cpu_seconds`: since they began, with children that have ended."""

    memory_bytes: int = 0
    cpu_seconds: float = 0.0


def use_of(groups: Collection[int]) -> dict[int, Use]:
    """By process group; one that is not there, or cannot be looked at now, uses nothing. Memory is the
    resident set (RSS)."""
    used = dict.fromkeys(groups, Use())
    for _, fields in _all():
        if (group := int(fields[_GROUP])) in used:
            before = used[group]
            used[group] = Use(
                before.memory_bytes + int(fields[_PAGES]) * _PAGE,
                before.cpu_seconds + sum(map(int, fields[_TIMES])) / _TICKS,
            )
    return used


def started(pid: int) -> int | None:
    """When a process began, in clock ticks since the machine did: with its pid, that tells it from any other
    process there has been. None of one that is not there, or has ended."""
    fields = _stat(pid)
    return int(fields[_STARTED]) if fields and fields[_STATE] != "Z" else None


def parent(pid: int) -> int | None:
    """The process that has started another, or has adopted it; None of one that is not there."""
    fields = _stat(pid)
    return int(fields[_PARENT]) if fields else None


def members(group: int) -> list[int]:
    """The processes of a process group that have not ended."""
    return [pid for pid, fields in _all() if int(fields[_GROUP]) == group and fields[_STATE] != "Z"]


def command(pid: int) -> tuple[str, ...] | None:
    """A process's command line; None of one that is not there, or is another user's."""
    try:
        text = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace")
    except OSError:
        return None
    return tuple(text.split("\0")[:-1])


def _all() -> Iterator[tuple[int, list[str]]]:
    """(pid, fields) of every process; none where they cannot be looked at now."""
    try:
        entries = os.listdir("/proc")
    except OSError:  # too many open files
        return
    for entry in entries:
        if entry.isdigit() and (fields := _stat(int(entry))):
            yield int(entry), fields


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return []
