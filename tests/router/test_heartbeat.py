"""`--heartbeat`: comment lines while there is no byte of a streamed answer, and what they commit to."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from tandem.http import Responder, StreamScan

from .conftest import CHAT, LONG, SHORT, Endpoint, Start
from .fakes import (
    DONE,
    ERROR,
    JSON,
    ROLE,
    FakeEngine,
    OnGenerate,
    Seen,
    broken,
    chunk,
    eventually,
    hang,
    reads_kv,
    streams,
)

BEAT = b": heartbeat\n\n"
OFTEN = 0.02
NEVER = 3600.0


def late(then: OnGenerate, beats: asyncio.Event) -> OnGenerate:
    """An engine that begins to answer once heartbeats have been seen."""

    async def answer(engine: FakeEngine, seen: Seen, responder: Responder) -> Any:
        await beats.wait()
        taken = then(engine, seen, responder)
        return await taken if asyncio.iscoroutine(taken) else taken

    return answer


async def streamed(
    endpoint: Endpoint, body: dict[str, Any], beats: asyncio.Event, path: str = "/v1/completions"
) -> tuple[httpx.Response, bytes, bool]:
    """A streamed answer: its head, what came without heartbeats, and whether it was whole. Sets `beats` after
    three of them."""
    received = b""
    whole = True
    async with endpoint.client.stream("POST", path, json={**body, "stream": True}) as answer:
        try:
            async for part in answer.aiter_bytes():
                received += part
                if received.count(BEAT) >= 3:
                    beats.set()
        except httpx.RemoteProtocolError:
            whole = False
    first = len(received) - len(received.lstrip(b": heartbeat\n"))
    assert BEAT not in received[first:], "none once there is an answer"
    return answer, received.replace(BEAT, b""), whole


@pytest.fixture
def beats() -> asyncio.Event:
    return asyncio.Event()


@pytest.mark.parametrize("body", [SHORT, LONG], ids=["alone", "disaggregated"])
async def test_a_long_prefill_is_bridged_and_the_answer_follows_byte_for_byte(
    start: Start, beats: asyncio.Event, body: dict[str, Any]
) -> None:
    endpoint = await start(heartbeat=OFTEN, explain=True)
    slow = endpoint.prefill[0] if body is LONG else endpoint.decode[0]
    slow.on_generate = late(lambda engine, seen, responder: False, beats)
    answer, received, whole = await streamed(endpoint, body, beats)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["x-request-id"]
    assert (received, whole) == (chunk("Hel") + chunk("lo") + DONE, True)
    assert [outcome for *_, outcome in await endpoint.outcomes()] == ["ok"]


async def test_the_role_of_a_chat_is_held_back_with_heartbeats_too(
    start: Start, beats: asyncio.Event
) -> None:
    endpoint = await start(heartbeat=OFTEN)

    async def thinks(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        if not seen.body.get("stream"):
            return False
        responder.start(200, [(b"content-type", b"text/event-stream")])
        responder.write(ROLE)
        await beats.wait()
        responder.write(chunk("a") + DONE)
        responder.finish()
        return True

    endpoint.decode[0].on_generate = thinks
    _, received, whole = await streamed(endpoint, CHAT, beats, "/v1/chat/completions")
    assert (received, whole) == (ROLE + chunk("a") + DONE, True)


async def test_an_answer_that_comes_soon_has_none_and_keeps_the_engines_headers(start: Start) -> None:
    endpoint = await start(heartbeat=NEVER)

    def answer(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        responder.start(200, [(b"content-type", b"text/event-stream"), (b"x-engine", b"1")])
        responder.write(chunk("a") + DONE)
        responder.finish()
        return True

    endpoint.decode[0].on_generate = answer
    head, received, _ = await streamed(endpoint, SHORT, asyncio.Event())
    assert received == chunk("a") + DONE
    assert head.headers["x-engine"] == "1"


async def test_an_answer_that_is_not_streamed_has_none(start: Start) -> None:
    endpoint = await start(heartbeat=OFTEN, answer_timeout=60.0)

    async def slowly(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        await asyncio.sleep(5 * OFTEN)
        return False

    endpoint.decode[0].on_generate = slowly
    answer = await endpoint.post(SHORT)
    assert (answer.status_code, answer.json()["object"]) == (200, "text_completion")


async def test_there_are_none_by_default(start: Start) -> None:
    endpoint = await start(first_token_timeout=0.3, max_attempts=1)
    endpoint.decode[0].on_generate = hang
    assert (await endpoint.post({**SHORT, "stream": True})).status_code == 502


async def test_engines_are_still_replaced_behind_heartbeats(start: Start, beats: asyncio.Event) -> None:
    """Nothing of the answer has been sent, so it can still be had elsewhere."""
    endpoint = await start(decode=2, heartbeat=OFTEN)
    failed: list[str] = []

    async def fails_first(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        if failed:
            return False
        failed.append(engine.name)
        await beats.wait()
        responder.send(500, JSON, b"{}")
        return True

    for fake in endpoint.decode:
        fake.on_generate = fails_first
    _, received, whole = await streamed(endpoint, SHORT, beats)
    assert (received, whole) == (chunk("Hel") + chunk("lo") + DONE, True)
    assert len(failed) == 1


async def test_a_hand_off_that_fails_is_computed_alone_behind_heartbeats(
    start: Start, beats: asyncio.Event
) -> None:
    endpoint = await start(heartbeat=OFTEN)

    async def cannot_load(engine: FakeEngine, seen: Seen, responder: Responder) -> Any:
        if not reads_kv(seen):
            return False
        await beats.wait()
        taken = streams(ERROR, DONE)(engine, seen, responder)
        return await taken

    endpoint.decode[0].on_generate = cannot_load
    _, received, whole = await streamed(endpoint, LONG, beats)
    assert (received, whole) == (chunk("Hel") + chunk("lo") + DONE, True)
    assert [reads_kv(seen) for seen in endpoint.decode[0].requests] == [True, False]


def html(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
    responder.send(422, [(b"content-type", b"text/html")], b"<html>\n422\n</html>")
    return True


def whole_answer(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
    responder.send(200, JSON, b'{"choices": [{"text": "x"}]}')
    return True


@pytest.mark.parametrize(
    ("engine", "message", "code", "outcome"),
    [
        (broken(422), "engine says 422", None, "rejected"),
        (broken(500), "engine says 500", None, "failed"),
        (html, "The engine answered HTTP 422.", 422, "rejected"),
        (whole_answer, "The engine does not stream its answer.", 502, "failed"),
        (streams(ERROR, DONE), "The decode engine failed (in_band_error).", 502, "failed"),
    ],
    ids=["rejected", "failed", "html", "not a stream", "error event"],
)
async def test_an_error_after_them_is_an_event_and_the_stream_does_not_look_whole(
    start: Start, beats: asyncio.Event, engine: OnGenerate, message: str, code: int | None, outcome: str
) -> None:
    endpoint = await start(heartbeat=OFTEN, max_attempts=1)
    endpoint.decode[0].on_generate = late(engine, beats)
    head, received, whole = await streamed(endpoint, SHORT, beats)
    assert head.status_code == 200
    assert not whole
    error = json.loads(received.strip().removeprefix(b"data: "))["error"]
    assert error["message"] == message
    assert error.get("code") == code
    assert [o for *_, o in await endpoint.outcomes()] == [outcome]
    scan = StreamScan()
    scan.feed(received)
    scan.end()
    assert scan.error is not None


async def test_what_is_refused_before_it_is_served_keeps_its_status(start: Start) -> None:
    """A request that waits for its turn has no heartbeats: that there are too many is a status of its own."""
    endpoint = await start(heartbeat=OFTEN, max_concurrent_requests=1, max_queue_size=1, queue_timeout=0.3)
    endpoint.decode[0].on_generate = hang
    first = asyncio.create_task(endpoint.post(SHORT))

    async def running() -> bool:
        return len(endpoint.decode[0].requests) == 1

    await eventually(running)
    assert (await endpoint.post({**SHORT, "stream": True})).status_code == 429
    assert (await endpoint.post({**SHORT, "stream": True, "model": "other"})).status_code == 404
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)


async def test_a_client_that_leaves_ends_its_request_and_its_heartbeats(
    start: Start, beats: asyncio.Event
) -> None:
    endpoint = await start(heartbeat=OFTEN)
    endpoint.decode[0].on_generate = hang
    async with endpoint.client.stream("POST", "/v1/completions", json={**SHORT, "stream": True}) as answer:
        async for part in answer.aiter_bytes():
            assert part.replace(BEAT, b"") == b""
            break

    async def cancelled() -> bool:
        return endpoint.decode[0].cancelled == 1

    await eventually(cancelled)
    assert [outcome for *_, outcome in await endpoint.outcomes()] == ["client_left"]


@pytest.mark.parametrize("fails", [False, True])
async def test_openais_client_reads_past_them(start: Start, beats: asyncio.Event, fails: bool) -> None:
    openai = pytest.importorskip("openai")
    endpoint = await start(heartbeat=OFTEN, max_attempts=1)

    async def after_three(engine: FakeEngine, seen: Seen, responder: Responder) -> Any:
        await asyncio.sleep(10 * OFTEN)
        return fails and broken(422)(engine, seen, responder)

    endpoint.decode[0].on_generate = after_three
    client = openai.AsyncOpenAI(base_url=f"{endpoint.client.base_url}/v1", api_key="-", max_retries=0)

    async def said() -> str:
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], stream=True, n=2
        )
        return "".join([event.choices[0].delta.content or "" async for event in stream])

    async with client:
        if fails:
            with pytest.raises(openai.APIError, match="engine says 422"):
                await said()
        else:
            assert await said() == "Hello"
