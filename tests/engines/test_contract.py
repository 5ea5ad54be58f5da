"""A client cannot tell the simulator from vLLM: the same requests, sent to a real pair and to a simulated
one that was started with the same command lines, are answered alike. What may differ is
`contract.DIFFERENCES`."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable

import httpx
import pytest

from tandem.prompt import PromptCounter
from tandem.sim.faults import KINDS
from tandem.sim.faults import parse as parse_faults

from . import contract
from .answers import fresh_prompt
from .cases import CASES, CHAT, COMPLETION, USAGE, Case, chat, completion
from .contract import DIFFERENCES
from .pairs import REMOTE_DECODE, Both, Pair

pytestmark = pytest.mark.asyncio(loop_scope="module")

COUNTED_WITHIN_SECONDS = 20.0
"""An engine writes its counters a little after its answer, and those of a prompt after the step that computes
it, even when the client has left."""


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
    return await pair.hand_off(prompt)


async def hand_off_of_a_streamed_chat(pair: Pair, prompt: list[int]) -> list[httpx.Response]:
    body = chat(" ".join(map(str, prompt[:100])))
    prefill, params = await pair.prefill_leg(body, CHAT)
    more = {"stream": True, "stream_options": USAGE, "kv_transfer_params": params}
    return [prefill, await pair.post(pair.decode, {**body, **more}, CHAT)]


async def hand_off_of_less_than_a_block(pair: Pair, prompt: list[int]) -> list[httpx.Response]:
    return await hand_off(pair, prompt[:9])


async def hand_off_to_the_wrong_engine(
    pair: Pair, prompt: list[int], *, stream: bool = True
) -> list[httpx.Response]:
    """The decoder fails the request and lives on: the right parameters still work."""
    prefill, params = await pair.prefill_leg(completion(prompt))
    wrong = {**params, "remote_engine_id": secrets.token_hex(8)}
    failed = await pair.post(pair.decode, completion(prompt, kv_transfer_params=wrong, stream=stream))
    return [prefill, failed, await pair.post(pair.decode, completion(prompt, kv_transfer_params=params))]


async def hand_off_that_is_refused(pair: Pair, prompt: list[int]) -> list[httpx.Response]:
    """The prefiller need not keep the KV of a request that the decoder did not take."""
    prefill, params = await pair.prefill_leg(completion(prompt))
    refused = completion(prompt, model="nope", kv_transfer_params=params)
    return [prefill, await pair.post(pair.decode, refused)]


async def a_client_that_leaves_before_its_answer(pair: Pair, prompt: list[int]) -> list[httpx.Response]:
    """No request is counted as finished. The second prompt shares nothing with the first: how much of that an
    engine had computed, and finds in its cache, is a matter of milliseconds."""
    await _leave(pair, pair.decode, completion(prompt * 8))
    await _leave(pair, pair.decode, completion([prompt[1], *prompt * 8], stream=True))
    return []


async def a_client_that_leaves_the_prefill_leg(pair: Pair, prompt: list[int]) -> list[httpx.Response]:
    await _leave(pair, pair.prefill, completion(prompt * 4, max_tokens=1, kv_transfer_params=REMOTE_DECODE))
    return []


async def _leave(pair: Pair, engine: str, body: dict[str, object]) -> None:
    """Once the engine computes the prompt, or well within the time that this takes: one that does so in a
    single step only tells of it afterwards. Then wait until the engine has nothing to do."""
    answer = asyncio.create_task(pair.client.post(f"{engine}{COMPLETION}", json=body))
    for _ in range(20):
        if "vllm:num_requests_running" in contract.busy(await pair.metrics(engine)):
            break
        await asyncio.sleep(0.02)
    answer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answer
    await idle(pair, engine)


async def idle(pair: Pair, engine: str) -> None:
    async with asyncio.timeout(COUNTED_WITHIN_SECONDS):
        while contract.busy(await pair.metrics(engine)):
            await asyncio.sleep(0.05)


SCENARIOS: list[Scenario] = [
    alone,
    alone_with_choices,
    alone_and_salted,
    hand_off,
    hand_off_of_a_streamed_chat,
    hand_off_of_less_than_a_block,
    hand_off_to_the_wrong_engine,
    hand_off_that_is_refused,
    a_client_that_leaves_before_its_answer,
    a_client_that_leaves_the_prefill_leg,
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
            contract.unexpected(contract.unequal(*of_a_role), covered)
            for of_a_role in zip(grown[:2], grown[2:], strict=True)
        ]
        if (any(grown) and not any(wrong)) or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.1)
    both.covered |= covered
    assert any(grown)
    assert wrong == [{}, {}]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_that_leaves_mid_answer_is_let_go(
    both: Both, counter: PromptCounter, stream: bool
) -> None:
    """How many tokens there are until then differs; what is counted of the request does not."""
    prompt = fresh_prompt(counter, 300)
    counted = []
    for pair in both.pairs:
        before = contract.samples(await pair.metrics(pair.decode))
        body = completion(prompt, max_tokens=2000, stream=stream)
        leaving = asyncio.create_task(pair.post(pair.decode, body))
        async with asyncio.timeout(30):
            while True:
                text = await pair.metrics(pair.decode)
                grown = contract.growth(before, contract.samples(text))
                if grown.get("vllm:generation_tokens_total", 0) >= 3:
                    break
                await asyncio.sleep(0.05)
        assert contract.busy(text).keys() == {"vllm:num_requests_running", "vllm:kv_cache_usage_perc"}
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await idle(pair, pair.decode)
        counted.append(set(contract.growth(before, contract.samples(await pair.metrics(pair.decode)))))
    assert counted[0] == counted[1]
    assert not any("request_success" in name for name in counted[0])


async def test_metrics_have_the_same_names_types_and_labels(both: Both) -> None:
    await both.answers(CASES[0])  # what counts HTTP requests shows up with the first
    for real, simulated in both.roles.values():
        catalogues = [contract.catalogue(await both.real.metrics(engine)) for engine in (real, simulated)]
        assert not contract.unequal(*catalogues)


# The written list


async def test_everything_on_the_list_is_needed(both: Both, counter: PromptCounter) -> None:
    for case in CASES:
        await both.answers(case)
    for scenario in (alone, hand_off, hand_off_to_the_wrong_engine):
        await test_requests_add_alike(both, counter, scenario)
    listed = {pattern for d in DIFFERENCES for pattern in d.patterns()}
    tested_elsewhere = {pattern for pattern in listed if pattern[0] == "events"}
    sometimes = {pattern for d in DIFFERENCES if d.sometimes for pattern in d.patterns()}
    assert listed - tested_elsewhere - sometimes <= both.covered <= listed


async def test_a_failed_hand_off_is_told_alike(both: Both, counter: PromptCounter) -> None:
    """Not counted: after the 500 vLLM shakes hands once more, in its own time, to give the KV back."""
    prompt = fresh_prompt(counter, 300)
    answers = [
        await hand_off_to_the_wrong_engine(pair, prompt, stream=False) for pair in (both.real, both.simulated)
    ]
    for real, simulated in [both.seen(*answer) for answer in zip(*answers, strict=True)]:
        assert not contract.unequal(vars(real), vars(simulated))


@pytest.mark.table
async def test_the_page_shows_the_list(documented: Callable[[str, str, str], None]) -> None:
    documented(contract.PAGE.name, "differences", contract.table())


async def test_the_page_shows_every_kind_of_fault() -> None:
    shown = contract.faults_shown(contract.PAGE.read_text("utf-8"))
    for fault in shown:
        parse_faults(fault, whole_engine=True)
    assert {parse_faults(fault, whole_engine=True)[0].kind for fault in shown} == set(KINDS)
