"""What a process and its children use, as Linux tells."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from tandem.local.proc import Use, command, members, parent, started, use_of

# Works for half a second, has a child hold 50 MB, and waits.
WORKS = """
import subprocess, sys, time
code = "x = bytearray(b'x' * 50_000_000); print(flush=True); input()"
child = subprocess.Popen([sys.executable, "-c", code], stdin=sys.stdin, stdout=subprocess.PIPE)
child.stdout.readline()
while time.process_time() < 0.5:
    pass
print(flush=True)
child.wait()
"""


def test_the_use_of_a_group_is_that_of_all_in_it() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", WORKS], stdin=pipe, stdout=pipe, start_new_session=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        use = use_of([process.pid, 2**22 + 1])
        assert use[process.pid].memory_bytes > 55_000_000
        assert 0.5 <= use[process.pid].cpu_seconds < 60
        assert use[2**22 + 1] == Use()
        assert process.pid in (group := members(process.pid))
        assert {parent(pid) for pid in group} == {os.getpid(), process.pid}
        assert command(process.pid) == (sys.executable, "-c", WORKS)
        process.communicate(b"\n")
    assert use_of([process.pid])[process.pid] == Use()
    assert members(process.pid) == []
    assert command(process.pid) is None


def test_what_cannot_be_looked_at_uses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: str) -> list[str]:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("os.listdir", full)
    assert use_of([os.getpid()]) == {os.getpid(): Use()}


def test_a_process_is_known_by_who_started_it_and_when() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert parent(process.pid) == os.getpid()
        began, ours = started(process.pid), started(os.getpid())
        assert began is not None
        assert ours is not None
        assert began >= ours
        assert process.stdin is not None
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert started(process.pid) is None, "one that has ended, though nobody has waited for it"
    assert started(2**22 + 1) is parent(2**22 + 1) is None
