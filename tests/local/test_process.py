"""Child processes, real ones: pinned, logged, ended with all they started."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tandem.local import proc
from tandem.local.errors import LocalError
from tandem.local.process import Process, ProcessSpec
from tandem.local.reaper import end_groups, reaper

from .processes import eventually, gone, program, written

Start = Callable[[ProcessSpec], Awaitable[Process]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Start a process with its log in a folder that is not there yet."""
    started: list[Process] = []

    async def start_one(spec: ProcessSpec) -> Process:
        process = await Process.start(spec, tmp_path / "logs" / f"{spec.name}.log")
        started.append(process)
        return process

    yield start_one
    for process in started:
        await process.stop(patience=0)


async def death(process: Process) -> str:
    with pytest.raises(LocalError) as error:
        await process.died()
    return str(error.value)


async def test_both_outputs_go_to_the_log(start: Start) -> None:
    process = await start(program("p", "import sys; print('out', flush=True); print('err', file=sys.stderr)"))
    await death(process)
    assert process.log.read_text() == "out\nerr\n"
    assert process.log.stat().st_mode & 0o111 == 0


async def test_a_log_starts_anew_with_its_process(start: Start) -> None:
    for text in ("first", "second"):
        process = await start(program("p", f"print({text!r})"))
        await death(process)
    assert process.log.read_text() == "second\n"


async def test_a_restart_goes_on_in_the_same_log_and_tells_its_own_cause(tmp_path: Path) -> None:
    log = tmp_path / "p.log"
    first = await Process.start(program("p", "raise ValueError('first')"), log)
    assert (await death(first)).startswith("p ended with exit code 1: ValueError: first\n")
    second = await Process.start(program("p", "raise SystemExit(3)"), log, restart=1)
    assert (await death(second)).startswith("p ended with exit code 3: it wrote nothing\n")
    assert re.search(r"\nValueError: first\n==== tandem: restart 1 of p, .* ====\n$", log.read_text())


@pytest.mark.parametrize("restart", [0, 1])
async def test_a_fifo_in_the_place_of_its_log_holds_nothing_up(tmp_path: Path, restart: int) -> None:
    """Who opens one that nobody reads from waits for ever."""
    log = tmp_path / "p.log"
    os.mkfifo(log)
    process = await Process.start(program("p", "print('out')"), log, restart=restart)
    await death(process)
    assert log.read_text().endswith("out\n")


async def test_a_full_disk_keeps_nothing_from_being_started_again() -> None:
    process = await Process.start(program("p", "import signal; signal.pause()"), Path("/dev/full"), restart=1)
    assert process.running
    await process.stop()


ANSWERS = """
import signal
signal.signal(signal.SIGUSR1, lambda *_: print("b", flush=True))
print("a" * 99, flush=True)
while True:
    signal.pause()
"""


async def test_its_log_may_be_emptied_while_it_writes(start: Start) -> None:
    process = await start(program("p", ANSWERS))
    await written(process.log)
    os.truncate(process.log, 0)
    os.kill(process.pid, signal.SIGUSR1)
    assert await written(process.log) == "b\n"


async def test_it_begins_once_it_has_been_announced(tmp_path: Path) -> None:
    """Whoever ends what a killed `tandem up` has left knows of it before it can do anything."""
    log = tmp_path / "p.log"

    def refuse(pid: int) -> None:
        pids.append(pid)
        raise ValueError("killed just then")

    pids: list[int] = []
    with pytest.raises(LocalError, match="Cannot start p: killed just then"):
        await Process.start(program("p", "print('begun')"), log, announce=refuse)
    await eventually(lambda: gone(pids[0]))
    assert log.read_text() == "error: tandem ended before this process began\n"


async def test_it_is_pinned_to_its_cpus(start: Start) -> None:
    cpu = max(os.sched_getaffinity(0))
    process = await start(program("p", "import os; print(os.sched_getaffinity(0))", cpus=[cpu]))
    await death(process)
    assert process.log.read_text() == f"{{{cpu}}}\n"


