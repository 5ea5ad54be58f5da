"""Processes of this machine, as /proc tells of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_SHARED_MEMORY = "/dev/shm/"


def with_argument(argument: str) -> list[int]:
    """The processes started with an argument (several, joined by NUL), and their children."""
    parents: dict[int, int] = {}
    roots: list[int] = []
    for pid, stat in _all():
        parents[pid] = int(stat[1])
        try:
            if argument in Path(f"/proc/{pid}/cmdline").read_text():
                roots.append(pid)
        except OSError:
            continue
    return [pid for pid in parents if pid in roots or parents[pid] in roots]


def of_group(group: int) -> list[int]:
    """The living processes of a process group."""
    return [pid for pid, stat in _all() if int(stat[2]) == group and stat[0] != "Z"]


def cpu_seconds(pids: list[int]) -> float:
    """What they have used of the CPU, all their threads together."""
    ticks = sum(int(stat[11]) + int(stat[12]) for pid, stat in _all() if pid in pids)
    return ticks / os.sysconf("SC_CLK_TCK")


def unread_bytes(port: int) -> int:
    """What has come to connections of a TCP port (IPv4) and was not read yet."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    mine = (f for f in lines if int(f[1].rpartition(":")[2], 16) == port and f[3] == "01")  # established
    return sum(int(f[4].partition(":")[2], 16) for f in mine)


def unused_shared_memory() -> set[str]:
    """Files in /dev/shm that no process has mapped or open: somebody has left them behind. Those of engines
    that others run here are in use.

    Known by their inodes: a semaphore is mapped under another name than it has in the end."""
    there = {entry.inode(): entry.path for entry in os.scandir(_SHARED_MEMORY)}
    used = {inode for pid, _ in _all() for inode in _shared_memory_of(pid)}
    return {path for inode, path in there.items() if inode not in used and os.path.exists(path)}


def _shared_memory_of(pid: int) -> Iterator[int]:
    """The inodes of what it has mapped, and of what it has open."""
    folder = Path(f"/proc/{pid}")
    try:
        for line in (folder / "maps").read_text("utf-8", "replace").splitlines():
            if _SHARED_MEMORY in line:
                yield int(line.split()[4])
        for descriptor in (folder / "fd").iterdir():
            if os.readlink(descriptor).startswith(_SHARED_MEMORY):
                yield descriptor.stat().st_ino
    except OSError:
        return  # it has just ended


def _all() -> Iterator[tuple[int, list[str]]]:
    """(pid, fields of its /proc/PID/stat from the state on)."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                yield int(entry.name), (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
