"""A disaggregated answer is the answer that the decoder alone would have given."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tandem.bench.scrape import scrape
from tandem.prompt import PromptCounter

from .answers import fresh_prompt, greedy, judge, right_at_once
from .conftest import Up

BLOCK_TOKENS = 128
"""vLLM's block size on CPU."""


LONG = [pytest.param(tokens, marks=pytest.mark.slow) for tokens in (1800, 3000)]


@pytest.mark.parametrize("tokens", [30, 300, 900, *LONG])
async def test_disaggregated_equals_alone(
    smollm2: Up, always: str, client: httpx.AsyncClient, counter: PromptCounter, tokens: int
) -> None:
    prompt = fresh_prompt(counter, tokens)
    answer = await greedy(client, always, prompt)
    assert answer.headers["x-tandem-path"] == "disaggregated"
    assert answer.headers["x-tandem-prompt-tokens"] == str(answer.prompt_tokens) == str(tokens)
    reference = await greedy(client, smollm2.decode[0], prompt, cache_salt="alone")
    assert len(answer.ids) == 32
    assert judge(answer, reference, f"{tokens} tokens").acceptable


@pytest.mark.parametrize("blocks", [1, 3, 8])
async def test_whole_blocks_and_one_token_are_bit_equal_to_a_prefix_hit(
    smollm2: Up, always: str, client: httpx.AsyncClient, counter: PromptCounter, blocks: int
) -> None:
    """An engine that has the prefix in its own cache computes one token, as the decoder does after the
    hand-off. The prefiller is such an engine, and its cache is what was handed over: no bit may differ."""
    prompt = fresh_prompt(counter, blocks * BLOCK_TOKENS + 1)
    answer = await greedy(client, always, prompt)
    assert answer.headers["x-tandem-path"] == "disaggregated"
    before = await scrape(client, smollm2.prefill[0])
    reference = await greedy(client, smollm2.prefill[0], prompt)
    assert answer.ids == reference.ids
    assert answer.likely == reference.likely
    while not (grown := (await scrape(client, smollm2.prefill[0])).since(before)).prompt_tokens:
        await asyncio.sleep(0.1)  # an engine writes its counters a little after its answer
    assert (grown.cached_tokens, grown.computed_tokens) == (blocks * BLOCK_TOKENS, 1)


async def test_the_decoders_own_prefix_hit_gives_the_same_tokens(
    smollm2: Up, always: str, client: httpx.AsyncClient, counter: PromptCounter
) -> None:
    """The decoder fills its cache in other batch shapes than the prefiller: equal by the tie rule."""
    prompt = fresh_prompt(counter, 4 * BLOCK_TOKENS + 1)
    answer = await greedy(client, always, prompt)
    await greedy(client, smollm2.decode[0], prompt, max_tokens=1, cache_salt="cached")
    reference = await greedy(client, smollm2.decode[0], prompt, cache_salt="cached")
    assert judge(answer, reference, "a prefix hit on the decoder").acceptable


async def test_eight_mixed_requests_at_once_are_all_right(
    smollm2: Up, client: httpx.AsyncClient, counter: PromptCounter
) -> None:
    lengths = [20, 1100, 60, 200, 1030, 40, 1025, 300]
    await right_at_once(client, smollm2.url, smollm2.decode[0], counter, lengths, threshold=1024)