async def test_its_environment_is_the_given_one_and_nothing_else(start: Start) -> None:
    process = await start(program("p", "import os; print(dict(os.environ))", env={"A": "1", "LC_ALL": "C"}))
    await death(process)
    assert process.log.read_text() == "{'A': '1', 'LC_ALL': 'C'}\n"


async def test_a_death_tells_who_how_why_and_where_to_read_more(start: Start) -> None:
    process = await start(program("decode-0", "raise ValueError('no room for the KV cache')"))
    assert await death(process) == (
        f"decode-0 ended with exit code 1: ValueError: no room for the KV cache\nIts log: {process.log}"
    )
    assert not process.running


async def test_a_death_by_a_signal_is_told_by_its_name(start: Start) -> None:
    process = await start(program("p", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))
    assert (await death(process)).startswith(
        "p was killed by SIGKILL: no error in its log; somebody killed it, or the kernel did, "
        "as it does when memory runs out (`dmesg` tells)\n"
    )


async def test_a_signal_without_a_name_is_told_by_its_number(start: Start) -> None:
    number = signal.SIGRTMIN + 1
    process = await start(program("p", f"import os; os.kill(os.getpid(), {number})"))
    assert (await death(process)).startswith(f"p was killed by signal {number}: no error in its log\n")


async def test_an_error_in_its_log_comes_before_the_signal_that_killed_it(start: Start) -> None:
    code = "import os; print('Fatal Python error: x\\nMemoryError: 2 GiB\\nbye', flush=True); os.abort()"
    assert (await death(await start(program("p", code)))).startswith(
        "p was killed by SIGABRT: MemoryError: 2 GiB\n"
    )


async def test_a_program_that_is_not_there_is_told_by_name(start: Start) -> None:
    process = await start(ProcessSpec("p", ("/no/such/python", "-m", "vllm")))
    assert "error: cannot run /no/such/python: No such file or directory" in await death(process)


