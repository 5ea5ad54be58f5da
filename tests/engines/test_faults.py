"""Real engines that are killed, hang, refuse, answer errors, or lose what they would hand over.

Two prefillers and two decoders, and a router in this process; docs/faults.md has the same faults at simulated
engines. For each: what the client gets, what is counted, and that all engines are in use again afterwards.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tandem.prompt import PromptCounter

from .answers import fresh_prompt
from .between import PATIENCE_SECONDS, Between, Endpoint, Kind, Sent, at_rest, behind, is_running, until
from .conftest import Up
from .killable import CONTEXT, LEASE_SECONDS, Engines, planned

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

LONG = 300
"""Tokens of a prompt that is disaggregated."""
FOR_EVER = 3600.0
"""Seconds. The router does not lose patience with an engine that is only slow; with one that hangs it does
when a test says so (`Case.hanging`)."""
FLAGS = {
    "routing_threshold": 100,
    "prefill_timeout": FOR_EVER,
    "first_token_timeout": FOR_EVER,
    "stream_idle_timeout": FOR_EVER,
}
OK = ("disaggregated", "threshold", "ok")
BROKEN_OFF = ("disaggregated", "threshold", "failed")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(
    smollm2: Up, tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Engines]:
    """At the end no engine may have anything in hand, nor a process be left."""
    made = planned(smollm2.plan["engines"][0]["argv"][0], tiny, tmp_path_factory.mktemp("killable"))
    async with made.running():
        yield made
        await at_rest([engine.url for engine in made.all], within=LEASE_SECONDS + PATIENCE_SECONDS)


class Case:
    """The engines behind a router of their own, and what a fault does to them."""

    def __init__(self, engines: Engines, endpoint: Endpoint, counter: PromptCounter) -> None:
        self.engines = engines
        self.endpoint = endpoint
        self.counter = counter

    @property
    def prefill(self) -> Sequence[Between]:
        return self.endpoint.prefill

    @property
    def decode(self) -> Sequence[Between]:
        return self.endpoint.decode

    def prompt(self, tokens: int = LONG, **more: Any) -> dict[str, Any]:
        """A request whose prompt nobody has sent before."""
        return {"prompt": fresh_prompt(self.counter, tokens), "max_tokens": 8, **more}

    async def ask(self, *, stream: bool = False) -> Sent:
        return await self.endpoint.ask(self.prompt(stream=stream))

    async def ask_two(self, *, stream: bool = False) -> list[Sent]:
        """Two requests at once: each role's engines get one each."""
        return await asyncio.gather(self.ask(stream=stream), self.ask(stream=stream))

    async def working(self, stands: Sequence[Between], kind: Kind) -> Between:
        """Wait until one of some engines computes a leg of this kind."""
        found: list[Between] = []

        async def look() -> bool:
            found[:] = [each for each in stands if each.under_way(kind) and await is_running(each.engine)]
            return bool(found)

        await until(look)
        return found[0]

    @asynccontextmanager
    async def hanging(self, stand: Between, kind: Kind) -> AsyncIterator[None]:
        """An engine hangs in the block. The time-out of each leg of this kind that it has, or gets, passes at
        once; at the end it answers again."""

        async def lose_patience() -> None:
            while True:
                for leg in stand.under_way(kind):
                    self.endpoint.lose_patience(leg)
                await asyncio.sleep(0.02)

        engine = self.engines.at(stand.engine)
        with engine.frozen():
            passing = asyncio.create_task(lose_patience())
            try:
                yield
            finally:
                passing.cancel()
                await asyncio.gather(passing, return_exceptions=True)
        await asyncio.to_thread(engine.wait)

    async def recovers(self) -> None:
        """All engines are in use: of four prompts at once each gets its share, and no leg fails."""
        await self.endpoint.proved()
        before = await self.endpoint.counted()
        legs = [each.seen("prefill") + each.seen("decode") for each in self.endpoint.between]
        answers = await asyncio.gather(*(self.ask() for _ in range(4)))
        assert [sent.is_whole for sent in answers] == [True] * 4
        assert await self.endpoint.counted() - before == Counter({OK: 4})
        now = [each.seen("prefill") + each.seen("decode") for each in self.endpoint.between]
        assert all(b > a for a, b in zip(legs, now, strict=True)), "an engine gets nothing any more"


