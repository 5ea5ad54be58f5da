"""What the index takes at the size it is meant for."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar, cast

import pytest

from tandem.config import STRATEGIES, RouterConfig
from tandem.http import Origin
from tandem.router.body import Body
from tandem.router.budgets import Budgets
from tandem.router.choosing import Choosing
from tandem.router.classify import Api
from tandem.router.connectors import LMCache, Receiver
from tandem.router.counting import Counter
from tandem.router.engines import Engine, EngineRole, State
from tandem.router.fleet import Fleet
from tandem.router.groups import Candidates
from tandem.router.job import Job
from tandem.router.strategies import DecoderLoad, DecoderScore, Prompt, make

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "routing" / "index.py"


@pytest.mark.slow
@pytest.mark.parametrize("engines", ["8", "256"])
def test_two_million_blocks_fit_in_450_mb(engines: str) -> None:
    """In a process of its own: resident memory is never given back entirely."""
    command = [sys.executable, str(BENCHMARK), "--part", "memory", engines]
    measured = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert measured["blocks"] == 2_000_000
    assert measured["mb"] <= 450


class Box:
    """Choosing among decoders, each proved with each prefiller, or among engines without a role."""

    def __init__(self, strategy: str, *, prefill: int = 0, decode: int = 0, roleless: int = 0) -> None:
        url = "http://x:1"
        config = RouterConfig(decode=(url,), routing_strategy=strategy, ramp_up=0.0)
        fleet = Fleet()
        self.prefillers = [_engine(f"p{i:03}", EngineRole.PREFILL) for i in range(prefill)]
        self.decoders = [_engine(f"d{i:03}", EngineRole.DECODE) for i in range(decode)]
        others = [_engine(f"e{i:03}", EngineRole.BOTH) for i in range(roleless)]
        fleet.engines = [*self.prefillers, *self.decoders, *others]
        for engine in fleet.engines:
            engine.state, engine.models = State.READY, [{"id": "m"}]
        # At once: proved one by one they would take minutes.
        fleet._proved = set(product(self.prefillers, self.decoders))
        fleet._changed()
        made = make(config)
        budgets = Budgets()
        connector = LMCache(
            lambda url: Receiver("h", (1,), (2,)), chunk_size=256, buffer_chunks=1000, ranks=1
        )
        decoders = DecoderScore(
            lambda e: DecoderLoad(e.held_tokens, e.kv_use, budgets.share(e)), made.prefixes
        )
        self.choosing = Choosing(
            config, fleet, cast(Counter, None), connector, budgets, made.strategy, decoders
        )
        self.rng = random.Random(1)
        self.chats = [[self.rng.randrange(50_000) for _ in range(300)] for _ in range(40)]

    def job(self) -> Job:
        """The next turn of one of 40 chats, or another one for it."""
        chat = self.rng.randrange(len(self.chats))
        if len(self.chats[chat]) > 1500:
            self.chats[chat] = []
        self.chats[chat] += [self.rng.randrange(50_000) for _ in range(100)]
        ids = list(self.chats[chat])
        body = Body.parse(b'{"model":"m","prompt":""}')
        job = Job(cast(Any, None), cast(Any, None), Api.COMPLETIONS, body, "id", 0.0, False, model="m")
        job.prompt = Prompt(len(ids), ids, session=f"chat {chat}")
        job.prompt.chain(16)  # what the prompt costs is the same for all
        return job

    def pair(self, job: Job) -> None:
        pair = self.choosing.pair(job)
        assert pair is not None
        pair.reservation.release()

    def alone(self, job: Job) -> None:
        self.choosing.alone(job)


def _engine(name: str, role: EngineRole) -> Engine:
    url = f"http://{name}:1"
    return Engine(url, role, Origin.parse(url))


T = TypeVar("T")


def steps(work: Callable[[T], object], given: Callable[[], T], times: int = 128) -> float:
    """How many steps of Python's machine some work takes, on average: no clock, so no noise. `given`: makes
    what it is given."""
    for _ in range(times):  # what is worked out once for all
        work(given())
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    for _ in range(times):
        argument = given()
        sys.settrace(trace)
        try:
            work(argument)
        finally:
            sys.settrace(before)
    return count / times


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("what", ["pair", "decoder alone", "without a role"])
def test_a_choice_among_256_engines_costs_hardly_more_than_among_a_few(strategy: str, what: str) -> None:
    """Of many engines a few are compared; nothing is listed, counted or sorted for a request."""
    cost = {}
    for count in (2, 16, 256):
        if what == "without a role":
            box = Box(strategy, roleless=count)
        else:
            box = Box(strategy, prefill=count, decode=count)
        cost[count] = steps(box.pair if what == "pair" else box.alone, box.job)
    assert cost[256] <= 1.25 * cost[16]
    assert cost[256] <= 2.5 * cost[2]


def test_who_joins_does_not_make_choices_among_many_cost_more() -> None:
    """While one ramps up, its share goes by the mean of all others."""
    cost = {}
    for count in (16, 256):
        engines = [_engine(f"e{i:03}", EngineRole.BOTH) for i in range(count)]
        for engine in engines:
            engine.joined, engine.in_flight = -100.0, 1
        engines[-1].joined = 0.0
        candidates = Candidates(engines, 30.0, lambda: 15.0)
        assert len(candidates.now()) == count - 1
        cost[count] = steps(lambda nothing, candidates=candidates: candidates.now(), lambda: None)
    assert cost[256] <= 1.5 * cost[16]
