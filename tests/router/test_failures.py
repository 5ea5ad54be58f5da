"""What a client gets when engines fail before the answer has begun: nothing of it, as far as can be."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tandem.http import Responder
from tandem.router.engines import EngineRole

from .conftest import CHAT, LONG, SHORT, Start
from .fakes import (
    JSON,
    FakeEngine,
    OnGenerate,
    Seen,
    broken,
    chunk,
    eventually,
    hang,
    local_counter,
    reads_kv,
    streams,
)


def cannot_read(engine: FakeEngine, seen: Seen, responder: Responder) -> Any:
    return reads_kv(seen) and broken(500)(engine, seen, responder)


@pytest.mark.parametrize("status", [500, 503])
async def test_a_failing_prefiller_is_replaced_by_another(start: Start, status: int) -> None:
    endpoint = await start(prefill=2)
    for prefiller in endpoint.prefill:
        prefiller.on_generate = fail_once_in_all(endpoint.prefill, status)
    answer = await endpoint.post(LONG)
    assert answer.status_code == 200
    assert [len(p.requests) for p in endpoint.prefill] == [1, 1]
    assert endpoint.decode[0].requests[0].kv is not None


def fail_once_in_all(prefillers: list[FakeEngine], status: int) -> OnGenerate:
    def answer(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        if sum(len(p.requests) for p in prefillers) > 1:
            return False
        return bool(broken(status)(engine, seen, responder))

    return answer


@pytest.mark.parametrize("reply", [b'{"kv_transfer_params": null}', b"{}", b"not json"])
async def test_without_a_hand_off_the_decoder_computes_the_prompt(start: Start, reply: bytes) -> None:
    endpoint = await start()

    def no_params(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        responder.send(200, JSON, reply)
        return True

    endpoint.prefill[0].on_generate = no_params
    answer = await endpoint.post(LONG)
    assert answer.status_code == 200
    assert endpoint.decode[0].requests[0].kv is None
    assert (
        await endpoint.metric(
            'tandem_requests_total{outcome="ok",path="decode_only",reason="prefill_failed"}'
        )
        == 1
    )


async def test_long_prompts_on_decoders_are_capped(start: Start) -> None:
    endpoint = await start(max_fallbacks=0)
    endpoint.prefill[0].on_generate = broken(500)
    answer = await endpoint.post(LONG)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    assert (await endpoint.post(SHORT)).status_code == 200


async def test_a_failing_decoder_is_replaced_with_a_new_prefill(start: Start) -> None:
    endpoint = await start(decode=2)
    failed: list[str] = []

    def fail_first(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        if failed:
            return False
        failed.append(engine.name)
        return bool(broken(500)(engine, seen, responder))

    for decoder in endpoint.decode:
        decoder.on_generate = fail_first
    answer = await endpoint.post(LONG)
    assert answer.status_code == 200
    ids = [s.headers["x-request-id"] for s in endpoint.prefill[0].requests]
    assert len(ids) == len(set(ids)) == 2, "hand-off parameters must not be used twice"
    used = [s.kv["remote_request_id"] for d in endpoint.decode for s in d.requests if s.kv]
    assert sorted(used) == sorted(ids)


async def test_the_only_decoder_gets_the_prompt_alone_when_it_cannot_read_the_kv(start: Start) -> None:
    endpoint = await start()

    def cannot_read(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        return bool(seen.kv) and bool(broken(500)(engine, seen, responder))

    endpoint.decode[0].on_generate = cannot_read
    answer = await endpoint.post({**LONG, "stream": True})
    assert answer.status_code == 200
    assert answer.content.endswith(b"data: [DONE]\n\n")
    assert [s.kv is None for s in endpoint.decode[0].requests] == [False, True]


@pytest.mark.parametrize("status", [400, 404, 413, 422])
async def test_a_request_that_a_prefiller_rejects_gets_the_decoders_own_answer(
    start: Start, status: int
) -> None:
    endpoint = await start(prefill=2)
    for prefiller in endpoint.prefill:
        prefiller.on_generate = broken(status)
    answer = await endpoint.post(LONG)
    assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "Hello")
    assert sum(len(p.requests) for p in endpoint.prefill) == 1, "another would say the same"
    assert endpoint.decode[0].requests[0].kv is None
    endpoint.decode[0].on_generate = broken(status + 10)
    answer = await endpoint.post(LONG)
    assert answer.status_code == status + 10
    assert await endpoint.outcomes() == {
        ("decode_only", "prefill_rejected", "ok"): 1,
        ("decode_only", "prefill_rejected", "rejected"): 1,
    }


@pytest.mark.parametrize("status", [400, 404, 413, 422])
async def test_where_decoders_may_compute_no_more_the_prefillers_rejection_is_the_answer(
    start: Start, status: int
) -> None:
    endpoint = await start(max_fallbacks=0)
    endpoint.prefill[0].on_generate = broken(status)
    answer = await endpoint.post(LONG, x_request_id="mine")
    assert answer.status_code == status
    assert answer.json()["error"]["message"] == f"engine says {status}"
    assert answer.headers["x-request-id"] == "mine"
    assert endpoint.decode[0].requests == []
    assert await endpoint.outcomes() == {("decode_only", "prefill_rejected", "rejected"): 1}


@pytest.mark.parametrize("status", [408, 429, 500, 503])
async def test_a_prefiller_that_only_cannot_now_is_not_the_clients_fault(start: Start, status: int) -> None:
    endpoint = await start(max_fallbacks=0)
    endpoint.prefill[0].on_generate = broken(status)
    assert (await endpoint.post(LONG)).status_code == 503


@pytest.mark.parametrize("ends", ["success", "rejection", "failure", "leaving"])
async def test_a_long_prompt_on_a_decoder_makes_room_for_the_next_however_it_ends(
    start: Start, ends: str
) -> None:
    endpoint = await start(max_fallbacks=1)
    (decoder,) = endpoint.decode
    endpoint.prefill[0].on_generate = broken(500)
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def when_told(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        begun.set()
        await go_on.wait()
        return ends != "success" and bool(
            broken(400 if ends == "rejection" else 500)(engine, seen, responder)
        )

    for _ in range(2):
        begun.clear()
        go_on.clear()
        decoder.on_generate = when_told
        first = asyncio.create_task(endpoint.post(LONG))
        await begun.wait()
        assert (await endpoint.post(LONG)).status_code == 503, "one is as many as it may"
        if ends == "leaving":
            left = decoder.cancelled
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)

            async def nothing_is_left(left: int = left) -> bool:
                return decoder.cancelled > left

            await eventually(nothing_is_left)
        else:
            go_on.set()
            status = (await first).status_code
            assert status == {"success": 200, "rejection": 400, "failure": 500}[ends]
        decoder.on_generate = None
        assert (await endpoint.post(LONG)).status_code == 200


async def test_a_long_prompt_makes_room_for_the_next_once_it_is_computed(start: Start) -> None:
    endpoint = await start(max_fallbacks=1)
    endpoint.prefill[0].on_generate = broken(500)
    endpoint.decode[0].on_generate = streams(chunk("a"), then_hangs=True)
    async with endpoint.client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as first:
        assert await anext(first.aiter_bytes()) == chunk("a")
        endpoint.decode[0].on_generate = None
        assert (await endpoint.post(LONG)).status_code == 200


async def test_as_many_long_prompts_as_allowed_are_on_decoders_at_once(start: Start) -> None:
    endpoint = await start(max_fallbacks=2)
    endpoint.prefill[0].on_generate = broken(500)
    endpoint.decode[0].on_generate = hang
    waiting = [asyncio.create_task(endpoint.post(LONG)) for _ in range(2)]

    async def both_are_there() -> bool:
        return len(endpoint.decode[0].requests) == 2

    await eventually(both_are_there)
    assert (await endpoint.post(LONG)).status_code == 503
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.parametrize("attempts", [1, 2, 3])
async def test_max_attempts_bounds_prefill_legs(start: Start, attempts: int) -> None:
    endpoint = await start(prefill=4, max_attempts=attempts)
    for prefiller in endpoint.prefill:
        prefiller.on_generate = broken(500)
    assert (await endpoint.post(LONG)).status_code == 200
    assert sum(len(p.requests) for p in endpoint.prefill) == attempts


@pytest.mark.parametrize("attempts", [1, 2, 3])
@pytest.mark.parametrize("body", [SHORT, LONG])
async def test_max_attempts_bounds_decode_legs(start: Start, attempts: int, body: dict[str, Any]) -> None:
    endpoint = await start(decode=4, max_attempts=attempts)
    for decoder in endpoint.decode:
        decoder.on_generate = broken(500)
    answer = await endpoint.post(body)
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "engine says 500")
    assert sorted(len(d.requests) for d in endpoint.decode) == [0] * (4 - attempts) + [1] * attempts


async def test_max_attempts_bounds_the_legs_of_a_request_in_all(start: Start) -> None:
    """A decoder that fails costs a new prefill, so either kind of failure uses up the prefill legs."""
    endpoint = await start(prefill=2, decode=4, max_attempts=3)
    for prefiller in endpoint.prefill:
        prefiller.on_generate = fail_once_in_all(endpoint.prefill, 500)
    for decoder in endpoint.decode:
        decoder.on_generate = cannot_read
    answer = await endpoint.post(LONG)
    assert answer.status_code == 200
    assert sum(len(p.requests) for p in endpoint.prefill) == 3
    kinds = [reads_kv(s) for d in endpoint.decode for s in d.requests]
    assert sorted(kinds) == [False, True, True]


def closes_at_once(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
    """What a kept connection looks like that the engine closed just when it was used again."""
    first = len([s for s in engine.requests if s.path == seen.path]) == 2
    if first:
        responder.abort()
    return first


async def test_a_hand_off_is_never_sent_twice_over_a_connection_that_died(start: Start) -> None:
    """Whether the engine read the parameters is not known, and they must not be read twice."""
    endpoint = await start()
    (decoder,) = endpoint.decode
    decoder.on_generate = closes_at_once
    await endpoint.post(SHORT)  # leaves a connection that is kept
    answer = await endpoint.post(LONG)
    assert answer.status_code == 200
    assert [s.kv is None for s in decoder.requests[1:]] == [False, True]
    assert await endpoint.failures() == {("decode", "closed"): 1}


async def test_what_carries_no_hand_off_is_sent_again_over_a_new_connection(start: Start) -> None:
    endpoint = await start()
    (decoder,) = endpoint.decode
    decoder.on_generate = closes_at_once
    for _ in range(2):
        assert (await endpoint.post(SHORT)).status_code == 200
    assert len(decoder.requests) == 3
    assert await endpoint.failures() == {}


@pytest.mark.parametrize("body", [SHORT, LONG])
async def test_an_engine_that_cannot_be_reached_is_replaced_and_not_asked_again(
    start: Start, body: dict[str, Any]
) -> None:
    endpoint = await start(prefill=2, decode=2, local=local_counter())
    for dead in (endpoint.prefill[0], endpoint.decode[0]):
        assert dead.server is not None
        await dead.server.close()
    for _ in range(3):
        assert (await endpoint.post(body)).status_code == 200
    failures = await endpoint.failures()
    assert failures.pop(("decode", "connect")) == 1
    assert failures == ({("prefill", "connect"): 1} if body is LONG else {})


async def test_a_decoder_that_is_found_gone_when_it_shall_count_is_no_reason_to_fail(start: Start) -> None:
    endpoint = await start(decode=2)
    first = endpoint.app.fleet.ready(EngineRole.DECODE)[0].url
    dead = next(d for d in endpoint.decode if d.url == first)
    assert dead.server is not None
    await dead.server.close()
    assert (await endpoint.post(SHORT)).status_code == 200
    assert [d.url for d in endpoint.app.fleet.ready(EngineRole.DECODE)] != [first]
    assert await endpoint.failures() == {}, "no leg was sent to it"


async def test_an_endpoint_without_a_decoder_says_so_and_when_to_come_back(start: Start) -> None:
    endpoint = await start()
    assert endpoint.decode[0].server is not None
    await endpoint.decode[0].server.close()
    for _ in range(2):  # the first finds out, the second knows
        answer = await endpoint.post(SHORT)
        assert answer.status_code in (502, 503)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0


@pytest.mark.parametrize(
    "answer",
    [
        b'{"error": {"message": "KV load failed"}}',
        b'{"choices": [{"index": 0, "text": "", "finish_reason": "error"}]}',
        b'{"choices": [{"index": 0, "text": "He", "finish_reason": "abort"}]}',
        b'{"choices": [{"index": 0, "te',
    ],
)
@pytest.mark.parametrize("body", [LONG, CHAT])
async def test_an_error_that_comes_with_status_200_is_not_an_answer(
    start: Start, answer: bytes, body: dict[str, Any]
) -> None:
    endpoint = await start()

    def failed(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        if reads_kv(seen):
            responder.send(200, JSON, answer)
        return reads_kv(seen)

    endpoint.decode[0].on_generate = failed
    path = "/v1/chat/completions" if body is CHAT else "/v1/completions"
    got = await endpoint.post(body, path)
    assert (got.status_code, got.json()["choices"][0]["text"]) == (200, "Hello")
    assert [s.kv is None for s in endpoint.decode[0].requests] == [False, True]
    assert await endpoint.failures() == {("decode", "in_band_error"): 1}


async def test_the_log_of_what_cannot_be_served_tells_who_failed_it_and_who_is_away(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = await start(prefill=2, decode=2)

    def lose_the_other(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        others = [d for d in endpoint.decode if not d.requests]
        if len(others) == 2:
            return False
        endpoint.app.fleet.lost(endpoint.of(others[0]), "taken away")
        return bool(broken(500)(engine, seen, responder))

    for prefiller in endpoint.prefill:
        prefiller.on_generate = lose_the_other
    for decoder in endpoint.decode:
        decoder.on_generate = broken(500)
    assert (await endpoint.post(LONG, x_request_id="mine")).status_code == 503
    whys = {d.url: "failed this request" if d.requests else "taken away" for d in endpoint.decode}
    said = "; ".join(f"{url}: {whys[url]}" for url in sorted(whys))
    assert f"mine cannot be served: {said}" in [r.getMessage() for r in caplog.records]


async def test_where_no_engine_is_known_the_log_says_so(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    listed = tmp_path / "engines.yaml"
    listed.write_text("engines: []")
    endpoint = await start(prefill=0, decode=0, discover_file=str(listed), wait=False)
    assert (await endpoint.post(SHORT, x_request_id="mine")).status_code == 503
    assert "mine cannot be served: there is no engine" in [r.getMessage() for r in caplog.records]
