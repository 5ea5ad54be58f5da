"""A whole `tandem up`, its engines simulated: it heals itself, outlives its terminal, and leaves nothing."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import httpx
import pytest

from tandem.cli import down
from tandem.local import paths
from tandem.local.errors import LocalError
from tandem.local.proc import parent
from tandem.local.record import Found, find

from ..local.processes import gone
from .conftest import Tandem as Command
from .local_endpoints import eventually, simulated


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free: int = probe.getsockname()[1]
        return free


@pytest.fixture(autouse=True)
def nothing_stays(machine: None) -> Iterator[None]:
    """Nor where a test fails."""
    yield
    down.stop([found for found in find() if found.running])


def the_one() -> Found:
    (found,) = find()
    return found


def restarts(names: Collection[str]) -> set[int]:
    """How often each of these processes has been started again."""
    return {p.restarts for p in the_one().state.processes if p.name in names}


def nothing_is_left(pids: list[int]) -> bool:
    return not the_one().running and all(map(gone, pids))


def test_a_detached_one_heals_itself_outlives_a_hang_up_and_is_stopped(tmp_path: Path, port: int) -> None:
    tandem = simulated(tmp_path, port)
    done = tandem("up", "--detach")
    assert done.returncode == 0, done.stderr
    url, curl = done.stdout.splitlines()
    assert url == f"http://127.0.0.1:{port}"
    assert curl.startswith(f"curl {url}/v1/chat/completions ")
    assert "decode-0: answering" in done.stderr
    assert f"stop with `tandem down small --port {port}`" in done.stderr
    up = the_one().state.pid
    assert done.stderr.endswith(f"it runs in the background, as process {up}\n")
    try:
        assert os.getsid(up) == up
        second = tandem("up", "--detach")
        assert (second.returncode, second.stdout) == (3, "")
        assert f"small is up on port {port} already, as process {up}" in second.stderr
        assert (tandem("up").returncode, tandem("up", "--dry-run").returncode) == (3, 0)
        os.kill(up, signal.SIGHUP)

        before = {p["name"]: p for p in tandem.processes()}
        assert all(p["ready"] for p in before.values())
        assert all(p["memory_bytes"] > 20_000_000 for p in before.values())
        assert [before[name]["kv_use"] for name in ("prefill-0", "router")] == [0.0, None]
        for names in (("prefill-0", "router"), ("decode-0",)):
            killed = [before[name]["pid"] for name in names]
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
            eventually(lambda names=names: restarts(names) == {1})  # type: ignore[misc]
            assert all(map(gone, killed))
            eventually(lambda: tandem("status").returncode == 0)
        after = {p["name"]: p for p in tandem.processes()}
        assert [p["restarts"] for p in after.values()] == [1, 1, 1]
        assert [p["url"] for p in after.values()] == [p["url"] for p in before.values()]
        assert after["prefill-0"]["cause"].startswith("prefill-0 was killed by SIGKILL: ")

        explained = {"x-tandem-explain": "1"}
        long = {"prompt": "a b c " * 100, "max_tokens": 4}

        def prefiller() -> str | None:
            """Of an answer; a router that has only just noticed a restart says 503 till that is proved."""
            answer = httpx.post(
                f"{url}/v1/completions", json=long, headers=explained, timeout=60, trust_env=False
            )
            return answer.headers.get("x-tandem-prefill-url") if answer.status_code == 200 else None

        eventually(lambda: prefiller() == after["prefill-0"]["url"])

        console = tandem("logs", "up").stdout
        assert "prefill-0 was killed by SIGKILL" in console
        assert "restart 1 in 1 s" in console
        assert "prefill-0 is back after " in console
        log = tandem("logs", "small", "prefill-0").stdout
        assert "==== tandem: restart 1 of prefill-0, " in log
        pids = [up, *(p["pid"] for p in after.values())]
    finally:
        done = tandem("down")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"stopped small on port {port}: prefill-0, decode-0, router\n"
    assert nothing_is_left(pids)
    status = tandem("status")
    assert status.returncode == 3
    assert status.stdout.startswith(f"small on port {port}: ended ")
    assert status.stdout.endswith(": it was stopped\n")


def test_one_that_does_not_come_up_is_told_with_its_cause_and_code(tmp_path: Path, port: int) -> None:
    dies = 'echo "ValueError: no room for the KV cache" >&2; exit 1'
    tandem = simulated(tmp_path, port, before=f'case "$*" in *kv_producer*) {dies};; esac')
    done = tandem("up", "--detach", "--json")
    assert (done.returncode, done.stdout) == (1, "")
    log = paths.state("small") / str(port) / "prefill-0.log"
    assert done.stderr.endswith(
        f"tandem: prefill-0 ended with exit code 1: ValueError: no room for the KV cache\nIts log: {log}\n"
    )
    assert the_one().cause_of_end.startswith("prefill-0 ended with exit code 1: ValueError: no room")
    assert nothing_is_left([])


def test_how_a_process_ends_is_known_also_where_whoever_starts_it_ignores_that(
    tmp_path: Path, port: int
) -> None:
    tandem = simulated(tmp_path, port, before="exit 7")
    ignoring = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    ignoring += "; os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", ignoring, *tandem.command("up", "--detach")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 1
    assert re.search(r"tandem: (prefill|decode)-0 ended with exit code 7: it wrote nothing\n", done.stderr)


def test_a_port_that_is_taken_meanwhile_is_this_machines_affair(tmp_path: Path, port: int) -> None:
    taken = "zmq.error.ZMQError: Address already in use (addr='tcp://127.0.0.1:1')"
    waits = f'echo "{taken}" >&2; while true; do sleep 1; done'
    tandem = simulated(tmp_path, port, before=f'case "$*" in *kv_producer*) {waits};; esac')
    done = tandem("up")
    assert (done.returncode, done.stdout) == (3, "")
    assert "tandem: prefill-0 cannot listen on port 1: it was taken meanwhile " in done.stderr
    assert nothing_is_left([])


def test_as_json_the_result_is_one_document(tmp_path: Path, port: int) -> None:
    tandem = simulated(tmp_path, port)
    done = tandem("up", "--detach", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    try:
        assert (told["name"], told["url"]) == ("small", f"http://127.0.0.1:{port}")
        assert told["pid"] == the_one().state.pid
        assert told["logs"] == str(the_one().folder)
        assert told["curl"].startswith("curl ")
    finally:
        assert tandem("down", "small").returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_the_wait_stops_what_was_to_be_detached(
    tmp_path: Path, port: int, number: signal.Signals
) -> None:
    tandem = simulated(tmp_path, port, before="sleep 600")
    waiting = tandem.start("up", "--detach")
    eventually(lambda: [f for f in find() if f.running and all(p.pid for p in f.state.processes)])
    pids = [p.pid for p in the_one().state.processes if p.pid is not None]
    waiting.send_signal(number)
    out, _ = waiting.communicate(timeout=60)
    assert (waiting.returncode, out) == (130, "")
    assert nothing_is_left(pids)


def test_who_waits_for_one_that_is_stopped_meanwhile_is_told(tmp_path: Path, port: int) -> None:
    tandem = simulated(tmp_path, port, before="sleep 600")
    waiting = tandem.start("up", "--detach")
    eventually(lambda: [f for f in find() if f.running and all(p.pid for p in f.state.processes)])
    assert tandem("down").returncode == 0
    out, err = waiting.communicate(timeout=60)
    assert (waiting.returncode, out) == (130, "")
    log = the_one().folder / "up.log"
    assert err.endswith(f"tandem: `tandem up` was stopped before it was ready. Its log: {log}\n")


def test_where_it_cannot_say_why_it_failed_that_is_told(
    tandem_command: Command, manifest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk may have filled up meanwhile."""
    told = iter([None, LocalError("no room")])
    monkeypatch.setattr("tandem.local.folders.write_problem", lambda folder, what: next(told))
    paths.state("small").joinpath("8000").mkdir(parents=True)
    done = tandem_command("up", "--detach", "-f", manifest)
    assert done.code != 0
    assert done.err.endswith("tandem: no room\n")


