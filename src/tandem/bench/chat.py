"""One streamed chat request, timed by the client's clock."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

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


class RequestFailed(Exception):
    """The endpoint answered with an error; the message holds it."""


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
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "logprobs": True,
        "top_logprobs": LIKELY,
        "return_tokens_as_token_ids": True,
    }
    sent = clock()
    async with client.stream("POST", f"{url}/v1/chat/completions", json=request, headers=headers) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode("utf-8", "replace")
            raise RequestFailed(f"{url} answered HTTP {response.status_code}: {text[:500]}")
        answer = TimedAnswer(response.headers)
        last: float | None = None
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RequestFailed(f"{url} ended its stream with {event['error']}")
            if event.get("usage"):
                answer.prompt_tokens = event["usage"]["prompt_tokens"]
            if _add_tokens(answer, event.get("choices", [])):
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
        answer.text += choice.get("delta", {}).get("content") or ""
        ids = choice.get("token_ids") or []
        answer.token_ids += ids
        added = added or bool(ids)
        for position in (choice.get("logprobs") or {}).get("content") or []:
            answer.likely.append(
                {int(t["token"].removeprefix("token_id:")): t["logprob"] for t in position["top_logprobs"]}
            )
    return added
