"""What `make soak` holds against the policy, and what it lets pass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tandem.local.record import EndpointState, ProcessState

from .scripts import script

PREFILLERS, DECODERS = ["prefill-0", "prefill-1"], ["decode-0", "decode-1"]
EXCUSED = ["BROKEN", "WAIT", "ERROR", "CUT", "AWAY"]


@pytest.fixture(scope="module")
def promises() -> Iterator[ModuleType]:
    with script("soak/promises.py", "promises") as module:
        yield module


@pytest.fixture(scope="module")
def clients(promises: ModuleType) -> Iterator[ModuleType]:
    with script("soak/clients.py", "clients") as module:
        yield module


@pytest.fixture(scope="module")
def machine() -> Iterator[ModuleType]:
    with script("soak/machine.py", "machine") as module:
        yield module


def test_a_process_that_its_engine_does_not_miss_is_not_killed(machine: ModuleType) -> None:
    """Nobody would start it again, and the soak would wait for that."""
    codes = (
        "print(flush=True); input()",
        "import multiprocessing.resource_tracker; print(flush=True); input()",
    )
    pipe = subprocess.PIPE
    started = [subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) for code in codes]
    try:
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        assert machine.working([process.pid for process in started]) == [started[0].pid]
    finally:
        for process in started:
            process.communicate(b"\n")


def test_a_process_of_the_endpoint_is_the_one_that_tandem_up_has_written_down(
    machine: ModuleType, promises: ModuleType, tmp_path: Path
) -> None:
    """The tests' own process stands for it; it has a child."""
    state = EndpointState(name="e", url="http://127.0.0.1:8000", port=8000, pid=1, pid_started=None)
    for name, role, port in (("decode-0", "decode", 8100), ("router", "router", 8000)):
        process = {"name": name, "role": role, "url": f"http://127.0.0.1:{port}", "port": port}
        state.processes.append(ProcessState.model_validate(process))
    state.save(tmp_path)
    with script("soak/endpoint.py", "soak_endpoint") as module:
        endpoint = module.Endpoint(1, state.url, tmp_path, None)
    assert endpoint.roles == {"decode-0": "decode", "router": "router"}
    assert endpoint.urls == {"decode-0": "http://127.0.0.1:8100"}
    assert endpoint.pids("decode-0") == set(), "it is about to be started again"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        state.processes[0].pid = os.getpid()
        state.save(tmp_path)
        assert endpoint.pids("decode-0") >= {os.getpid(), child.pid}
        assert endpoint.pids("router") == set()
        child.communicate(b"\n")


def verdict(promises: ModuleType, end: str, *struck: str, is_long: bool = False) -> str | None:
    """Of an exchange from 10 to 20 s that decode-0 answered; what was struck was struck at 15 s."""
    timeline = promises.Timeline()
    for who in struck:
        timeline.strike(who, 15.0)
    exchange = promises.Exchange(promises.End[end], 10.0, 20.0, is_long, "decode-0")
    told: str | None = promises.broken(exchange, timeline, PREFILLERS, DECODERS)
    return told


@pytest.mark.parametrize("end", ["RIGHT", "LEFT"])
def test_a_right_answer_breaks_no_promise(promises: ModuleType, end: str) -> None:
    assert verdict(promises, end) is None


@pytest.mark.parametrize("end", ["WRONG", "HALF", "NONE"])
def test_nothing_excuses_a_wrong_answer(promises: ModuleType, end: str) -> None:
    assert verdict(promises, end, *PREFILLERS, *DECODERS, "router") is not None


@pytest.mark.parametrize("end", EXCUSED)
def test_a_fault_elsewhere_excuses_nothing(promises: ModuleType, end: str) -> None:
    assert verdict(promises, end) is not None
    assert verdict(promises, end, "prefill-0", "decode-1") is not None


