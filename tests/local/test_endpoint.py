"""An endpoint's processes: started together, ready together, stopped together, whatever happens.

The processes are small Python programs in the places of engines and router.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.api import Role
from tandem.config import RouterConfig
from tandem.engine import EngineLaunch
from tandem.local import endpoint as endpoint_module
from tandem.local import supervisor
from tandem.local.endpoint import RunningEndpoint, running
from tandem.local.errors import LocalError
from tandem.local.plan import LocalPlan
from tandem.local.ports import engine_ports
from tandem.local.process import Process, ProcessSpec
from tandem.local.reaper import Reaper
from tandem.local.record import EndpointState, is_running, load

from .processes import eventually, gone

READY_SECONDS = 60.0

# Answers /ready with 503 until the file named by its argument is there.
ROUTER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        ready = self.path == "/ready" and Path(sys.argv[1]).exists()
        why = None if ready else "no canary has gone through yet"
        body = json.dumps({"ready": ready, "reason": why, "unproved": []}).encode()
        self.send_response(200 if ready else 503)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

HTTPServer(("127.0.0.1", int(sys.argv[2])), Answer).serve_forever()
"""
ENGINE = """
import signal
print("INFO [core.py:1] Initializing a V1 LLM engine", flush=True)
print("INFO:     Application startup complete.", flush=True)
signal.pause()
"""
# Leaves its socket behind, as vLLM does.
PUBLISHES = (
    """
import socket, sys
socket.socket(socket.AF_UNIX).bind(sys.argv[1])
"""
    + ENGINE
)
# Listens, and its log does not say so: with `--uvicorn-log-level warning`, say.
SILENT = """
import signal, socket
print("INFO [core.py:1] Initializing a V1 LLM engine", flush=True)
with socket.create_server(("127.0.0.1", {port})):
    signal.pause()
"""
# Finds its port taken when it is about to listen.
TOO_LATE = """
import sys, time
from pathlib import Path
print("INFO [core.py:1] Initializing a V1 LLM engine", flush=True)
while not Path({die!r}).exists():
    time.sleep(0.01)
sys.exit("OSError: [Errno 98] Address already in use")
"""
# As vLLM does: a thread dies, and the rest waits for it.
PORT_TAKEN = """
import signal
print("INFO [core.py:1] Initializing a V1 LLM engine", flush=True)
print("zmq.error.ZMQError: Address already in use (addr='tcp://127.0.0.1:{port}')", flush=True)
signal.pause()
"""
DIES = "import sys; sys.exit('ValueError: no room for the KV cache')"


def engine(name: str, code: str, *arguments: str, port: int) -> EngineLaunch:
    return EngineLaunch(
        name=name,
        role=Role.DECODE,
        argv=(sys.executable, "-c", code, *arguments),
        env={},
        not_inherited=(),
        cpus=(),
        gpus=(),
        port=port,
        side_channel_port=2,
        host="127.0.0.1",
    )


class Box:
    """Makes plans, and notes which processes they start and what is told of them."""

    def __init__(self, folder: Path) -> None:
        self.logs = folder / "logs"
        self.go = folder / "go"
        self.port = 1
        """Of engines."""
        self.sockets: Path | None = None
        self.told: list[dict[str, str]] = []
        self.react: Callable[[dict[str, str]], None] = lambda doing: None
        self.pids: list[int] = []

    def _tell(self, doing: dict[str, str]) -> None:
        self.told.append(doing)
        self.react(doing)

    def running(self, *engines: str, router: str = ROUTER) -> AbstractAsyncContextManager[RunningEndpoint]:
        port = engine_ports(1, "127.0.0.1")[0].http
        plan = LocalPlan(
            name="e",
            engines=tuple(
                engine(f"decode-{i}", code, f"{self.sockets}/{i}.events", port=self.port)
                for i, code in enumerate(engines)
            ),
            router=RouterConfig(port=port, decode=("http://127.0.0.1:1",)),
            router_argv=(sys.executable, "-c", router, str(self.go), str(port)),
            model=Path("/m"),
            served_name="m",
            notes=(),
            unused_fields=(),
            logs=self.logs,
            sockets=self.sockets,
            ready_timeout=READY_SECONDS,
        )
        return running(plan, on_progress=self._tell)

    @property
    def state(self) -> EndpointState:
        """As it is written down."""
        state = load(self.logs)
        assert state is not None
        return state

    def all_gone(self) -> bool:
        return bool(self.pids) and all(map(gone, self.pids))


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Box:
    box = Box(tmp_path)
    start = Process.start

    async def noted(spec: ProcessSpec, log: Path, **options: Any) -> Process:
        process = await start(spec, log, **options)
        box.pids.append(process.pid)
        return process

    monkeypatch.setattr(Process, "start", noted)
    monkeypatch.setattr(endpoint_module, "_POLL_SECONDS", 0.01)
    return box


