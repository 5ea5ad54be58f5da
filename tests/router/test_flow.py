"""What a client of the router gets, on every path a request can take."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from tandem.http import Responder

from .conftest import Start
from .fakes import JSON, SSE, FakeEngine, Seen, chunk, eventually

SHORT = {"model": "m", "prompt": "hi", "max_tokens": 8}
LONG = {"model": "m", "prompt": "a prompt that is longer than the threshold", "max_tokens": 8}


def broken(status: int) -> Any:
    """An engine that answers every client with an error status."""

    def answer(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        responder.send(status, JSON, json.dumps({"error": {"message": f"engine says {status}"}}).encode())
        return True

    return answer


async def test_a_short_prompt_goes_to_the_decoder_as_the_client_wrote_it(start: Start) -> None:
    endpoint = await start()
    body = b'{"model":"m","prompt":"hi","temperature":0.10,"unknown":{"x":1e400}}'
    answer = await endpoint.post(body.replace(b"1e400", b"1.50E2"))
    assert answer.status_code == 200
    (seen,) = endpoint.decode[0].requests
    assert seen.raw == body.replace(b"1e400", b"1.50E2")
    assert endpoint.prefill[0].requests == []


async def test_a_long_prompt_is_prefilled_and_its_kv_parameters_reach_the_decoder(start: Start) -> None:
    endpoint = await start()
    answer = await endpoint.post(LONG)
    assert answer.json()["choices"][0]["text"] == "Hello"
    (prefill,), (decode,) = endpoint.prefill[0].requests, endpoint.decode[0].requests
    assert prefill.body["max_tokens"] == 1
    assert prefill.body["stream"] is False
    assert decode.body["max_tokens"] == 8
    assert decode.kv is not None
    assert decode.kv["remote_request_id"] == prefill.headers["x-request-id"]


async def test_a_prompt_of_exactly_the_threshold_is_disaggregated(start: Start) -> None:
    endpoint = await start(routing_threshold=5)
    await endpoint.post({"prompt": "12345"})
    await endpoint.post({"prompt": "1234"})
    assert len(endpoint.prefill[0].requests) == 1


async def test_threshold_zero_disaggregates_everything_without_counting(start: Start) -> None:
    endpoint = await start(routing_threshold=0)
    await endpoint.post(SHORT)
    assert len(endpoint.prefill[0].requests) == 1


async def test_chunks_of_a_stream_arrive_as_the_decoder_sends_them(start: Start) -> None:
    endpoint = await start()
    more = asyncio.Event()

    async def slowly(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        responder.start(200, SSE)
        responder.write(chunk("first"))
        await more.wait()
        responder.write(chunk("second") + b"data: [DONE]\n\n")
        responder.finish()
        return True

    endpoint.decode[0].on_generate = slowly
    async with endpoint.client.stream("POST", "/v1/completions", json={**SHORT, "stream": True}) as answer:
        chunks = answer.aiter_bytes()
        assert await anext(chunks) == chunk("first")  # the second has not been sent yet
        more.set()
        assert b"".join([c async for c in chunks]) == chunk("second") + b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    "field",
    ["n", "best_of", "echo", "prompt_logprobs", "prompt_list"],
)
async def test_what_a_hand_off_cannot_carry_goes_to_a_decoder_alone(start: Start, field: str) -> None:
    endpoint = await start()
    extra = {"prompt": [LONG["prompt"], "two"]} if field == "prompt_list" else {field: 2}
    answer = await endpoint.post({**LONG, **extra})
    assert answer.status_code == 200
    assert endpoint.prefill[0].requests == []
    assert (
        await endpoint.metric(f'tandem_requests_total{{outcome="ok",path="decode_only",reason="{field}"}}')
        == 1
    )


async def test_images_go_to_a_decoder_alone(start: Start) -> None:
    endpoint = await start(routing_threshold=0)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    message = {"role": "user", "content": [{"type": "text", "text": "what is it?"}, image]}
    answer = await endpoint.post({"model": "m", "messages": [message]}, "/v1/chat/completions")
    assert answer.status_code == 200
    assert endpoint.prefill[0].requests == []


@pytest.mark.parametrize("field", ["kv_transfer_params", "disagg_spec", "bootstrap_room", "transfer_id"])
async def test_hand_off_fields_of_a_client_are_refused(start: Start, field: str) -> None:
    endpoint = await start()
    answer = await endpoint.post({**SHORT, field: {"remote_host": "10.0.0.1"}})
    assert answer.status_code == 400
    assert field in answer.json()["error"]["message"]
    assert endpoint.decode[0].requests == []


async def test_internal_headers_of_a_client_are_refused(start: Start) -> None:
    endpoint = await start()
    answer = await endpoint.post(SHORT, x_prefiller_host_port="10.0.0.1:80")
    assert answer.status_code == 400


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 400, "not a JSON object"),
        (b"[1]", 400, "not a JSON object"),
        (b'{"stream": "yes", "prompt": "x"}', 400, "stream"),
        (b'{"model": "other", "prompt": "x"}', 404, "other"),
        (b'{"prompt": "x", "chat_template": "{{ 1 }}"}', 400, "emplate"),
    ],
)
async def test_bad_requests_are_told_what_is_wrong(start: Start, body: bytes, status: int, said: str) -> None:
    endpoint = await start()
    answer = await endpoint.post(body)
    assert answer.status_code == status
    assert said in answer.json()["error"]["message"]
    assert endpoint.decode[0].requests == []


async def test_the_engines_own_rejection_reaches_the_client(start: Start) -> None:
    endpoint = await start()
    endpoint.decode[0].on_generate = broken(400)
    answer = await endpoint.post(SHORT)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "engine says 400"


async def test_a_prompt_over_the_context_is_not_prefilled(start: Start) -> None:
    endpoint = await start(wait=False)
    endpoint.decode[0].max_model_len = 30
    await endpoint.ready()
    endpoint.decode[0].on_generate = broken(400)
    answer = await endpoint.post(LONG)
    assert answer.status_code == 400
    assert endpoint.prefill[0].requests == []


@pytest.mark.parametrize("status", [500, 503])
async def test_a_failing_prefiller_is_replaced_by_another(start: Start, status: int) -> None:
    endpoint = await start(prefill=2)
    for prefiller in endpoint.prefill:
        prefiller.on_generate = fail_once_in_all(endpoint.prefill, status)
    answer = await endpoint.post(LONG)
    assert answer.status_code == 200
    assert [len(p.requests) for p in endpoint.prefill] == [1, 1]
    assert endpoint.decode[0].requests[0].kv is not None


def fail_once_in_all(prefillers: list[FakeEngine], status: int) -> Any:
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


async def test_a_first_event_that_is_an_error_does_not_reach_the_client(start: Start) -> None:
    endpoint = await start()

    def in_band(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        if len(engine.requests) > 1:
            return False
        responder.start(200, SSE)
        responder.write(b'data: {"error": {"message": "KV load failed", "code": 500}}\n\n')
        responder.finish()
        return True

    endpoint.decode[0].on_generate = in_band
    answer = await endpoint.post({**LONG, "stream": True})
    assert answer.status_code == 200
    assert b"error" not in answer.content
    assert answer.content.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("how", ["reset", "clean end without [DONE]", "finish_reason abort"])
async def test_a_stream_that_breaks_off_never_looks_whole(start: Start, how: str) -> None:
    endpoint = await start()

    def break_off(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        responder.start(200, SSE)
        responder.write(chunk("partial"))
        if how == "reset":
            responder.abort()
        elif how == "finish_reason abort":
            responder.write(b'data: {"choices":[{"index":0,"finish_reason":"abort"}]}\n\ndata: [DONE]\n\n')
            responder.finish()
        else:
            responder.finish()
        return True

    endpoint.decode[0].on_generate = break_off
    received = b""
    with pytest.raises(httpx.RemoteProtocolError):  # noqa: PT012
        async with endpoint.client.stream(
            "POST", "/v1/completions", json={**SHORT, "stream": True}
        ) as answer:
            async for part in answer.aiter_bytes():
                received += part
    assert received.startswith(chunk("partial"))
    assert b'"error"' in received
    assert len(endpoint.decode[0].requests) == 1, "nothing is tried again after the first byte"


async def test_the_clients_leaving_ends_the_running_leg(start: Start) -> None:
    endpoint = await start()
    begun = asyncio.Event()

    async def hang(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        begun.set()
        await asyncio.Event().wait()
        return True

    for leg, engine in (("prefill", endpoint.prefill[0]), ("decode", endpoint.decode[0])):
        begun.clear()
        endpoint.prefill[0].on_generate = endpoint.decode[0].on_generate = None
        engine.on_generate = hang
        request = asyncio.create_task(endpoint.post(LONG))
        await begun.wait()
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)

        async def nothing_is_left(leg: str = leg, engine: FakeEngine = engine) -> bool:
            gauge = f'tandem_requests_in_flight{{engine="{engine.url}",role="{leg}"}}'
            return engine.cancelled == 1 and await endpoint.metric(gauge) == 0

        await eventually(nothing_is_left)


async def test_engines_see_a_request_id_that_clients_cannot_guess(start: Start) -> None:
    endpoint = await start()
    answers = [await endpoint.post(LONG, x_request_id="mine") for _ in range(2)]
    assert {a.headers["x-request-id"] for a in answers} == {"mine"}
    seen = [s.headers["x-request-id"] for e in (endpoint.prefill[0], endpoint.decode[0]) for s in e.requests]
    assert all(s.startswith("mine-") for s in seen)
    assert len(set(seen)) == 4


async def test_end_to_end_headers_cross_and_the_others_do_not(start: Start) -> None:
    endpoint = await start()
    await endpoint.post(
        LONG,
        authorization="Bearer abc",
        traceparent="00-1-2-01",
        x_tandem_explain="1",
        connection="x-hop",
        x_hop="1",
    )
    for seen in endpoint.prefill[0].requests + endpoint.decode[0].requests:
        assert seen.headers["authorization"] == "Bearer abc"
        assert seen.headers["traceparent"] == "00-1-2-01"
        assert "x-tandem-explain" not in seen.headers
        assert "x-hop" not in seen.headers


async def test_the_path_is_told_only_when_asked_for_and_enabled(start: Start) -> None:
    endpoint = await start(explain=True)
    told = (await endpoint.post(LONG, x_tandem_explain="1")).headers
    assert told["x-tandem-path"] == "disaggregated"
    assert told["x-tandem-prompt-tokens"] == str(len(str(LONG["prompt"])))
    assert told["x-tandem-prefill-url"] == endpoint.prefill[0].url
    assert told["x-tandem-decode-url"] == endpoint.decode[0].url
    assert not [h for h in (await endpoint.post(LONG)).headers if h.startswith("x-tandem")]
    silent = await start()
    assert "x-tandem-path" not in (await silent.post(LONG, x_tandem_explain="1")).headers


async def test_the_log_says_how_each_request_was_routed(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = await start()
    caplog.set_level("INFO", logger="tandem.router")
    await endpoint.post(LONG, x_request_id="r1")
    tokens = len(str(LONG["prompt"]))
    text = caplog.text
    assert f"Conditional routing: estimated_tokens={tokens}, threshold=20, disaggregate=True" in text
    assert f"DPD prefill selection: RoundRobin selected {endpoint.prefill[0].url}" in text
    assert "r1 prefill time (TTFT): " in text
    assert f"Routing request r1 to {endpoint.prefill[0].url} at " in text
    assert f"Routing request r1 to decoder {endpoint.decode[0].url} at " in text
    await endpoint.post(SHORT)
    assert "estimated_tokens=2, threshold=20, disaggregate=False" in caplog.text


async def test_metrics_tell_paths_times_and_load(start: Start) -> None:
    endpoint = await start()
    await endpoint.post({**LONG, "stream": True})
    await endpoint.post({**SHORT, "stream": True})
    for line in (
        'tandem_requests_total{outcome="ok",path="disaggregated",reason="threshold"}',
        'tandem_requests_total{outcome="ok",path="decode_only",reason="short"}',
        'tandem_ttft_seconds_count{path="disaggregated"}',
        'tandem_ttft_seconds_count{path="decode_only"}',
        "tandem_prefill_seconds_count",
        "tandem_handoff_seconds_count",
    ):
        assert await endpoint.metric(line) == 1, line


async def test_requests_are_spread_over_engines_in_turn(start: Start) -> None:
    endpoint = await start(prefill=2, decode=2)
    for _ in range(8):
        await endpoint.post(LONG)
    assert [len(e.requests) for e in endpoint.prefill] == [4, 4]
    assert [len(e.requests) for e in endpoint.decode] == [4, 4]
