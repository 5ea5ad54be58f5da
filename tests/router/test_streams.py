"""Streamed answers: bytes as the decoder sends them, and never a broken one that looks whole."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from tandem.http import Responder

from .conftest import CHAT, LONG, SHORT, Start
from .fakes import (
    DONE,
    ERROR,
    ROLE,
    SSE,
    FakeEngine,
    OnGenerate,
    Seen,
    broken,
    chunk,
    eventually,
    reads_kv,
    streams,
)

CHATS = "/v1/chat/completions"


async def test_chunks_of_a_stream_arrive_as_the_decoder_sends_them(start: Start) -> None:
    endpoint = await start()
    more = asyncio.Event()

    async def slowly(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        responder.start(200, SSE)
        responder.write(chunk("first"))
        await more.wait()
        responder.write(chunk("second") + DONE)
        responder.finish()
        return True

    endpoint.decode[0].on_generate = slowly
    async with endpoint.client.stream("POST", "/v1/completions", json={**SHORT, "stream": True}) as answer:
        chunks = answer.aiter_bytes()
        assert await anext(chunks) == chunk("first")  # the second has not been sent yet
        more.set()
        assert b"".join([c async for c in chunks]) == chunk("second") + DONE


async def test_a_stream_without_a_line_end_behind_done_is_whole(start: Start) -> None:
    endpoint = await start()
    endpoint.decode[0].on_generate = streams(chunk("all"), b"data: [DONE]")
    assert await endpoint.stream(SHORT) == (chunk("all") + b"data: [DONE]", True)


ABORTED = b'data: {"choices":[{"index":0,"finish_reason":"abort"}]}\n\n'


@pytest.mark.parametrize(
    ("engine", "errors"),
    [
        (streams(chunk("partial"), whole=False), 1),
        (streams(chunk("partial")), 1),
        (streams(chunk("partial"), ABORTED, DONE), 1),
        (streams(chunk("partial"), ERROR, DONE), 1),
        (streams(chunk("partial"), ERROR), 1),
        (streams(chunk("partial"), ERROR[:9], ERROR[9:] + DONE), 1),
    ],
    ids=["reset", "no [DONE]", "aborted", "error and [DONE]", "error", "split error"],
)
async def test_a_stream_that_breaks_off_never_looks_whole(
    start: Start, engine: OnGenerate, errors: int
) -> None:
    endpoint = await start()
    endpoint.decode[0].on_generate = engine
    received, whole = await endpoint.stream(SHORT)
    assert not whole
    assert received.startswith(chunk("partial"))
    assert received.count(b'{"error"') == errors
    assert len(endpoint.decode[0].requests) == 1, "nothing is tried again after the first byte"
    assert list(await endpoint.outcomes()) == [("decode_only", "short", "failed")]
    assert sum((await endpoint.failures()).values()) == 1


def once(first: OnGenerate) -> OnGenerate:
    """An engine that answers only its first client so."""

    async def answer(engine: FakeEngine, seen: Seen, responder: Responder) -> Any:
        if len(engine.requests) > 1:
            return False
        taken = first(engine, seen, responder)
        return await taken if asyncio.iscoroutine(taken) else taken

    return answer


HALF = len(ERROR) // 2
NOTHING_YET = {
    "error": [ERROR],
    "error and [DONE]": [ERROR + DONE],
    "split error": [ERROR[:HALF], ERROR[HALF:]],
    "nothing": [],
    "only [DONE] is missing": [b": keep-alive\n\n"],
    "aborted": [ABORTED, DONE],
}
IN_A_CHAT = {
    "error": [ERROR],
    "role, error": [ROLE, ERROR, DONE],
    "role and error in one read": [ROLE + ERROR + DONE],
    "error split": [ROLE, ERROR[:HALF], ERROR[HALF:], DONE],
    "error split in its first word": [ROLE, ERROR[:3], ERROR[3:]],
    "role split": [ROLE[:20], ROLE[20:], ERROR],
    "role split before its last line end": [ROLE[:-1], ROLE[-1:] + ERROR],
    "only a role": [ROLE],
}


@pytest.mark.parametrize("pieces", NOTHING_YET.values(), ids=NOTHING_YET)
async def test_a_stream_that_fails_before_its_first_token_is_tried_again(
    start: Start, pieces: list[bytes]
) -> None:
    endpoint = await start()
    endpoint.decode[0].on_generate = once(streams(*pieces))
    received, whole = await endpoint.stream(LONG)
    assert (received, whole) == (chunk("Hel") + chunk("lo") + DONE, True)
    assert [reads_kv(s) for s in endpoint.decode[0].requests] == [True, False]


@pytest.mark.parametrize("pieces", IN_A_CHAT.values(), ids=IN_A_CHAT)
@pytest.mark.parametrize("whole", [True, False])
async def test_the_role_of_a_chat_is_no_sign_that_the_engine_can_answer(
    start: Start, pieces: list[bytes], whole: bool
) -> None:
    """vLLM sends it before it has the KV; what could not be loaded is computed on the decoder alone."""
    endpoint = await start()
    endpoint.decode[0].on_generate = once(streams(*pieces, whole=whole))
    assert await endpoint.stream(CHAT, CHATS) == (chunk("Hel") + chunk("lo") + DONE, True)
    assert [reads_kv(s) for s in endpoint.decode[0].requests] == [True, False]
    assert await endpoint.outcomes() == {("decode_only", "handoff_failed", "ok"): 1}


@pytest.mark.parametrize("split", [[ROLE, chunk("x") + DONE], [ROLE + chunk("x") + DONE], [ROLE, DONE]])
async def test_a_short_chat_is_whole(start: Start, split: list[bytes]) -> None:
    endpoint = await start()
    endpoint.decode[0].on_generate = streams(*split)
    assert await endpoint.stream(CHAT, CHATS) == (b"".join(split), True)
    assert len(endpoint.decode[0].requests) == 1


async def test_an_event_that_is_very_long_is_relayed_before_it_has_come_whole(start: Start) -> None:
    endpoint = await start()
    event = chunk("x" * 300_000)
    half = len(event) // 2
    more = asyncio.Event()

    async def in_two(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        responder.start(200, SSE)
        responder.write(ROLE + event[:half])
        await more.wait()
        responder.write(event[half:] + DONE)
        responder.finish()
        return True

    endpoint.decode[0].on_generate = in_two
    received = b""
    async with endpoint.client.stream("POST", CHATS, json={**CHAT, "stream": True}) as answer:
        async for part in answer.aiter_bytes():
            received += part
            more.set()
    assert received == ROLE + event + DONE


async def test_an_error_status_of_a_stream_request_is_an_answer_of_its_own(start: Start) -> None:
    endpoint = await start()
    endpoint.decode[0].on_generate = broken(422)
    answer = await endpoint.post({**SHORT, "stream": True})
    assert (answer.status_code, answer.json()["error"]["message"]) == (422, "engine says 422")


async def test_a_client_that_does_not_read_makes_the_decoder_wait(start: Start) -> None:
    endpoint = await start()
    piece, count = chunk("x" * 256 * 1024), 256
    sent = 0
    finished = False

    async def much(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        nonlocal sent, finished
        responder.start(200, SSE)
        for _ in range(count):
            responder.write(piece)
            sent += 1
            await responder.drained()
            await asyncio.sleep(0)
        finished = True
        responder.write(DONE)
        responder.finish()
        return True

    endpoint.decode[0].on_generate = much
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
    client.setblocking(False)
    host, port = endpoint.client.base_url.host, endpoint.client.base_url.port
    assert port is not None
    await asyncio.get_running_loop().sock_connect(client, (host, port))
    reader, writer = await asyncio.open_connection(sock=client, limit=64 * 1024)
    body = json.dumps({**SHORT, "stream": True}).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )

    seen: list[int] = []

    async def it_stands_still() -> bool:
        seen.append(sent)
        return finished or (sent > 0 and len(seen) > 20 and seen[-20] == sent)

    await eventually(it_stands_still)
    assert not finished, "64 MiB lie somewhere between decoder and client"
    assert (await endpoint.post(SHORT | {"max_tokens": 1}, "/v1/embeddings")).status_code == 404, (
        "others go on"
    )

    received = 0
    tail = b""
    while part := await reader.read(1 << 20):
        received += len(part)
        tail = (tail + part)[-64:]
    assert finished
    assert received > count * len(piece)
    assert tail.endswith(b"0\r\n\r\n")
    writer.close()
    await writer.wait_closed()
