"""A chat of several turns: what is sent, what is measured, and what becomes of a turn that fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tandem.bench.conversation import Conversation
from tandem.bench.stream import RequestFailed
from tandem.http import Request, Responder, Server, serve

from .fakes import SSE, event

Answering = Callable[[Responder], Awaitable[None]]

PATH = [(b"x-tandem-path", b"disaggregated"), (b"x-tandem-reason", b"threshold")]


def piece(text: str, finish: str | None = None, **delta: str) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text, **delta}, "finish_reason": finish}]})


def usage(prompt: int, completion: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}})


class Endpoint:
    """Answers with one script after the other, and keeps what it was asked."""

    def __init__(self, *answers: Answering) -> None:
        self.answers: Iterator[Answering] = iter(answers)
        self.asked: list[dict[str, Any]] = []
        self.headers: list[bytes | None] = []

    async def __call__(self, request: Request, responder: Responder) -> None:
        self.asked.append(json.loads(request.body))
        self.headers.append(request.header(b"x-tandem-explain"))
        await next(self.answers)(responder)


def says(*pieces: bytes, head: Any = ()) -> Answering:
    async def answer(responder: Responder) -> None:
        responder.start(200, [*SSE, *head])
        for each in pieces:
            responder.write(each)
        responder.write(b"data: [DONE]\n\n")
        responder.finish()

    return answer


@asynccontextmanager
async def talking(*answers: Answering, **options: Any) -> AsyncIterator[tuple[Conversation, Endpoint]]:
    endpoint = Endpoint(*answers)
    running: Server = await serve(endpoint, "127.0.0.1", 0)
    try:
        async with httpx.AsyncClient(trust_env=False) as client:
            yield Conversation(client, f"http://127.0.0.1:{running.port}", "m", **options), endpoint
    finally:
        await running.close()


def ticks(*times: float) -> Callable[[], float]:
    left = iter(times)
    return lambda: next(left)


async def test_each_turn_sends_all_that_was_said() -> None:
    one, two = says(piece("Paris", "stop")), says(piece("Rome", "stop"))
    async with talking(one, two, system="Be brief.", settings={"temperature": 0}) as (chat, endpoint):
        await chat.ask("France?")
        await chat.ask("Italy?")
        told = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "France?"},
            {"role": "assistant", "content": "Paris"},
            {"role": "user", "content": "Italy?"},
        ]
        assert endpoint.asked[1] == {
            "model": "m",
            "messages": told,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        assert chat.messages == [*told, {"role": "assistant", "content": "Rome"}]
        chat.reset()
        assert chat.messages == told[:1]


async def test_an_answer_is_timed_by_its_pieces_of_text() -> None:
    role = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    answer = says(role, piece("It "), piece("is "), piece("Paris", "length"), usage(1604, 3), head=PATH)
    clock = ticks(10.0, 10.5, 10.75, 11.5)
    heard: list[str] = []
    async with talking(answer, clock=clock) as (chat, endpoint):
        got = await chat.ask("?", on_text=heard.append)
    assert endpoint.headers == [b"1"]
    assert heard == ["It ", "is ", "Paris"]
    assert got.as_dict() == {
        "answer": "It is Paris",
        "finish_reason": "length",
        "path": "disaggregated",
        "reason": "threshold",
        "prompt_tokens": 1604,
        "completion_tokens": 3,
        "ttft_ms": 500.0,
        "itl_p50_ms": 500.0,
        "itl_max_ms": 750.0,
        "tokens_per_s": 2.0,
    }


async def test_what_an_endpoint_does_not_tell_is_not_made_up() -> None:
    async with talking(says(piece("Paris", "stop"))) as (chat, _):
        told = (await chat.ask("?")).as_dict()
    assert told["ttft_ms"] > 0
    unknown = {name for name, value in told.items() if value is None}
    assert unknown == {
        *("path", "reason", "prompt_tokens", "completion_tokens"),
        *("itl_p50_ms", "itl_max_ms", "tokens_per_s"),
    }


async def test_tokens_per_second_goes_by_the_endpoints_count() -> None:
    """A piece may hold several tokens."""
    async with talking(says(piece("a"), piece("b c d", "stop"), usage(1, 4)), clock=ticks(0, 1, 3)) as (c, _):
        assert (await c.ask("?")).tokens_per_second == 1.5


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
async def test_what_a_model_thinks_counts_and_is_not_sent_back(field: str) -> None:
    thoughts: list[str] = []
    answer = says(piece("", **{field: "hm"}), piece("Paris", "stop"))
    async with talking(answer, clock=ticks(0, 1, 3)) as (chat, _):
        got = await chat.ask("?", on_thought=thoughts.append)
    assert (thoughts, got.text, got.times) == (["hm"], "Paris", [1, 3])
    assert chat.messages[-1] == {"role": "assistant", "content": "Paris"}


async def refuse(responder: Responder) -> None:
    responder.send(400, [], b'{"error": {"message": "too long"}}')


async def fail_midway(responder: Responder) -> None:
    responder.start(200, SSE)
    responder.write(piece("It is "))
    responder.write(event({"error": {"message": "the decoder died"}}))
    responder.finish()


async def cut(responder: Responder) -> None:
    responder.start(200, SSE)
    responder.write(piece("It is "))
    responder.abort()


@pytest.mark.parametrize(
    ("answer", "error"), [(refuse, RequestFailed), (fail_midway, RequestFailed), (cut, httpx.HTTPError)]
)
async def test_a_turn_that_fails_is_taken_back(answer: Answering, error: type[Exception]) -> None:
    well = says(piece("Paris", "stop"))
    async with talking(answer, well) as (chat, endpoint):
        with pytest.raises(error):
            await chat.ask("one")
        assert chat.messages == []
        await chat.ask("two")
        assert endpoint.asked[1]["messages"] == [{"role": "user", "content": "two"}]


def drips(*pieces: bytes) -> Answering:
    """Begins well, and then sends for ever what is no text."""

    async def answer(responder: Responder) -> None:
        responder.start(200, SSE)
        for each in pieces:
            responder.write(each)
        while True:
            responder.write(b": still here\n\n" + event({"choices": []}))
            await asyncio.sleep(0.01)

    return answer


@pytest.mark.parametrize("pieces", [(), (piece("It "), piece("is "))], ids=["at first", "in the middle"])
async def test_an_answer_that_drips_is_given_up_and_taken_back(pieces: tuple[bytes, ...]) -> None:
    heard: list[str] = []
    async with talking(drips(*pieces), patience=1.0) as (chat, _):
        with pytest.raises(RequestFailed, match=r"has sent no text for 1 s; the request was given up$"):
            await chat.ask("?", on_text=heard.append)
        assert chat.messages == []
        assert heard == ["It ", "is "][: len(pieces)]


async def test_a_refusal_that_drips_is_given_up() -> None:
    async def refuses(responder: Responder) -> None:
        responder.start(500, [])
        while True:
            responder.write(b".")
            await asyncio.sleep(0.01)

    async with talking(refuses, patience=1.0) as (chat, _):
        with pytest.raises(RequestFailed, match="has sent no text for 1 s"):
            await chat.ask("?")


async def test_an_answer_may_take_its_time_as_long_as_there_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    time, passed = loop.time, 0.0
    monkeypatch.setattr(loop, "time", lambda: time() + passed)

    def half_an_hour_passes(text: str) -> None:
        nonlocal passed
        passed += 1800.0

    answer = says(*[piece("word ")] * 5, piece("", "stop"))
    async with talking(answer, patience=3600.0) as (chat, _):
        assert (await chat.ask("?", on_text=half_an_hour_passes)).text == "word " * 5


async def test_an_answer_that_is_stopped_stays_as_far_as_it_came_and_ends_for_the_endpoint() -> None:
    left = asyncio.Event()

    async def for_ever(responder: Responder) -> None:
        try:
            responder.start(200, SSE)
            responder.write(piece("It is "))
            await asyncio.Event().wait()
        finally:
            left.set()

    spoke = asyncio.Event()
    async with talking(for_ever) as (chat, _):
        task = asyncio.create_task(chat.ask("?", on_text=lambda text: spoke.set()))
        await spoke.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await left.wait()
        assert chat.messages[-1] == {"role": "assistant", "content": "It is "}
        assert (chat.last.text, chat.last.finish_reason) == ("It is ", None)


async def test_an_answer_that_is_stopped_before_its_first_word_is_taken_back() -> None:
    asked = asyncio.Event()

    async def silent(responder: Responder) -> None:
        asked.set()
        await asyncio.Event().wait()

    async with talking(silent) as (chat, _):
        task = asyncio.create_task(chat.ask("?"))
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert chat.messages == []
