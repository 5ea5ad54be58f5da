"""What Prometheus is told: paths, outcomes, times and load, each request once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tandem.http import Responder
from tandem.router.engines import Engine
from tandem.router.strategies import Choice, Made, Prompt, RoundRobin

from .conftest import CHAT, LONG, SHORT, Start
from .fakes import DONE, ROLE, SSE, FakeEngine, OnGenerate, Seen, broken, chunk, eventually, hang, reads_kv

TOKENS = len(str(LONG["prompt"]))


@pytest.mark.parametrize(
    ("body", "path"), [(SHORT, "decode_only"), (LONG, "disaggregated"), (CHAT, "disaggregated")]
)
async def test_a_streams_times_are_those_of_the_decoders_reads(
    start: Start, body: dict[str, Any], path: str
) -> None:
    endpoint = await start()
    chat = body is CHAT
    parts = [*([ROLE + chunk("a")] if chat else [chunk("a")]), chunk("b"), chunk("c"), DONE]
    taken = asyncio.Semaphore(1)

    async def in_step(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        responder.start(200, SSE)
        for part in parts:
            await taken.acquire()  # each part is a read of its own
            responder.write(part)
        responder.finish()
        return True

    endpoint.decode[0].on_generate = in_step
    url = "/v1/chat/completions" if chat else "/v1/completions"
    async with endpoint.client.stream("POST", url, json={**body, "stream": True}) as answer:
        got = []
        async for part in answer.aiter_bytes():
            got.append(part)
            taken.release()
    assert got == parts
    assert await endpoint.samples("tandem_itl_seconds_count", "path") == {(path,): 3}
    assert await endpoint.samples("tandem_ttft_seconds_count", "path") == {(path,): 1}
    assert (await endpoint.samples("tandem_ttft_seconds_sum", "path"))[(path,)] > 0
    prefilled = float(path == "disaggregated")
    assert await endpoint.metric("tandem_prefill_seconds_count") == prefilled
    assert await endpoint.metric("tandem_handoff_seconds_count") == prefilled


async def test_an_answer_that_is_not_streamed_has_no_token_times(start: Start) -> None:
    endpoint = await start()
    await endpoint.post(LONG)
    assert await endpoint.samples("tandem_itl_seconds_count", "path") == {}
    assert await endpoint.samples("tandem_ttft_seconds_count", "path") == {}
    assert await endpoint.metric("tandem_prefill_seconds_count") == 1


async def test_load_is_what_each_engine_has_in_hand(start: Start) -> None:
    endpoint = await start()
    prefiller, decoder = endpoint.prefill[0], endpoint.decode[0]
    load = ("tandem_requests_in_flight", "role", "engine")
    assert await endpoint.samples("tandem_engine_ready", "role", "engine") == {
        ("prefill", prefiller.url): 1,
        ("decode", decoder.url): 1,
    }
    prefiller.on_generate = decoder.on_generate = hang
    waiting = [asyncio.create_task(endpoint.post(body)) for body in (LONG, LONG, SHORT)]

    async def under_way() -> bool:
        return (len(prefiller.requests), len(decoder.requests)) == (2, 1)

    await eventually(under_way)
    assert await endpoint.samples(*load) == {("prefill", prefiller.url): 2, ("decode", decoder.url): 1}
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)

    async def idle() -> bool:
        return set((await endpoint.samples(*load)).values()) == {0}

    await eventually(idle)


async def test_an_engine_that_is_lost_is_not_ready(start: Start) -> None:
    endpoint = await start()
    (prefiller,) = endpoint.prefill
    assert prefiller.server is not None
    await prefiller.server.close()
    await endpoint.post(LONG)
    ready = await endpoint.samples("tandem_engine_ready", "role", "engine")
    assert ready[("prefill", prefiller.url)] == 0


async def test_the_tokens_of_a_prompt_are_counted_once_whatever_its_way(start: Start) -> None:
    endpoint = await start(prefill=2, decode=2)
    for engines in (endpoint.prefill, endpoint.decode):
        for engine in engines:
            engine.on_generate = first_of(engines)
    assert (await endpoint.post(LONG)).status_code == 200
    assert [sum(len(e.requests) for e in engines) for engines in (endpoint.prefill, endpoint.decode)] == [
        3,
        2,
    ]
    assert await endpoint.samples("tandem_prompt_tokens_total", "path") == {("disaggregated",): TOKENS}
    await endpoint.post(SHORT)
    assert await endpoint.samples("tandem_prompt_tokens_total", "path") == {
        ("disaggregated",): TOKENS,
        ("decode_only",): 2,
    }


def first_of(engines: list[FakeEngine]) -> OnGenerate:
    """The first request that any of these engines gets fails."""

    def answer(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        first = sum(len(e.requests) for e in engines) == 1
        return first and bool(broken(500)(engine, seen, responder))

    return answer


async def test_canaries_are_no_requests(start: Start) -> None:
    endpoint = await start(prefill=2, decode=2)
    assert await endpoint.outcomes() == {}
    assert await endpoint.samples("tandem_prompt_tokens_total", "path") == {}
    assert await endpoint.metric("tandem_prefill_seconds_count") == 0


@pytest.mark.parametrize("leg", ["prefill", "decode", "stream"])
async def test_a_client_that_left_is_told_apart(start: Start, leg: str) -> None:
    endpoint = await start()
    begun = asyncio.Event()

    async def stops(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        if leg == "stream":
            responder.start(200, SSE)
            responder.write(chunk("a"))
        begun.set()
        await asyncio.Event().wait()
        return True

    (endpoint.prefill if leg == "prefill" else endpoint.decode)[0].on_generate = stops
    request = asyncio.create_task(endpoint.post({**LONG, "stream": leg == "stream"}))
    await begun.wait()
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)

    async def told() -> bool:
        return bool(await endpoint.outcomes())

    await eventually(told)
    assert await endpoint.outcomes() == {("disaggregated", "threshold", "client_left"): 1}
    assert await endpoint.failures() == {}


@pytest.mark.parametrize(
    ("body", "status", "how"),
    [
        (b"{", 400, ("none", "invalid", "rejected")),
        (b'{"model": "other"}', 404, ("none", "invalid", "rejected")),
        (b'{"prompt": "hi", "stream": 1}', 400, ("none", "undecided", "rejected")),
    ],
)
async def test_a_request_that_is_no_good_is_rejected(
    start: Start, body: bytes, status: int, how: tuple[str, str, str]
) -> None:
    endpoint = await start()
    assert (await endpoint.post(body)).status_code == status
    assert await endpoint.outcomes() == {how: 1}


@pytest.mark.parametrize(("status", "outcome"), [(400, "rejected"), (404, "rejected"), (500, "failed")])
async def test_an_engines_status_tells_how_a_request_ended(start: Start, status: int, outcome: str) -> None:
    endpoint = await start(max_attempts=1)
    endpoint.decode[0].on_generate = broken(status)
    assert (await endpoint.post(SHORT)).status_code == status
    assert await endpoint.outcomes() == {("decode_only", "short", outcome): 1}


async def test_a_failure_that_nobody_foresaw_is_a_failure(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(RoundRobin):
        def choose(self, prompt: Prompt, candidates: Sequence[Engine]) -> Choice:
            raise KeyError("a mistake of ours")

    monkeypatch.setattr("tandem.router.app.make", lambda config, later: Made(Broken()))
    endpoint = await start()
    answer = await endpoint.post(LONG)
    assert answer.status_code == 500
    assert "a mistake of ours" not in answer.text
    assert "a mistake of ours" in caplog.text
    assert await endpoint.outcomes() == {("disaggregated", "threshold", "failed"): 1}


async def test_failed_legs_are_counted_by_role_and_cause(start: Start) -> None:
    endpoint = await start(prefill=2)
    for prefiller in endpoint.prefill:
        prefiller.on_generate = broken(500)
    endpoint.decode[0].on_generate = lambda engine, seen, responder: (
        reads_kv(seen) and broken(503)(engine, seen, responder)
    )
    await endpoint.post(LONG)
    assert await endpoint.failures() == {("prefill", "status"): 2}
    for prefiller in endpoint.prefill:
        prefiller.on_generate = None
    await endpoint.post(LONG)
    assert await endpoint.failures() == {("prefill", "status"): 2, ("decode", "status"): 1}