async def test_the_block_runs_once_the_router_is_ready_and_all_stops_after_it(box: Box) -> None:
    all_wait = {
        "decode-0": "answering",
        "decode-1": "answering",
        "router": "sending canaries",
    }
    box.react = lambda doing: box.go.touch() if doing == all_wait else None
    async with box.running(ENGINE, ENGINE) as endpoint:
        assert all_wait in box.told
        assert box.told[-1] == {**all_wait, "router": "ready"}
        assert [p.spec.name for p in endpoint.processes] == ["decode-0", "decode-1", "router"]
        assert all(p.running for p in endpoint.processes)
        assert sorted(p.name for p in box.logs.glob("*.log")) == [
            "decode-0.log",
            "decode-1.log",
            "router.log",
        ]
    assert box.all_gone()


async def test_how_it_is_is_written_down_from_its_start_to_its_end(box: Box) -> None:
    seen: list[EndpointState] = []

    def see(doing: dict[str, str]) -> None:
        seen.append(box.state)
        box.go.touch()

    box.react = see
    async with box.running(ENGINE) as endpoint:
        first, up = seen[0], box.state
        assert (first.name, first.state, first.pid) == ("e", "starting", os.getpid())
        assert (up.state, up.url, up.cause) == ("running", endpoint.plan.url, None)
        assert [(p.name, p.role, p.pid, p.state) for p in up.processes] == [
            ("decode-0", "decode", box.pids[0], "ready"),
            ("router", "router", box.pids[1], "ready"),
        ]
        assert is_running(box.logs)
    assert not is_running(box.logs)
    assert (box.state.state, box.state.cause) == ("ended", "it was stopped")
    assert [(p.pid, p.state) for p in box.state.processes] == [(None, "stopped")] * 2


