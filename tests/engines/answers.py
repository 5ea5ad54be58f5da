"""Greedy completions of real engines, compared token for token."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from tandem.bench.chat import LIKELY
from tandem.bench.equality import Comparison, compare
from tandem.prompt import PromptCounter

_WORDS = [
    "the",
    "of",
    "river",
    "stone",
    "garden",
    "seven",
    "bright",
    "machine",
    "winter",
    "letter",
    "paper",
    "ocean",
    "under",
    "silver",
    "road",
    "question",
    "and",
    "it",
    "was",
    "found",
    "that",
    "every",
    "harbour",
    "keeps",
    "a",
    "book",
    "of",
    "names",
]


@dataclass(frozen=True)
class Greedy:
    """One greedy answer: its token ids, and for each the likeliest ids with their log probabilities."""

    ids: list[int]
    likely: list[dict[int, float]]
    prompt_tokens: int
    headers: httpx.Headers


def fresh_prompt(counter: PromptCounter, tokens: int) -> list[int]:
    """A prompt of exactly so many token ids that no engine has seen."""
    rnd = random.Random(secrets.token_bytes(16))
    text = secrets.token_hex(8) + " " + " ".join(rnd.choice(_WORDS) for _ in range(tokens))
    return counter.completion({"prompt": text}).ids[:tokens]


async def greedy(
    client: httpx.AsyncClient, url: str, prompt: list[int], *, max_tokens: int = 32, **fields: Any
) -> Greedy:
    """Complete a prompt at temperature 0, to the full length."""
    body = {
        "model": "smollm2",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": LIKELY,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        **fields,
    }
    answer = await client.post(f"{url}/v1/completions", json=body, headers={"x-tandem-explain": "1"})
    assert answer.status_code == 200, answer.text
    data = answer.json()
    choice = data["choices"][0]
    likely = [
        {int(token.removeprefix("token_id:")): logprob for token, logprob in top.items()}
        for top in choice["logprobs"]["top_logprobs"]
    ]
    return Greedy(choice["token_ids"], likely, data["usage"]["prompt_tokens"], answer.headers)


def judge(answer: Greedy, reference: Greedy, what: str) -> Comparison:
    """Compare by the tie rule, and say on the test's output what was seen."""
    same = compare(answer.ids, reference.ids, reference.likely)
    print(f"{what}: {same}")
    return same


async def right_at_once(
    client: httpx.AsyncClient,
    router: str,
    decoder: str,
    counter: PromptCounter,
    lengths: Sequence[int],
    *,
    threshold: int,
) -> None:
    """Prompts of so many tokens, all at once: each takes its path, and is answered as by the decoder."""
    prompts = [fresh_prompt(counter, n) for n in lengths]
    answers = await asyncio.gather(*(greedy(client, router, p, max_tokens=16) for p in prompts))
    for n, prompt, answer in zip(lengths, prompts, answers, strict=True):
        expected = "disaggregated" if n >= threshold else "decode_only"
        assert answer.headers["x-tandem-path"] == expected
        reference = await greedy(client, decoder, prompt, max_tokens=16, cache_salt="alone")
        assert judge(answer, reference, f"{n} tokens, {expected}").acceptable
