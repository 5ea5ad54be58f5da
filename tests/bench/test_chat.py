"""A streamed answer, timed: what came, when, and what an error says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tandem.bench.chat import TimedAnswer, timed_chat
from tandem.bench.stream import RequestFailed
from tandem.http import Request, Responder, serve

from .fakes import SSE, answering, event, token_event

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


async def ask(
    *parts: bytes, status: int = 200, clock: Iterator[float] | None = None, **options: Any
) -> TimedAnswer:
    """The answer to a request that is answered with these bytes."""
    async with answering(status, *parts) as url, httpx.AsyncClient(trust_env=False) as client:
        ticks = clock or iter(range(100))
        return await timed_chat(client, url, BODY, clock=lambda: next(ticks), **options)


DONE = b"data: [DONE]\n\n"
USAGE = event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}})


async def test_tokens_text_and_usage_are_collected() -> None:
    answer = await ask(token_event(5, 1.5), token_event(9, 0.25), USAGE, DONE)
    assert answer.text == "It Paris."
    assert answer.token_ids == [5, 9]
    assert answer.likely == [{5: -0.1, 4: -1.6}, {9: -0.1, 8: -0.35}]
    assert answer.prompt_tokens == 7
    assert answer.headers["content-type"] == "text/event-stream"


async def test_times_are_those_of_tokens_not_of_other_events() -> None:
    role = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "usage": None})
    clock = iter([10.0, 10.5, 10.75, 11.75])  # sent, and one look for each event with tokens
    parts = (role, token_event(5, 1), b": a comment\n\n", token_event(7, 1), token_event(9, 1), USAGE, DONE)
    answer = await ask(*parts, clock=clock)
    assert answer.ttft == 0.5
    assert answer.gaps == [0.25, 1.0]


async def test_a_token_without_text_counts() -> None:
    answer = await ask(token_event(5, 1, text=""), token_event(7, 1), DONE)
    assert (answer.token_ids, answer.text, len(answer.gaps)) == ([5, 7], "is ", 1)


async def test_an_error_status_is_told_with_the_answer() -> None:
    with pytest.raises(RequestFailed, match=r"http://127\.0\.0\.1:\d+ answered HTTP 404: no such model"):
        await ask(b"no such model", status=404)


async def test_an_error_in_the_stream_is_told() -> None:
    with pytest.raises(RequestFailed, match=r"ended its stream with .*KV load failed"):
        await ask(token_event(5, 1), event({"error": {"message": "KV load failed"}}))


async def test_a_broken_connection_is_an_httpx_error() -> None:
    async def cut(request: Request, responder: Responder) -> None:
        responder.start(200, SSE)
        responder.write(token_event(5, 1))
        responder.abort()

    running = await serve(cut, "127.0.0.1", 0)
    try:
        async with httpx.AsyncClient(trust_env=False) as client:
            with pytest.raises(httpx.HTTPError):
                await timed_chat(client, f"http://127.0.0.1:{running.port}", BODY)
    finally:
        await running.close()
