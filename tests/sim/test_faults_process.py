"""Each kind of fault at a `tandem sim` process, set over its control endpoint: a client meets what
docs/simulator.md says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tandem.sim import CostProfile
from tandem.sim.faults import KINDS

from .helpers import FOX, MODEL, REMOTE_DECODE, flags

PATIENCE = 1.0
"""Seconds that a client waits for an engine that says nothing."""


@dataclass
class Engine:
    """One engine of the process."""

    url: str
    client: httpx.Client

    def post(self, *, patience: float = 30.0, **more: Any) -> httpx.Response:
        """A greedy completion of 8 tokens."""
        return self.client.post(f"{self.url}/v1/completions", json=_body(more), timeout=patience)

    def stream(self, *, patience: float = 30.0) -> Stream:
        """A streamed one, as far as it comes."""
        text, broken = "", None
        body, url = _body({"stream": True}), f"{self.url}/v1/completions"
        with self.client.stream("POST", url, json=body, timeout=patience) as response:
            try:
                for piece in response.iter_text():
                    text += piece
            except httpx.TransportError as error:
                broken = error
        return Stream(
            response.status_code,
            [event.removeprefix("data: ") for event in text.split("\n\n") if event],
            broken,
        )

    def prefill(self) -> Any:
        """The kv_transfer_params of a prefill leg."""
        return self.post(max_tokens=1, kv_transfer_params=REMOTE_DECODE).json()["kv_transfer_params"]

    def set(self, faults: str) -> None:
        answer = self.client.post(f"{self.url}/sim/faults", content=faults)
        assert answer.json() == {"faults": faults}
        while self.client.get(f"{self.url}/sim/faults").json() != {"faults": [faults]}:
            pass

    def clear(self) -> None:
        self.client.delete(f"{self.url}/sim/faults")
        while self.client.get(f"{self.url}/sim/faults").json() != {"faults": []}:
            pass

    def metric(self, name: str) -> float:
        lines = self.client.get(f"{self.url}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def _body(more: dict[str, Any]) -> dict[str, Any]:
    fixed = {"model": MODEL, "prompt": FOX, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return {**fixed, **more}


@dataclass
class Stream:
    status: int
    events: list[str]
    broken: httpx.TransportError | None


@dataclass
class Fleet:
    """The engines of the process: two that hand over to each other, and one whose port will be closed."""

    prefill: Engine
    decode: Engine
    victim: Engine


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    words = ["--port", "0", "--engines", "3", "--role", "both", "--", *flags()]
    command = [sys.executable, "-m", "tandem", "sim", *words]
    environment = {**os.environ, "VLLM_NIXL_SIDE_CHANNEL_PORT": "0", "VLLM_CPU_KVCACHE_SPACE": ""}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
    try:
        assert process.stdout is not None
        urls = json.loads(process.stdout.readline())["urls"]
        with httpx.Client(timeout=30, trust_env=False) as client:
            yield Fleet(*(Engine(url, client) for url in urls))
        assert process.poll() is None
    finally:
        process.terminate()
        process.communicate()
    assert process.returncode == 0


def refuses(fleet: Fleet) -> None:
    answer = fleet.victim.client.post(f"{fleet.victim.url}/sim/faults", content="refuse")
    assert answer.status_code == 200
    seen = None
    while not isinstance(seen, httpx.ConnectError):  # until the process has got round to it
        try:
            fleet.victim.post()
        except httpx.TransportError as error:
            seen = error
    assert fleet.decode.post().status_code == 200


def says_nothing_more(fleet: Fleet) -> None:
    fleet.decode.set("hang@3")
    stream = fleet.decode.stream(patience=PATIENCE)
    assert len(stream.events) == 3
    assert isinstance(stream.broken, httpx.ReadTimeout)


def waits(fleet: Fleet) -> None:
    fleet.decode.set("delay=0.5")
    started = time.monotonic()
    assert fleet.decode.post().status_code == 200
    assert time.monotonic() - started >= 0.5


def resets(fleet: Fleet) -> None:
    fleet.decode.set("reset@5")
    stream = fleet.decode.stream()
    assert len(stream.events) <= 5
    assert isinstance(stream.broken, httpx.ReadError)  # the kernel's "connection reset"


def closes_in_the_middle(fleet: Fleet) -> None:
    fleet.decode.set("crash@2")
    stream = fleet.decode.stream()
    assert len(stream.events) == 2
    assert isinstance(stream.broken, httpx.RemoteProtocolError)


def answers_with_an_error(fleet: Fleet) -> None:
    fleet.decode.set("status=503,times=2")
    assert [fleet.decode.post().status_code for _ in range(3)] == [503, 503, 200]


def sends_the_head_of_an_error(fleet: Fleet) -> None:
    fleet.decode.set("head=500")
    stream = fleet.decode.stream()
    assert (stream.status, stream.events) == (500, [])
    assert isinstance(stream.broken, httpx.RemoteProtocolError)


def puts_an_error_into_a_stream(fleet: Fleet) -> None:
    fleet.decode.set("error@1")
    first, error, done = fleet.decode.stream().events
    assert "choices" in json.loads(first)
    assert json.loads(error)["error"]["code"] == 500
    assert done == "[DONE]"


def cuts_a_chunk(fleet: Fleet) -> None:
    fleet.decode.set("truncate@1")
    stream = fleet.decode.stream()
    assert isinstance(stream.broken, httpx.RemoteProtocolError)
    assert json.loads(stream.events[0])
    with pytest.raises(ValueError, match=r"."):
        json.loads(stream.events[1])


def sends_what_is_not_json(fleet: Fleet) -> None:
    fleet.decode.set("badjson")
    answer = fleet.decode.post()
    assert answer.status_code == 200
    with pytest.raises(ValueError, match=r"."):
        answer.json()


def leaves_the_parameters_out(fleet: Fleet) -> None:
    fleet.prefill.set("no-kv-params,leg=prefill")
    assert fleet.prefill.prefill() is None


def loses_the_kv(fleet: Fleet) -> None:
    fleet.prefill.set("lost-kv")
    assert fleet.decode.post(kv_transfer_params=fleet.prefill.prefill(), cache_salt="lost").status_code == 500


def gives_another_prompts_kv(fleet: Fleet) -> None:
    right = fleet.decode.post().json()["choices"][0]["text"]
    fleet.prefill.set("stale-kv")
    answer = fleet.decode.post(kv_transfer_params=fleet.prefill.prefill(), cache_salt="stale")
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] != right


def ends_leases_at_once(fleet: Fleet) -> None:
    fleet.prefill.set("expired-lease")
    assert fleet.prefill.prefill()["do_remote_prefill"]
    assert fleet.prefill.metric("vllm:nixl_num_kv_expired_reqs_total") == 1


def has_no_room_for_kv(fleet: Fleet) -> None:
    fleet.decode.set("full-buffer")
    with pytest.raises(httpx.ReadTimeout):
        fleet.decode.post(kv_transfer_params=fleet.prefill.prefill(), patience=PATIENCE)
    assert fleet.decode.post().status_code == 200


def is_slow(fleet: Fleet) -> None:
    fleet.decode.set("slow=4")
    started = time.monotonic()
    fleet.decode.post()
    assert time.monotonic() - started >= 8 * 4 * CostProfile().step


SEEN: dict[str, Callable[[Fleet], None]] = {
    "hang": says_nothing_more,
    "delay": waits,
    "reset": resets,
    "crash": closes_in_the_middle,
    "status": answers_with_an_error,
    "head": sends_the_head_of_an_error,
    "error": puts_an_error_into_a_stream,
    "truncate": cuts_a_chunk,
    "badjson": sends_what_is_not_json,
    "no-kv-params": leaves_the_parameters_out,
    "lost-kv": loses_the_kv,
    "stale-kv": gives_another_prompts_kv,
    "expired-lease": ends_leases_at_once,
    "full-buffer": has_no_room_for_kv,
    "slow": is_slow,
    "refuse": refuses,
}
# They need LMCache's wire: see test_lmcache.
ELSEWHERE = {"lost-notification", "late-notification"}


@pytest.mark.parametrize("kind", SEEN)
def test_a_client_meets_the_fault(fleet: Fleet, kind: str) -> None:
    SEEN[kind](fleet)
    for engine in (fleet.prefill, fleet.decode):
        engine.clear()
        assert engine.post(max_tokens=1).status_code == 200
    state = fleet.decode.client.get(f"{fleet.decode.url}/sim/state").json()
    assert (state["running"], state["waiting"], state["loading"]) == (0, 0, 0)
    assert state["free_blocks"] == state["blocks"]


def test_every_kind_is_met() -> None:
    assert {*SEEN, *ELSEWHERE} == set(KINDS)
