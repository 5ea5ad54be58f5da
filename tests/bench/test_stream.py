"""A streamed answer of any endpoint: its events, its errors in words, and what it may not exceed."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tandem.bench import stream as stream_module
from tandem.bench.stream import RequestFailed, chat_stream, message_of, served_models

from .fakes import answering, event


async def events(*parts: bytes, status: int = 200) -> list[dict[str, Any]]:
    async with (
        answering(status, *parts) as url,
        httpx.AsyncClient(trust_env=False) as client,
        chat_stream(client, url, {"model": "m"}) as stream,
    ):
        return [each async for each in stream.events()]


def piece(text: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]})


DONE = b"data: [DONE]\n\n"


async def test_events_are_those_of_the_stream_however_they_are_written() -> None:
    written = (
        b': a comment\n\ndata: {"a": 1}\r\n\r\n'
        b'event: x\ndata:{"b": 2}\n\ndata: {"c": "\xe2\x80\xa8\xc2\x85"}\n\ndata: [DONE]'
    )
    assert await events(written) == [{"a": 1}, {"b": 2}, {"c": "\u2028\x85"}]


async def test_an_event_may_come_in_pieces() -> None:
    whole = piece("naïve") + DONE
    for at in range(1, len(whole), 7):
        assert len(await events(whole[:at], whole[at:])) == 1


async def test_a_stream_is_whole_with_a_finish_reason_or_done() -> None:
    assert len(await events(piece("a"), DONE)) == 1
    assert len(await events(piece("a", "stop"))) == 1
    with pytest.raises(RequestFailed, match="ended its stream in the middle of the answer"):
        await events(piece("a"))


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (event({"error": {"message": "KV load failed"}}), "ended its stream with an error: KV load failed"),
        (event({"object": "error", "message": "gone"}), "ended its stream with an error: gone"),
        (piece("", "abort"), "broke its answer off: the engine says 'abort'"),
        (piece("", "error"), "broke its answer off: the engine says 'error'"),
        (b"data: {nonsense\n\n", "sent an event that is no JSON object: {nonsense"),
        (b"data: [1]\n\n", r"sent an event that is no JSON object: \[1\]"),
    ],
)
async def test_an_error_after_the_first_words_is_told(sent: bytes, said: str) -> None:
    with pytest.raises(RequestFailed, match=rf"^http://127\.0\.0\.1:\d+ {said}$"):
        await events(piece("It is "), sent, DONE)


async def test_an_error_status_is_told_in_the_endpoints_own_words() -> None:
    body = json.dumps({"error": {"message": "too long by 3 tokens", "code": 400}}).encode()
    with pytest.raises(RequestFailed, match=r"^\S+ answered HTTP 400: too long by 3 tokens$") as caught:
        await events(body, status=400)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error": {"message": "one", "type": "x"}}', "one"),
        (b'{"error": "Too many concurrent requests", "current": 5}', "Too many concurrent requests"),
        (b'{"object": "error", "message": "two"}', "two"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"detail": [{"loc": 1}]}', '{"detail": [{"loc": 1}]}'),
        (b"<html>502</html>", "<html>502</html>"),
        (b"  ", "without a word"),
        (b"x" * 9000, "x" * 500),
    ],
)
def test_the_words_of_an_error_are_found(body: bytes, words: str) -> None:
    assert message_of(body) == words


async def test_an_answer_and_an_event_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "EVENT_BYTES", 1 << 20)
    monkeypatch.setattr(stream_module, "ANSWER_BYTES", 3 << 20)
    with pytest.raises(RequestFailed, match="sent an event of more than 1 MiB"):
        await events(b"data: " + b"x" * (5 << 18), b"x")
    with pytest.raises(RequestFailed, match="sent more than 3 MiB"):
        await events(*[piece("x" * (1 << 19))] * 7, DONE)


async def test_an_errors_body_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "_BODY_BYTES", 100)
    with pytest.raises(RequestFailed, match=r"HTTP 500: x{100}$"):
        await events(b"x" * 80, b"x" * 80, status=500)


async def models(body: bytes, status: int = 200) -> list[str]:
    async with answering(status, body) as url, httpx.AsyncClient(trust_env=False) as client:
        return await served_models(client, url)


async def test_the_models_are_listed_by_name() -> None:
    assert await models(b'{"data": [{"id": "a"}, {"id": "b", "parent": "a"}]}') == ["a", "b"]


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b'{"data": []}', 200, "/v1/models names no model; is the endpoint ready"),
        (b"<html>", 200, "is no OpenAI endpoint: to /v1/models it answers '<html>'"),
        (b"<html>\n<body>File not found", 404, "is no OpenAI endpoint: it has no /v1/models .HTTP 404.$"),
        (b'{"error": {"message": "no key"}}', 401, "/v1/models answered HTTP 401: no key"),
    ],
)
async def test_an_endpoint_without_models_is_told(body: bytes, status: int, said: str) -> None:
    with pytest.raises(RequestFailed, match=said):
        await models(body, status)
