"""`tandem down`: stops what is meant, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tandem.cli import down
from tandem.local import paths
from tandem.local.record import find, this_process

from .conftest import Tandem
from .local_endpoints import up, written

# Holds an endpoint's lock as `tandem up` does, until it is told to end.
UP = """
import signal, sys
from pathlib import Path
from tandem.local.record import EndpointState, hold, load, this_process
folder = Path(sys.argv[1])
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with hold(folder):
    state = load(folder)
    state.pid, state.pid_started = this_process()
    state.save(folder)
    print(flush=True)
    signal.pause()
"""


def start(name: str, port: int, *, stubborn: bool = False) -> subprocess.Popen[str]:
    folder, _ = written(name, port)
    command = [sys.executable, "-c", UP, str(folder), "stubborn" if stubborn else ""]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as out:
        out.readline()
    return process


def test_the_only_one_needs_no_name(tandem_command: Tandem) -> None:
    written("ended", 8001)
    process = start("small", 8000)
    done = tandem_command("down")
    assert (done.code, done.err) == (0, "")
    assert done.out == "stopped small on port 8000: prefill-0, decode-0, router\n"
    assert process.wait(10) == -signal.SIGTERM


def test_of_several_the_meant_one_is_stopped(tandem_command: Tandem) -> None:
    running = [start("a", 8000), start("a", 8001), start("b", 8002), start("b", 8003)]
    done = tandem_command("down")
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        "tandem: Several endpoints run: a --port 8000; a --port 8001; b --port 8002; b --port 8003. "
        "Name one, or stop them with --all.\n"
    )
    assert tandem_command("down", "a").code == 2
    assert tandem_command("down", "a", "--port", 8001).out.startswith("stopped a on port 8001: ")
    assert tandem_command("down", "a").out.startswith("stopped a on port 8000: ")
    assert [p.poll() for p in running[2:]] == [None, None]
    done = tandem_command("down", "--all")
    assert [line.partition(":")[0] for line in done.out.splitlines()] == [
        "stopped b on port 8002",
        "stopped b on port 8003",
    ]
    assert [p.wait(10) for p in running] == [-signal.SIGTERM] * 4


def test_one_that_is_frozen_is_stopped_like_any_other(tandem_command: Tandem) -> None:
    """As by Ctrl-Z."""
    process = start("small", 8000)
    process.send_signal(signal.SIGSTOP)
    done = tandem_command("down")
    assert (done.code, done.err) == (0, "")
    assert process.wait(10) == -signal.SIGTERM


def test_one_that_does_not_end_is_killed(capsys: pytest.CaptureFixture[str]) -> None:
    process = start("small", 8000, stubborn=True)
    assert down.stop(find(), patience=1) == 0
    assert process.wait(10) == -signal.SIGKILL
    out, err = capsys.readouterr()
    assert err == "tandem: small on port 8000 did not end in 1 s and is killed\n"
    assert out == "stopped small on port 8000: prefill-0, decode-0, router\n"


def test_a_process_that_has_the_pid_of_a_killed_one_is_let_be(capsys: pytest.CaptureFixture[str]) -> None:
    """It is this very process: were it signalled, the test would end."""
    with up(pid_started=1):
        assert down.stop(find(), patience=0.2) == 1
    assert "small on port 8000 is still there" in capsys.readouterr().err


def test_one_whose_up_is_gone_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with up(pid=ended.pid):
        assert down.stop(find(), patience=0.2) == 1
    assert down.stop(find(), patience=0.2) == 0
    capsys.readouterr()


def test_the_next_one_in_the_same_place_is_let_be() -> None:
    with up(pid_started=1) as (folder, state):
        meant = find()
        state.pid, state.pid_started = this_process()
        state.save(folder)
        assert down.stop(meant, patience=0.2) == 0


def test_where_none_runs_that_is_said(tandem_command: Tandem) -> None:
    written()
    assert os.listdir(paths.states()) == ["small"]
    for words, said in (((), "No endpoint runs"), (("small",), "No endpoint small runs")):
        done = tandem_command("down", *words)
        assert (done.code, done.out) == (3, "")
        assert done.err.startswith(f"tandem: {said} on this machine. ")