@pytest.mark.parametrize("end", EXCUSED)
def test_the_routers_end_excuses_whatever_its_clients_meet(promises: ModuleType, end: str) -> None:
    assert verdict(promises, end, "router") is None


@pytest.mark.parametrize("end", ["WAIT", "ERROR"])
def test_without_a_decoder_a_request_may_be_refused(promises: ModuleType, end: str) -> None:
    assert verdict(promises, end, "decode-0") is not None
    assert verdict(promises, end, *DECODERS) is None


def test_only_its_own_decoders_fault_may_break_a_stream_off(promises: ModuleType) -> None:
    assert verdict(promises, "BROKEN", "decode-0") is None
    assert verdict(promises, "BROKEN", "decode-1", *PREFILLERS) is not None


def test_without_a_prefiller_only_long_prompts_may_have_to_wait(promises: ModuleType) -> None:
    assert verdict(promises, "WAIT", *PREFILLERS, is_long=True) is None
    assert verdict(promises, "WAIT", "prefill-0", is_long=True) is not None
    assert verdict(promises, "WAIT", *PREFILLERS) is not None
    assert verdict(promises, "ERROR", *PREFILLERS, is_long=True) is not None


def test_a_fault_excuses_from_its_beginning_until_all_is_well_again(promises: ModuleType) -> None:
    timeline = promises.Timeline()
    timeline.strike("router", 5.0)
    timeline.recover("router", 8.0)
    timeline.strike("router", 30.0)
    assert timeline.was_well("router", 8.0, 30.0)
    assert not timeline.was_well("router", 7.9, 9.0)
    assert not timeline.was_well("router", 29.0, 31.0)
    assert not timeline.was_well("router", 40.0, 41.0)
    assert not timeline.is_well("router")


IDS = list(range(16))
RIGHT = b'data: {"choices":[{"token_ids":%s}]}\n\n' % json.dumps(IDS).encode()
DONE, FAILED = b"data: [DONE]\n\n", b'data: {"error":{"message":"it broke"}}\n\n'
WHOLE = json.dumps({"choices": [{"token_ids": IDS}]}).encode()


@pytest.mark.parametrize(
    ("status", "retry_after", "body", "stream", "end"),
    [
        (200, None, RIGHT + DONE, True, "RIGHT"),
        (200, None, WHOLE, False, "RIGHT"),
        (200, None, WHOLE.replace(b"15", b"99"), False, "WRONG"),
        (200, None, RIGHT.replace(b"15", b"99") + DONE, True, "WRONG"),
        (200, None, RIGHT, True, "HALF"),
        (200, None, RIGHT + FAILED, True, "HALF"),
        (200, None, RIGHT.replace(b", 15", b"") + DONE, True, "HALF"),
        (200, None, DONE, True, "HALF"),
        (503, 5.0, b"{}", True, "WAIT"),
        (503, None, b"{}", False, "ERROR"),
        (502, None, b"{}", False, "ERROR"),
    ],
)
def test_an_answer_that_came_to_its_end_is_held_against_the_one_that_is_known(
    clients: ModuleType, status: int, retry_after: float | None, body: bytes, stream: bool, end: str
) -> None:
    answer = clients.Answer(status, body, retry_after=retry_after)
    likely = [{i: -0.1, 99: -5.0} for i in IDS]
    judged, _ = clients._judged(answer, clients.Known([1], IDS, likely), stream)
    assert judged.name == end


@pytest.mark.parametrize(
    ("status", "body", "end"),
    [
        (200, RIGHT + FAILED, "BROKEN"),
        (200, RIGHT + FAILED + DONE, "BROKEN"),
        (200, RIGHT, "CUT"),
        (200, RIGHT + FAILED[:-5], "CUT"),
        (0, b"", "CUT"),
    ],
)
def test_a_broken_connection_is_in_order_after_an_error_event(
    clients: ModuleType, status: int, body: bytes, end: str
) -> None:
    judged, _ = clients._torn(clients.Answer(status, body), "closed")
    assert judged.name == end
