"""One streamed chat request to a vLLM engine or a router, with its tokens, timed by the client's clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from tandem.bench.stream import chat_stream, choices_of, delta_of

LIKELY = 5
"""Tokens whose probabilities are asked for: enough to find the other one of a tie, even of three."""


@dataclass
class TimedAnswer:
    """What came back and when. Times are seconds."""

    headers: Mapping[str, str]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    likely: list[dict[int, float]] = field(default_factory=list)
    """For each token, the likeliest token ids with their log probabilities."""
    prompt_tokens: int = 0
    ttft: float = 0.0
    gaps: list[float] = field(default_factory=list)


async def timed_chat(
    client: httpx.AsyncClient,
    url: str,
    body: Mapping[str, Any],
    *,
    headers: Mapping[str, str] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> TimedAnswer:
    """POST a chat request as a stream and time its events.

    Token ids and the likeliest tokens' ids are asked for as vLLM extensions. Raises RequestFailed for an
    error status or an error event, httpx.HTTPError when the connection breaks.
    """
    request = {
        **body,
        "return_token_ids": True,
        "logprobs": True,
        "top_logprobs": LIKELY,
        "return_tokens_as_token_ids": True,
    }
    sent = clock()
    async with chat_stream(client, url, request, headers) as stream:
        answer = TimedAnswer(stream.headers)
        last: float | None = None
        async for event in stream.events():
            if event.get("usage"):
                answer.prompt_tokens = event["usage"]["prompt_tokens"]
            if _add_tokens(answer, choices_of(event)):
                now = clock()
                if last is None:
                    answer.ttft = now - sent
                else:
                    answer.gaps.append(now - last)
                last = now
    return answer


def _add_tokens(answer: TimedAnswer, choices: list[dict[str, Any]]) -> bool:
    """Add an event's tokens to an answer; whether it had any."""
    added = False
    for choice in choices:
        answer.text += delta_of(choice).get("content") or ""
        ids = choice.get("token_ids") or []
        answer.token_ids += ids
        added = added or bool(ids)
        for position in (choice.get("logprobs") or {}).get("content") or []:
            answer.likely.append(
                {int(t["token"].removeprefix("token_id:")): t["logprob"] for t in position["top_logprobs"]}
            )
    return added