@pytest_asyncio.fixture(loop_scope="module")
async def case(engines: Engines, counter: PromptCounter) -> AsyncIterator[Case]:
    urls = [[engine.url for engine in role] for role in (engines.prefill, engines.decode)]
    async with behind(*urls, counter, **FLAGS) as endpoint:
        made = Case(engines, endpoint, counter)
        yield made
        await made.recovers()
        await until(lambda: not endpoint.server.connections)
        assert await endpoint.in_hand() == []


def is_broken_off(sent: Sent) -> bool:
    """Whether the client can tell: an error event comes last, and the message has no end."""
    return sent.status == 200 and sent.broken is not None and "error" in json.loads(sent.events[-1])


async def test_killed_prefillers(case: Case) -> None:
    """One in the middle of its prefill, and then the other when its KV is about to be read."""
    async with case.endpoint.sending(case.prompt(CONTEXT - 1000, stream=True)) as sent:
        first = await case.working(case.prefill, "prefill")
        await case.engines.kill(first)
        await sent.task
    assert sent.is_whole
    (second,) = (each for each in case.prefill if each is not first)
    assert sent.headers["x-tandem-prefill-url"] == second.url
    # A leg on a kept connection is sent once more, and then meets a port that is closed.
    causes = ("closed", "connect")
    assert await case.endpoint.counted() in [Counter({OK: 1, ("prefill", cause): 1}) for cause in causes]

    for decoder in case.decode:
        decoder.holds.add("decode")
    async with case.endpoint.sending(case.prompt()) as sent:
        await until(lambda: any(decoder.under_way("decode") for decoder in case.decode))
        await case.engines.kill(second)
        for decoder in case.decode:
            decoder.holds.clear()
            decoder.go_on.set()
        await sent.task
    assert sent.is_whole
    assert sent.headers["x-tandem-path"] == "decode_only"
    await case.engines.revive(first, second)


async def test_killed_decoders(case: Case) -> None:
    """One before it has answered a byte, and then the other in the middle of a stream."""
    async with case.endpoint.sending(case.prompt(max_tokens=600)) as sent:
        first = await case.working(case.decode, "decode")
        await case.engines.kill(first)
        await sent.task
    assert sent.is_whole
    assert sum(each.seen("prefill") for each in case.prefill) == 2, "parameters are there for one decoder"
    expected = Counter({OK: 1, ("decode", "closed"): 1})
    assert await case.endpoint.counted() == expected

    (second,) = (each for each in case.decode if each is not first)
    async with case.endpoint.sending(case.prompt(max_tokens=2000, stream=True)) as sent:
        await until(lambda: sent.tokens >= 3)
        await case.engines.kill(second)
        await sent.task
    assert is_broken_off(sent)
    expected += Counter({BROKEN_OFF: 1, ("decode", "closed"): 1})
    assert await case.endpoint.counted() == expected

    await until(lambda: case.endpoint.app.fleet.unanswered is not None)
    refused = await case.ask()
    assert refused.status == 503
    assert int(refused.headers["retry-after"]) > 0
    assert await case.endpoint.counted() == expected + Counter({("none", "undecided", "failed"): 1})
    await case.engines.revive(first, second)