def test_it_comes_up_though_nobody_waits_for_it_any_more(tmp_path: Path, port: int) -> None:
    """As when the terminal is closed meanwhile."""
    tandem = simulated(tmp_path, port)
    waiting = tandem.start("up", "--detach")
    eventually(lambda: [f for f in find() if f.running])
    waiting.kill()
    waiting.communicate(timeout=60)
    eventually(lambda: tandem("status").returncode == 0)
    assert tandem("down").returncode == 0


def test_a_terminal_that_goes_while_it_starts_ends_only_what_is_shown(tmp_path: Path, port: int) -> None:
    """Where hang-ups are ignored, as under nohup."""
    go = tmp_path / "go"
    tandem = simulated(tmp_path, port, before=f"until [ -e {go} ]; do sleep 0.1; done")
    terminal, slave = pty.openpty()
    process = subprocess.Popen(
        tandem.command("up"), stdin=slave, stdout=slave, stderr=slave, start_new_session=True
    )
    os.close(slave)
    shown = b""
    while b"waiting for the engines" not in shown:
        shown += os.read(terminal, 4096)
    os.close(terminal)
    go.touch()
    eventually(lambda: tandem("status").returncode == 0)
    assert process.poll() is None
    assert tandem("down").returncode == 0
    process.wait(60)
    assert the_one().cause_of_end == "it was stopped"


def test_in_the_foreground_a_hang_up_stops_it_in_order(tmp_path: Path, port: int) -> None:
    tandem = simulated(tmp_path, port)
    process = tandem.start("up")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("http://")
    pids = [p["pid"] for p in tandem.processes()]
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert the_one().cause_of_end == "it was stopped"
    assert nothing_is_left(pids)


def test_when_it_is_killed_nothing_is_left_and_the_next_one_can_come(tmp_path: Path, port: int) -> None:
    tandem = simulated(tmp_path, port, before="sleep 600")
    process = tandem.start("up")
    eventually(lambda: [f for f in find() if f.running and all(p.pid for p in f.state.processes)])
    pids = [p.pid for p in the_one().state.processes if p.pid is not None]
    process.kill()
    process.communicate(timeout=60)
    eventually(lambda: nothing_is_left(pids))
    assert the_one().cause_of_end == "`tandem up` was killed, the machine went down, or its disk was full"
    assert tandem("down").returncode == 3


def test_files_where_it_is_started_stand_in_for_no_module(tmp_path: Path, port: int) -> None:
    tandem = simulated(tmp_path, port)
    here = tmp_path / "here"
    here.mkdir()
    for name in ("tandem", "email", "random", "httpx"):
        (here / f"{name}.py").write_text("raise SystemExit('this is none of them')\n")
    command = [sys.executable, "-P", *tandem.command("up", "--detach")[1:]]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    reapers = [p for p in Path("/proc").glob("[0-9]*") if b"tandem.local.reaper" in cmdline(p)]
    assert the_one().state.pid in [parent(int(p.name)) for p in reapers]
    assert tandem("down").returncode == 0


def cmdline(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""