async def test_it_is_written_down_before_anything_is_started(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what was written down of an earlier one would be taken for it."""
    box.go.touch()
    begin = endpoint_module.reaper
    seen: list[EndpointState] = []

    def look_and_begin(*held: int) -> AbstractAsyncContextManager[Reaper]:
        seen.append(box.state)
        return begin(*held)

    async with box.running(ENGINE):
        pass
    monkeypatch.setattr(endpoint_module, "reaper", look_and_begin)
    async with box.running(ENGINE):
        pass
    assert [(s.state, [p.name for p in s.processes]) for s in seen] == [("starting", ["decode-0", "router"])]


async def test_what_it_is_doing_while_it_starts_is_written_down(box: Box) -> None:
    seen: list[list[tuple[str, str]]] = []

    def see(doing: dict[str, str]) -> None:
        seen.append([(p.state, p.doing) for p in box.state.processes])
        if doing["router"] == "sending canaries":
            box.go.touch()

    box.react = see
    async with box.running(ENGINE):
        pass
    assert [("starting", "answering"), ("starting", "sending canaries")] in seen


async def test_a_second_one_in_the_same_place_does_no_harm_to_the_first(box: Box) -> None:
    box.go.touch()
    async with box.running(ENGINE) as endpoint:
        with pytest.raises(LocalError, match=rf"e is up on port \d+ already, as process {os.getpid()}\. "):
            async with box.running(ENGINE):
                pytest.fail("the block must not run")
        assert (len(box.pids), box.state.state) == (2, "running")
        assert all(p.running for p in endpoint.processes)
        assert (box.logs / "decode-0.log").read_text()


async def test_logs_of_processes_that_it_has_no_more_go(box: Box) -> None:
    box.go.touch()
    box.logs.mkdir()
    for name in ("decode-1.log", "decode-1.log.1", "up.log"):
        (box.logs / name).touch()
    async with box.running(ENGINE):
        assert sorted(p.name for p in box.logs.glob("*.log*")) == ["decode-0.log", "router.log"]


async def test_once_it_is_up_what_dies_is_started_again_and_stopped_with_the_rest(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_FIRST_DELAY", 0.01)
    box.go.touch()
    told: list[str] = []
    async with box.running(ENGINE, ENGINE) as endpoint:
        up = asyncio.create_task(endpoint.keep_up(told.append, hung_after=0))
        for pid in box.pids[1:3]:
            os.kill(pid, signal.SIGKILL)
        await eventually(lambda: len(box.pids) == 5)
        await eventually(lambda: [p.state for p in box.state.processes[1:]] == ["starting"] * 2)
        assert [p.restarts for p in box.state.processes] == [0, 1, 1]
        assert any(line.startswith("decode-1 was killed by SIGKILL: no error in its log; ") for line in told)
        assert {p.pid for p in box.state.processes} == {box.pids[0], *box.pids[3:]}
        assert not up.done()
        up.cancel()
    assert box.all_gone()


async def test_what_could_not_be_written_down_is_as_soon_as_it_can_be(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk may be full for a while."""
    monkeypatch.setattr(supervisor, "_FIRST_DELAY", 0.01)
    monkeypatch.setattr(endpoint_module, "_SAVE_AGAIN_SECONDS", 0.05)
    box.go.touch()
    async with box.running(ENGINE) as endpoint:
        up = asyncio.create_task(endpoint.keep_up(lambda line: None, hung_after=0))
        full = box.logs / ".state.json"
        full.mkdir()
        os.kill(box.pids[0], signal.SIGKILL)
        await eventually(lambda: len(box.pids) == 3)
        assert box.state.processes[0].pid == box.pids[0]
        full.rmdir()
        await eventually(lambda: box.state.processes[0].pid == box.pids[2])
        up.cancel()


async def test_one_whose_folder_is_removed_while_it_starts_is_soon_known_again(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_module, "_SAVE_AGAIN_SECONDS", 0.05)

    async def up() -> None:
        async with box.running(ENGINE):
            pytest.fail("the block must not run")

    starting = asyncio.create_task(up())
    await eventually(lambda: len(box.pids) == 2)
    shutil.rmtree(box.logs)
    await eventually(lambda: is_running(box.logs) and load(box.logs) is not None)
    assert box.state.state == "starting"
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    assert box.all_gone()


async def test_one_whose_folder_is_removed_is_soon_known_again(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_module, "_SAVE_AGAIN_SECONDS", 0.05)
    box.go.touch()
    async with box.running(ENGINE) as endpoint:
        up = asyncio.create_task(endpoint.keep_up(lambda line: None, hung_after=0))
        shutil.rmtree(box.logs)
        assert not is_running(box.logs)
        await eventually(lambda: is_running(box.logs) and load(box.logs) is not None)
        assert box.state.state == "running"
        up.cancel()
    assert box.state.state == "ended"


async def test_progress_is_told_when_it_changes_and_not_otherwise(box: Box) -> None:
    box.go.touch()
    async with box.running(ENGINE):
        pass
    assert all(a != b for a, b in zip(box.told, box.told[1:], strict=False))


async def test_an_engine_whose_log_does_not_say_that_it_answers_is_known_by_its_port(box: Box) -> None:
    box.go.touch()
    box.port = engine_ports(1, "127.0.0.1")[0].http
    async with box.running(SILENT.format(port=box.port)):
        assert box.told[-1] == {"decode-0": "starting the engine", "router": "ready"}


async def test_an_engine_in_whose_place_another_program_answers_is_not_up(
    box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    die, look = tmp_path / "die", endpoint_module.what_router_waits_for

    async def die_once_the_router_is_content(client: httpx.AsyncClient, url: str) -> str:
        missing = await look(client, url)
        if not missing:
            die.touch()
        return missing

    monkeypatch.setattr(endpoint_module, "what_router_waits_for", die_once_the_router_is_content)
    box.go.touch()
    with socket.create_server(("127.0.0.1", 0)) as other:
        box.port = other.getsockname()[1]
        with pytest.raises(LocalError, match="decode-0 ended with exit code 1: OSError: "):
            async with box.running(TOO_LATE.format(die=str(die))):
                pytest.fail("the block must not run")


async def test_an_engine_that_dies_while_starting_ends_it_with_the_cause(box: Box) -> None:
    with pytest.raises(LocalError) as error:
        async with box.running(ENGINE, DIES):
            pytest.fail("the block must not run")
    assert str(error.value) == (
        "decode-1 ended with exit code 1: ValueError: no room for the KV cache\n"
        f"Its log: {box.logs / 'decode-1.log'}"
    )
    assert len(box.pids) == 3
    assert box.all_gone()
    assert (box.state.state, box.state.cause) == ("ended", str(error.value))


async def test_an_engine_whose_port_for_nixl_is_taken_ends_it_with_the_port_and_who_has_it(box: Box) -> None:
    """It runs on, and would wait for ever."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(LocalError) as error:
            async with box.running(ENGINE, PORT_TAKEN.format(port=port)):
                pytest.fail("the block must not run")
    assert re.fullmatch(
        rf"decode-1 cannot listen on port {port}: it was taken meanwhile "
        rf"\(process {os.getpid()}: .*\)\. Stop that, or start again: another port is chosen then\.\n"
        rf"Its log: {box.logs}/decode-1\.log",
        str(error.value),
    )
    assert box.all_gone()
    assert (box.state.state, box.state.cause) == ("ended", str(error.value))


async def test_a_router_that_dies_while_starting_ends_it_with_the_cause(box: Box) -> None:
    with pytest.raises(LocalError, match="router ended with exit code 1: ValueError: no room"):
        async with box.running(ENGINE, router=DIES):
            pytest.fail("the block must not run")
    assert box.all_gone()


async def test_another_router_that_has_its_port_is_not_taken_for_its_own(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two that are started together for one port the second is not ready because the first is."""

    async def the_other_is_ready(client: httpx.AsyncClient, url: str) -> str:
        return ""

    monkeypatch.setattr(endpoint_module, "what_router_waits_for", the_other_is_ready)
    slow = "import sys, time; time.sleep(0.5); sys.exit('OSError: address already in use')"
    with pytest.raises(LocalError, match="router ended with exit code 1: OSError: address already in use"):
        async with box.running(ENGINE, router=slow):
            pytest.fail("the block must not run")
    assert box.all_gone()


async def test_one_that_is_never_ready_is_given_up_with_where_to_look(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeout, look = asyncio.timeout, endpoint_module.what_router_waits_for
    waiting: list[asyncio.Timeout] = []

    def noted(seconds: float | None) -> asyncio.Timeout:
        made = timeout(seconds)
        if seconds == READY_SECONDS:
            waiting.append(made)
        return made

    async def look_until_time_is_up(client: httpx.AsyncClient, url: str) -> str:
        """How long a start takes is this machine's affair."""
        missing = await look(client, url)
        if missing == "no canary has gone through yet":
            waiting[0].reschedule(0.0)
        return missing

    monkeypatch.setattr(asyncio, "timeout", noted)
    monkeypatch.setattr(endpoint_module, "what_router_waits_for", look_until_time_is_up)
    with pytest.raises(LocalError) as error:
        async with box.running(ENGINE):
            pytest.fail("the block must not run")
    assert str(error.value) == (
        f"The endpoint was not ready after 60 s: no canary has gone through yet. Logs: {box.logs}"
    )
    assert box.all_gone()


async def test_a_process_that_cannot_be_started_stops_the_others(box: Box) -> None:
    box.logs.mkdir()
    (box.logs / "router.log").mkdir()
    with pytest.raises(LocalError, match="Cannot start router: "):
        async with box.running(ENGINE):
            pytest.fail("the block must not run")
    assert len(box.pids) == 1
    assert box.all_gone()


async def test_a_death_at_work_ends_the_wait_for_it(box: Box) -> None:
    box.go.touch()
    async with box.running(ENGINE, ENGINE) as endpoint:
        wait = asyncio.create_task(endpoint.died())
        await endpoint.processes[1].stop()
        with pytest.raises(LocalError, match=r"decode-1 was killed by SIGTERM"):
            await wait
    assert box.all_gone()


async def test_work_ends_by_itself_or_with_the_first_death(box: Box) -> None:
    box.go.touch()
    ran: list[str] = []

    async def work() -> None:
        ran.append("work")

    async def wrong() -> None:
        raise KeyError("wrong")

    async def for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ran.append("cancelled")

    async with box.running(ENGINE) as endpoint:
        await endpoint.while_alive(work())
        with pytest.raises(KeyError, match="wrong"):
            await endpoint.while_alive(wrong())
        with pytest.raises(TimeoutError):
            await endpoint.while_alive(for_ever(), within=0.01)
        task = asyncio.create_task(endpoint.while_alive(for_ever()))
        await endpoint.processes[0].stop()
        with pytest.raises(LocalError, match="decode-0"):
            await task
    assert ran == ["work", "cancelled", "cancelled"]


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short name, as paths of sockets must be."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield Path(folder)


async def test_sockets_lie_in_a_private_folder_that_goes_with_the_endpoint(box: Box, short: Path) -> None:
    box.go.touch()
    box.sockets = short / "sockets"
    for _ in range(2):
        async with box.running(PUBLISHES, PUBLISHES):
            assert box.sockets.stat().st_mode & 0o777 == 0o700
            assert sorted(p.name for p in box.sockets.iterdir()) == ["0.events", "1.events"]
        assert not box.sockets.exists()


async def test_sockets_of_an_endpoint_that_did_not_come_up_go_too(box: Box, short: Path) -> None:
    box.sockets = short / "sockets"
    with pytest.raises(LocalError):
        async with box.running(PUBLISHES, DIES):
            pytest.fail("the block must not run")
    assert not box.sockets.exists()


async def test_a_folder_that_is_not_ours_alone_starts_nothing_and_stays(box: Box, short: Path) -> None:
    box.sockets = short / "sockets"
    box.sockets.mkdir()
    box.sockets.chmod(0o777)
    with pytest.raises(LocalError, match="is not a folder of this user alone"):
        async with box.running(PUBLISHES):
            pytest.fail("the block must not run")
    assert box.pids == []
    assert box.sockets.exists()


async def test_an_error_in_the_block_or_a_cancel_stops_all(box: Box) -> None:
    box.go.touch()
    with pytest.raises(KeyError):
        async with box.running(ENGINE):
            raise KeyError
    assert box.all_gone()

    async def up() -> None:
        async with box.running(ENGINE):
            entered.set()
            await asyncio.Event().wait()

    entered = asyncio.Event()
    task = asyncio.create_task(up())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(box.pids) == 4
    assert box.all_gone()


@pytest.mark.parametrize("page", ["[]", "7", "null", '"ready"'])
async def test_a_program_that_is_no_router_is_told(page: str) -> None:
    answer = httpx.MockTransport(lambda request: httpx.Response(200, text=page))
    async with httpx.AsyncClient(transport=answer) as client:
        told = await endpoint_module.what_router_waits_for(client, "http://127.0.0.1:8000")
    assert told == "what answers on its port is no router of Tandem's"
