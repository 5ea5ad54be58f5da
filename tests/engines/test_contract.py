"""A client cannot tell the simulator from vLLM: the same requests, sent to a real pair and to a simulated
one that was started with the same command lines, are answered alike. What may differ is
`contract.DIFFERENCES`."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tandem.prompt import PromptCounter
from tandem.sim import EngineSpec, Fleet, parse
from tandem.sim.faults import KINDS
from tandem.sim.faults import parse as parse_faults

from . import contract
from .answers import fresh_prompt
from .conftest import Up
from .contract import CASES, COMPLETION, DIFFERENCES, Case, Seen, chat, completion

pytestmark = pytest.mark.asyncio(loop_scope="module")

COUNTED_WITHIN_SECONDS = 5.0
"""An engine writes its counters a little after its answer."""
REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass
class Pair:
    """A prefiller and a decoder, by their URLs."""

    client: httpx.AsyncClient
    prefill: str
    decode: str

    async def post(self, engine: str, body: dict[str, Any], path: str = COMPLETION) -> httpx.Response:
        return await contract.send(self.client, engine, Case("", "POST", path, body))

    async def metrics(self, engine: str) -> str:
        return (await self.client.get(f"{engine}/metrics")).text


@dataclass
class Both:
    """The real pair, the simulated one, and what was seen of them."""

    real: Pair
    simulated: Pair
    covered: set[tuple[str, str]] = field(default_factory=set)
    """The patterns of `DIFFERENCES` that were needed."""
    answered: dict[str, tuple[Seen, Seen]] = field(default_factory=dict)

    async def answers(self, case: Case) -> tuple[Seen, Seen]:
        """(real, simulated) to the case, which is sent once."""
        if case.name not in self.answered:
            answers = [
                await contract.send(pair.client, pair.decode, case) for pair in (self.real, self.simulated)
            ]
            self.answered[case.name] = self.seen(*answers)
        return self.answered[case.name]

    def seen(self, real: httpx.Response, simulated: httpx.Response) -> tuple[Seen, Seen]:
        return contract.seen(real, self.covered), contract.seen(simulated, set())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both(smollm2: Up) -> AsyncIterator[Both]:
    specs = [EngineSpec(parse(engine["argv"])) for engine in smollm2.plan["engines"]]
    roles = [engine["role"] for engine in smollm2.plan["engines"]]
    limits = httpx.Limits(keepalive_expiry=2.0)  # gives connections up before vLLM does
    async with (
        Fleet(specs, environment={}) as fleet,
        httpx.AsyncClient(timeout=60.0, limits=limits, trust_env=False) as client,
    ):
        urls = dict(zip(roles, fleet.urls, strict=True))
        yield Both(
            Pair(client, smollm2.prefill[0], smollm2.decode[0]),
            Pair(client, urls["prefill"], urls["decode"]),
        )


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_a_request_is_answered_alike(both: Both, case: Case) -> None:
    real, simulated = await both.answers(case)
    assert not contract.unequal(vars(real), vars(simulated))


# Requests that belong together: answers, and what they add to the engines' counters


Scenario = Callable[[Pair, list[int]], Awaitable[list[httpx.Response]]]
"""(pair, a prompt that no engine has seen) → the answers."""


async def alone(pair: Pair, prompt: list[int]) -> list[httpx.Response]:
    """A decoder computes the prompt, and the second time has most of it in its cache."""
    return [await pair.post(pair.decode, completion(prompt)) for _ in range(2)]


async def alone_with_choices(pair: Pair, prompt: list[int]) -> list[httpx.Response]:
    return [await pair.post(pair.decode, completion(prompt, n=2, temperature=1, max_tokens=4))]


async def alone_and_salted(pair: Pair, prompt: list[int]) -> list[httpx.Response]:
    """A salt keeps the cache of one tenant from another."""
    return [await pair.post(pair.decode, completion(prompt, cache_salt=salt)) for salt in ("one", "two")]


async def hand_off(pair: Pair, prompt: list[int]) -> list[httpx.Response]:
    prefill, params = await _prefill(pair, completion(prompt))
    decode = await pair.post(pair.decode, completion(prompt, max_tokens=8, kv_transfer_params=params))
    return [prefill, decode]


async def hand_off_of_a_streamed_chat(pair: Pair, prompt: list[int]) -> list[httpx.Response]:
    body = chat(" ".join(map(str, prompt[:100])))
    prefill, params = await _prefill(pair, body, contract.CHAT)
    more = {"stream": True, "stream_options": contract.USAGE, "kv_transfer_params": params}
    return [prefill, await pair.post(pair.decode, {**body, **more}, contract.CHAT)]


async def hand_off_of_less_than_a_block(pair: Pair, prompt: list[int]) -> list[httpx.Response]:
    return await hand_off(pair, prompt[:9])


async def hand_off_to_the_wrong_engine(
    pair: Pair, prompt: list[int], *, stream: bool = True
) -> list[httpx.Response]:
    """The decoder fails the request and lives on: the right parameters still work."""
    prefill, params = await _prefill(pair, completion(prompt))
    wrong = {**params, "remote_engine_id": secrets.token_hex(8)}
    failed = await pair.post(pair.decode, completion(prompt, kv_transfer_params=wrong, stream=stream))
    return [prefill, failed, await pair.post(pair.decode, completion(prompt, kv_transfer_params=params))]


async def hand_off_that_is_refused(pair: Pair, prompt: list[int]) -> list[httpx.Response]:
    """The prefiller need not keep the KV of a request that the decoder did not take."""
    prefill, params = await _prefill(pair, completion(prompt))
    refused = completion(prompt, model="nope", kv_transfer_params=params)
    return [prefill, await pair.post(pair.decode, refused)]


async def _prefill(
    pair: Pair, body: dict[str, Any], path: str = COMPLETION
) -> tuple[httpx.Response, dict[str, Any]]:
    answer = await pair.post(
        pair.prefill, {**body, "max_tokens": 1, "kv_transfer_params": REMOTE_DECODE}, path
    )
    return answer, answer.json()["kv_transfer_params"]


SCENARIOS: list[Scenario] = [
    alone,
    alone_with_choices,
    alone_and_salted,
    hand_off,
    hand_off_of_a_streamed_chat,
    hand_off_of_less_than_a_block,
    hand_off_to_the_wrong_engine,
    hand_off_that_is_refused,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
async def test_requests_add_alike(both: Both, counter: PromptCounter, scenario: Scenario) -> None:
    """Answers are alike, and so is what the pairs count: requests, prompt tokens by source, cache hits."""
    prompt = fresh_prompt(counter, 300)
    pairs = (both.real, both.simulated)
    engines = [(pair, engine) for pair in pairs for engine in (pair.prefill, pair.decode)]
    before = [contract.samples(await pair.metrics(engine)) for pair, engine in engines]
    answers = [await scenario(pair, prompt) for pair in pairs]
    for real, simulated in [both.seen(*answer) for answer in zip(*answers, strict=True)]:
        assert not contract.unequal(vars(real), vars(simulated))

    deadline = time.monotonic() + COUNTED_WITHIN_SECONDS
    while True:
        covered: set[tuple[str, str]] = set()
        grown = [
            contract.growth(old, contract.samples(await pair.metrics(engine)))
            for old, (pair, engine) in zip(before, engines, strict=True)
        ]
        wrong = [
            contract.unexpected("growth", contract.unequal(*of_a_role), covered)
            for of_a_role in zip(grown[:2], grown[2:], strict=True)
        ]
        if (any(grown) and not any(wrong)) or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.1)
    both.covered |= covered
    assert any(grown)
    assert wrong == [{}, {}]


async def test_metrics_have_the_same_names_types_and_labels(both: Both) -> None:
    await both.answers(CASES[0])  # what counts HTTP requests shows up with the first
    for real, simulated in (
        (both.real.prefill, both.simulated.prefill),
        (both.real.decode, both.simulated.decode),
    ):
        catalogues = [contract.catalogue(await both.real.metrics(engine)) for engine in (real, simulated)]
        assert sorted(catalogues[0]) == sorted(catalogues[1])
        differing = {
            n: (old, catalogues[1][n]) for n, old in catalogues[0].items() if old != catalogues[1][n]
        }
        assert not contract.unexpected("metrics", differing, both.covered)


# The written list


async def test_everything_on_the_list_is_needed(both: Both, counter: PromptCounter) -> None:
    for case in CASES:
        await both.answers(case)
    for scenario in (alone, hand_off, hand_off_to_the_wrong_engine):
        await test_requests_add_alike(both, counter, scenario)
    await test_metrics_have_the_same_names_types_and_labels(both)
    assert {pattern for d in DIFFERENCES for pattern in d.patterns()} == both.covered


async def test_a_failed_hand_off_is_told_alike(both: Both, counter: PromptCounter) -> None:
    """Not counted: after the 500 vLLM shakes hands once more, in its own time, to give the KV back."""
    prompt = fresh_prompt(counter, 300)
    answers = [
        await hand_off_to_the_wrong_engine(pair, prompt, stream=False) for pair in (both.real, both.simulated)
    ]
    for real, simulated in [both.seen(*answer) for answer in zip(*answers, strict=True)]:
        assert not contract.unequal(vars(real), vars(simulated))


async def test_the_page_shows_the_list() -> None:
    page = contract.PAGE.read_text("utf-8")
    assert contract.updated(page) == page, "run python tests/engines/contract.py"


async def test_the_page_shows_every_kind_of_fault() -> None:
    shown = contract.faults_shown(contract.PAGE.read_text("utf-8"))
    for fault in shown:
        parse_faults(fault, whole_engine=True)
    assert {parse_faults(fault, whole_engine=True)[0].kind for fault in shown} == set(KINDS)