async def test_hung_prefillers(case: Case) -> None:
    async with case.hanging(case.prefill[0], "prefill"):
        for sent in await case.ask_two(stream=True):
            assert sent.is_whole
        expected = Counter({OK: 2, ("prefill", "head_timeout"): 1})
        assert await case.endpoint.counted() == expected
        async with case.hanging(case.prefill[1], "prefill"):
            sent = await case.ask()
        assert sent.is_whole
        expected += Counter({("decode_only", "prefill_failed", "ok"): 1, ("prefill", "head_timeout"): 2})
        assert await case.endpoint.counted() == expected


async def test_a_decoder_that_hangs_before_its_first_byte(case: Case) -> None:
    async with case.hanging(case.decode[0], "decode"):
        for sent in await case.ask_two(stream=True):
            assert sent.is_whole
        assert await case.endpoint.counted() == Counter({OK: 2, ("decode", "head_timeout"): 1})


async def test_a_decoder_that_hangs_in_the_middle_of_a_stream(case: Case) -> None:
    long = {"stream": True, "max_tokens": 1000}
    async with (
        case.endpoint.sending(case.prompt(**long)) as one,
        case.endpoint.sending(case.prompt(**long)) as other,
    ):
        await until(lambda: min(one.tokens, other.tokens) >= 3)
        async with case.hanging(case.decode[0], "decode"):
            await asyncio.wait([one.task, other.task])
    broken, whole = sorted((one, other), key=lambda sent: sent.is_whole)
    assert is_broken_off(broken)
    assert whole.is_whole
    assert await case.endpoint.counted() == Counter({OK: 1, BROKEN_OFF: 1, ("decode", "idle_timeout"): 1})


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engine_that_refuses_connections(case: Case, role: str) -> None:
    stand = getattr(case, role)[0]
    await stand.refuse()
    for sent in await case.ask_two():
        assert sent.is_whole
    assert await case.endpoint.counted() == Counter({OK: 2, (role, "connect"): 1})
    await stand.accept()


async def test_prefillers_that_answer_500(case: Case) -> None:
    case.prefill[0].answers["prefill"] = 500
    for sent in await case.ask_two():
        assert sent.is_whole
    expected = Counter({OK: 2, ("prefill", "status"): 1})
    assert await case.endpoint.counted() == expected
    case.prefill[1].answers["prefill"] = 500
    assert (await case.ask(stream=True)).is_whole
    expected += Counter({("decode_only", "prefill_failed", "ok"): 1, ("prefill", "status"): 2})
    assert await case.endpoint.counted() == expected
    for each in case.prefill:
        each.answers.clear()


async def test_decoders_that_answer_500(case: Case) -> None:
    case.decode[0].answers["decode"] = 500
    for sent in await case.ask_two():
        assert sent.is_whole
    expected = Counter({OK: 2, ("decode", "status"): 1})
    assert await case.endpoint.counted() == expected
    case.decode[1].answers["decode"] = 500
    assert (await case.ask(stream=True)).is_whole
    expected += Counter({("decode_only", "handoff_failed", "ok"): 1, ("decode", "status"): 2})
    assert await case.endpoint.counted() == expected
    for each in case.decode:
        each.answers.clear()


def lost(answer: dict[str, Any]) -> None:
    answer["kv_transfer_params"] = None


def of_another_process(answer: dict[str, Any]) -> None:
    """As of the one that ran at this address before: it had an engine id of its own."""
    answer["kv_transfer_params"]["remote_engine_id"] = str(uuid.uuid4())


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("edit", "role", "streamed", "whole"),
    [
        (lost, "prefill", "no_kv_params", "no_kv_params"),
        (of_another_process, "decode", "in_band_error", "status"),
    ],
)
async def test_parameters_of_a_hand_off_that_are_lost_or_stale(
    case: Case, edit: Callable[[dict[str, Any]], None], role: str, streamed: str, whole: str, stream: bool
) -> None:
    case.prefill[0].edits = edit
    for sent in await case.ask_two(stream=stream):
        assert sent.is_whole
    assert await case.endpoint.counted() == Counter({OK: 2, (role, streamed if stream else whole): 1})
    case.prefill[0].edits = None