async def test_where_no_thread_can_be_started_that_is_told(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with too many processes, or too little memory: asyncio waits for a child in a thread."""

    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(LocalError, match="Cannot start p: can't start new thread"):
        await start(program("p", "print('never')"))


SLEEPER = "import signal; print('up', flush=True); signal.pause()"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEPER


TIDY = """
import signal, sys
def tidy(*_):
    print("tidied up", flush=True)
    sys.exit()
signal.signal(signal.SIGTERM, tidy)
print("up", flush=True)
while True:
    signal.pause()
"""


async def test_stopping_asks_first(start: Start) -> None:
    process = await start(program("p", TIDY))
    await written(process.log)
    await process.stop()
    assert process.log.read_text() == "up\ntidied up\n"
    assert not process.running


async def test_one_that_does_not_listen_is_killed(start: Start) -> None:
    process = await start(program("p", STUBBORN))
    await written(process.log)
    await process.stop(patience=0.05)
    assert gone(process.pid)


@pytest.mark.parametrize("by", ["whoever started it", "the reaper"])
async def test_one_that_is_frozen_is_asked_first_too(start: Start, by: str) -> None:
    process = await start(program("p", TIDY))
    await written(process.log)
    os.kill(process.pid, signal.SIGSTOP)
    await (process.stop() if by != "the reaper" else asyncio.to_thread(end_groups, [process.pid]))
    assert process.log.read_text() == "up\ntidied up\n"


HOLDS = """
import multiprocessing, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
held = multiprocessing.get_context("spawn").Lock()
print(held._semlock.name, flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize("by", ["whoever started it", "the reaper"])
async def test_what_a_killed_one_had_in_shared_memory_is_freed(start: Start, by: str) -> None:
    """By Python's resource tracker, a process of its own beside it."""
    process = await start(program("p", HOLDS))
    held = Path("/dev/shm") / f"sem.{(await written(process.log)).strip().removeprefix('/')}"
    try:
        assert held.exists()
        assert len(proc.members(process.pid)) == 2
        if by == "the reaper":
            await asyncio.to_thread(end_groups, [process.pid], 0.1)
        else:
            await process.stop(patience=0.1)
        assert proc.members(process.pid) == []
        assert not held.exists()
    finally:
        held.unlink(missing_ok=True)


@pytest.mark.parametrize("own_end", [True, False], ids=["after its own end", "running"])
async def test_what_it_started_ends_with_it(
    monkeypatch: pytest.MonkeyPatch, start: Start, own_end: bool
) -> None:
    monkeypatch.setattr(
        "tandem.local.process._CHILDREN_SECONDS", 0.1
    )  # what is stubborn need not be waited for
    code = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
{"" if own_end else "child.wait()"}
"""
    process = await start(program("p", code))
    child = int(await written(process.log))
    if own_end:
        await eventually(lambda: not process.running)
    assert not gone(child)
    await process.stop()
    await eventually(lambda: gone(child))


async def test_stopping_twice_or_after_the_end_is_nothing(start: Start) -> None:
    process = await start(program("p", ""))
    await death(process)
    await process.stop()
    await process.stop()


PARENT = f"""
import asyncio, sys
from pathlib import Path
from tandem.local.process import Process, ProcessSpec
from tandem.local.reaper import reaper

async def main():
    spec = ProcessSpec("p", (sys.executable, "-c", {SLEEPER!r}))
    async with reaper() as guard:
        process = await Process.start(spec, Path(sys.argv[1]))
        guard.started(process.pid)
        folder = Path(sys.argv[2])
        folder.mkdir()
        (folder / "a socket").touch()
        guard.made(folder)
        print(process.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_it_ends_when_its_parent_is_killed_and_what_was_made_goes(tmp_path: Path) -> None:
    log, made = tmp_path / "p.log", tmp_path / "made"
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, str(log), str(made), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    child = int(await parent.stdout.readline())
    await written(log)
    assert not gone(child)
    assert made.exists()
    parent.kill()
    await parent.wait()
    await eventually(lambda: gone(child))
    await eventually(lambda: not made.exists())
    assert log.exists()


async def test_the_reaper_ends_what_is_listed_and_nothing_else(start: Start) -> None:
    listed, ended = await start(program("p", SLEEPER)), await start(program("q", SLEEPER))
    async with reaper() as guard:
        for process in (listed, ended):
            guard.started(process.pid)
        guard.ended(ended.pid)
    await eventually(lambda: gone(listed.pid))
    assert not gone(ended.pid)


async def test_a_reaper_that_dies_is_replaced_by_one_that_knows_as_much(start: Start, tmp_path: Path) -> None:
    listed, ended = await start(program("p", SLEEPER)), await start(program("q", SLEEPER))
    made = tmp_path / "made"
    made.mkdir()
    async with reaper() as guard:
        for process in (listed, ended):
            guard.started(process.pid)
        guard.ended(ended.pid)
        guard.made(made)
        first = guard.process
        first.kill()
        await eventually(lambda: guard.process is not first)
    await eventually(lambda: gone(listed.pid))
    assert not gone(ended.pid)
    assert not made.exists()


async def test_a_reaper_that_is_stopped_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.local.reaper._PATIENCE_SECONDS", 0.05)
    async with reaper() as guard:
        guard.process.send_signal(signal.SIGSTOP)
    assert guard.process.returncode == -signal.SIGKILL


async def test_a_folder_has_any_name_that_a_locale_may_not_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    made = tmp_path / "é"
    made.mkdir()
    async with reaper() as guard:
        guard.made(made)
    assert not made.exists()


async def test_the_reaper_kills_what_ignores_sigterm(start: Start) -> None:
    process = await start(program("p", STUBBORN))
    await written(process.log)
    await asyncio.to_thread(end_groups, [process.pid], 0.2)
    await eventually(lambda: gone(process.pid))


async def test_being_interrupted_does_not_reach_it(start: Start) -> None:
    """Ctrl-C goes to the terminal's group; children end when they are told to, in order."""
    process = await start(program("p", SLEEPER))
    await written(process.log)
    assert os.getpgid(process.pid) == process.pid != os.getpgid(0)
    os.kill(process.pid, signal.SIGTERM)
    with pytest.raises(LocalError, match="killed by SIGTERM"):
        await asyncio.wait_for(process.died(), 60)
