"""KV events: for the same requests the simulated pair publishes what the real one does, in the same way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
import pytest_asyncio

from tandem.prompt import PromptCounter

from .answers import fresh_prompt
from .cases import completion
from .conftest import KV_BLOCKS
from .kv_events import END, Batch, Subscriber, replayed, subscribed
from .pairs import Both, Pair

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK = 128
ROLES = ("prefill", "decode")

Heard = dict[str, Subscriber]
"""Role → the subscriber of one pair's engine."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def heard(both: Both, counter: PromptCounter) -> AsyncIterator[tuple[Heard, Heard]]:
    """Subscribers of (the real pair, the simulated one), whose caches are full of the same prompts, so that
    what comes after them evicts the same."""
    fill = [fresh_prompt(counter, 1800) for _ in range(-(-KV_BLOCKS * BLOCK // 1800))]

    async def filled(pair: Pair) -> None:
        for prompt in fill:
            await pair.hand_off(prompt)

    async with AsyncExitStack() as stack:

        async def subscriber(pair: Pair, engine: str) -> Subscriber:
            async def touch() -> list[int]:
                marker = fresh_prompt(counter, BLOCK)
                await pair.post(engine, completion([*marker, 1], max_tokens=1))
                return marker

            return await stack.enter_async_context(subscribed(pair.events[engine], touch))

        real, simulated = [
            {role: await subscriber(pair, getattr(pair, role)) for role in ROLES} for pair in both.pairs
        ]
        await asyncio.gather(*map(filled, both.pairs))
        for one in (*real.values(), *simulated.values()):
            await one.until_now()
        yield real, simulated


Scenario = Callable[[Pair, list[int]], Awaitable[Any]]
"""Requests to a pair, with a prompt of 700 tokens that no engine has seen."""


async def a_prompt(pair: Pair, prompt: list[int]) -> None:
    await pair.post(pair.decode, completion(prompt[:300]))


async def a_prompt_again(pair: Pair, prompt: list[int]) -> None:
    for _ in range(2):
        await a_prompt(pair, prompt)


async def a_prompt_of_less_than_a_block(pair: Pair, prompt: list[int]) -> None:
    await pair.post(pair.decode, completion(prompt[:9]))


async def a_prompt_that_goes_on(pair: Pair, prompt: list[int]) -> None:
    """The new blocks name the last of the cached ones as their parent."""
    await pair.post(pair.decode, completion(prompt[:200]))
    await pair.post(pair.decode, completion(prompt[:400]))


async def a_prompt_in_chunks(pair: Pair, prompt: list[int]) -> None:
    await pair.post(pair.decode, completion(prompt))


async def an_answer_that_fills_a_block(pair: Pair, prompt: list[int]) -> None:
    await pair.post(pair.decode, completion(prompt[: BLOCK - 3], max_tokens=8))


async def salted_prompts(pair: Pair, prompt: list[int]) -> None:
    for salt in ("one", "two"):
        await pair.post(pair.decode, completion(prompt[:300], cache_salt=salt))


async def a_hand_off(pair: Pair, prompt: list[int]) -> None:
    await pair.hand_off(prompt[:300])


async def a_hand_off_of_whole_blocks(pair: Pair, prompt: list[int]) -> None:
    await pair.hand_off(prompt[: 2 * BLOCK])


async def a_hand_off_of_what_is_partly_cached(pair: Pair, prompt: list[int]) -> None:
    await pair.hand_off(prompt[:200])
    await pair.hand_off(prompt[:400])


SCENARIOS: list[Scenario] = [
    a_prompt,
    a_prompt_again,
    a_prompt_of_less_than_a_block,
    a_prompt_that_goes_on,
    a_prompt_in_chunks,
    an_answer_that_fills_a_block,
    salted_prompts,
    a_hand_off,
    a_hand_off_of_whole_blocks,
    a_hand_off_of_what_is_partly_cached,
]


async def events_of(
    scenario: Scenario, pair: Pair, heard: Heard, prompt: list[int]
) -> dict[str, list[Batch]]:
    """Role → what its engine published."""
    await scenario(pair, prompt)
    return {role: await subscriber.until_now() for role, subscriber in heard.items()}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
async def test_requests_make_the_same_events(
    both: Both, heard: tuple[Heard, Heard], counter: PromptCounter, scenario: Scenario
) -> None:
    prompt = fresh_prompt(counter, 700)
    real, simulated = await asyncio.gather(
        *(events_of(scenario, *pair, prompt) for pair in zip(both.pairs, heard, strict=True))
    )
    for role in ROLES:
        assert [batch.shape for batch in real[role]] == [batch.shape for batch in simulated[role]]


async def test_events_tell_the_prompts_tokens_block_by_block(
    both: Both, heard: tuple[Heard, Heard], counter: PromptCounter
) -> None:
    prompt = fresh_prompt(counter, 700)
    for pair, subscribers in zip(both.pairs, heard, strict=True):
        batches = (await events_of(a_hand_off, pair, subscribers, prompt))["decode"]
        events = [e for batch in batches for e in batch.events if e["type"] == "BlockStored"]
        assert [token for event in events for token in event["token_ids"]] == prompt[: 2 * BLOCK]
        assert {event["block_size"] for event in events} == {BLOCK}


async def test_hashes_are_each_engines_own(
    both: Both, heard: tuple[Heard, Heard], counter: PromptCounter
) -> None:
    """So their values cannot be compared: those of two real engines differ too."""
    prompt = fresh_prompt(counter, 700)
    hashes = []
    for pair, subscribers in zip(both.pairs, heard, strict=True):
        batches = await events_of(a_hand_off, pair, subscribers, prompt)
        stored = [e for b in batches["decode"] for e in b.events if e["type"] == "BlockStored"]
        hashes.append({block_hash for event in stored for block_hash in event["block_hashes"]})
        assert len(hashes[-1]) == 2
    assert not hashes[0] & hashes[1]


async def test_missed_events_are_replayed_alike(
    both: Both, heard: tuple[Heard, Heard], counter: PromptCounter
) -> None:
    prompt = fresh_prompt(counter, 700)
    for pair, subscribers in zip(both.pairs, heard, strict=True):
        batches = (await events_of(a_prompt_in_chunks, pair, subscribers, prompt))["decode"]
        assert [b.sequence for b in batches] == list(range(batches[0].sequence, batches[-1].sequence + 1))
        source = pair.events[pair.decode]
        *answer, end = await replayed(source, batches[0].sequence)
        assert end == [b"", b"", END, b""]
        assert [tuple(frames) for frames in answer[: len(batches)]] == [(b"", *b.frames) for b in batches]
        assert await replayed(source, 10**9) == [[b"", b"", END, b""]]


async def test_new_blocks_push_out_the_oldest(
    both: Both, heard: tuple[Heard, Heard], counter: PromptCounter
) -> None:
    """The full caches hold the same prompts, so the same blocks go."""
    prompt = fresh_prompt(counter, 700)
    real, simulated = await asyncio.gather(
        *(events_of(a_prompt_in_chunks, *pair, prompt) for pair in zip(both.pairs, heard, strict=True))
    )
    removed = [
        [e for batch in pair["decode"] for e in batch.shape["events"] if e["type"] == "BlockRemoved"]
        for pair in (real, simulated)
    ]
    assert len(removed[0]) >= 5
    assert removed[0] == removed[1]
    assert not any("stored before" in event["block_hashes"] for event in removed[0])
