"""What a client of the router gets, on every path a request can take."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tandem.http import Responder
from tandem.router.classify import REFUSED_FIELDS, REFUSED_HEADERS
from tandem.router.engines import EngineRole

from .conftest import LONG, SHORT, Start
from .fakes import FakeEngine, Seen, broken, eventually, reads_kv


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
    assert endpoint.prefill[0].tokenized == endpoint.decode[0].tokenized == []
    counts = await start(routing_threshold=1)
    await counts.post(SHORT)
    assert counts.decode[0].tokenized == [{"model": "m", "prompt": "hi"}]


async def test_a_decoder_that_no_prefiller_can_reach_gets_no_long_prompt_while_another_can(
    start: Start,
) -> None:
    def blind(prefill: list[FakeEngine], decode: list[FakeEngine]) -> None:
        decode[1].refuses = reads_kv

    endpoint = await start(decode=2, before=blind, wait=False)

    async def both_serve() -> bool:
        fleet = endpoint.app.fleet
        return len(fleet.ready(EngineRole.DECODE)) == 2 and fleet.missing is None

    await eventually(both_serve)
    for _ in range(4):
        assert (await endpoint.post(LONG)).status_code == 200
    assert [len(d.requests) for d in endpoint.decode] == [4, 0]
    assert all(s.kv for s in endpoint.decode[0].requests)
    for _ in range(2):
        await endpoint.post(SHORT)
    assert len(endpoint.decode[1].requests) == 1, "short prompts go to both"


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


async def test_hand_off_fields_of_a_client_are_refused(start: Start) -> None:
    endpoint = await start()
    for field in sorted(REFUSED_FIELDS):
        for body in ({field: {"remote_host": "10.0.0.1"}}, {"vllm_xargs": {"fine": 1, field: None}}):
            answer = await endpoint.post({**SHORT, **body})
            assert answer.status_code == 400
            assert field in answer.json()["error"]["message"]
            assert answer.json()["error"]["param"] == field
    assert endpoint.decode[0].requests == []


@pytest.mark.parametrize("bag", [[], "x", 1, True, [["kv_transfer_params", {}]]])
async def test_a_bag_of_engine_arguments_that_is_no_object_is_refused(start: Start, bag: Any) -> None:
    endpoint = await start()
    answer = await endpoint.post({**SHORT, "vllm_xargs": bag})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "vllm_xargs"
    assert endpoint.decode[0].requests == []


@pytest.mark.parametrize("bag", [None, {}, {"mine": [1]}])
async def test_other_engine_arguments_go_through(start: Start, bag: Any) -> None:
    endpoint = await start()
    assert (await endpoint.post({**SHORT, "vllm_xargs": bag})).status_code == 200
    assert endpoint.decode[0].requests[0].body["vllm_xargs"] == bag


async def test_internal_headers_of_a_client_are_refused(start: Start) -> None:
    endpoint = await start()
    for header in sorted(REFUSED_HEADERS):
        answer = await endpoint.post(SHORT, **{header.decode(): "10.0.0.1:80"})
        assert answer.status_code == 400
        assert header.decode() in answer.json()["error"]["message"]
    assert endpoint.decode[0].requests == []


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


async def test_a_model_that_no_engine_serves_is_none_and_no_model_is_the_engines_own(start: Start) -> None:
    endpoint = await start()
    answer = await endpoint.post({**SHORT, "model": "alias"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert (await endpoint.post({"prompt": "hi"})).status_code == 200


async def test_served_model_name_restricts_what_requests_may_name(start: Start) -> None:
    endpoint = await start(served_model_name=("alias", "other"))
    assert (await endpoint.post({**SHORT, "model": "alias"})).status_code == 200
    answer = await endpoint.post(SHORT)
    assert answer.status_code == 404
    assert "'m' does not exist here. Served: alias, other." in answer.json()["error"]["message"]
    assert [s.body["model"] for s in endpoint.decode[0].requests] == ["alias"]


async def test_the_engines_own_rejection_reaches_the_client(start: Start) -> None:
    endpoint = await start()
    endpoint.decode[0].on_generate = broken(400)
    answer = await endpoint.post(SHORT)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "engine says 400"


async def test_a_prompt_over_the_context_is_not_prefilled(start: Start) -> None:
    def small(prefill: list[FakeEngine], decode: list[FakeEngine]) -> None:
        decode[0].max_model_len = 30

    endpoint = await start(before=small)
    endpoint.decode[0].on_generate = broken(400)
    answer = await endpoint.post(LONG)
    assert answer.status_code == 400
    assert endpoint.prefill[0].requests == []


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
        connection="x-hop, x-request-id",
        x_hop="1",
        expect="100-continue",
    )
    engines = (endpoint.prefill[0], endpoint.decode[0])
    assert [len(e.requests) for e in engines] == [1, 1]
    for engine in engines:
        headers = engine.requests[0].headers
        assert headers["authorization"] == "Bearer abc"
        assert headers["traceparent"] == "00-1-2-01"
        assert f"http://{headers['host']}" == engine.url
        assert headers["x-request-id"]
        assert headers.keys().isdisjoint({"x-tandem-explain", "x-hop", "expect"})


async def test_the_path_is_told_only_when_asked_for_and_enabled(start: Start) -> None:
    endpoint = await start(explain=True)
    told = (await endpoint.post(LONG, x_tandem_explain="1")).headers
    assert told["x-tandem-path"] == "disaggregated"
    assert told["x-tandem-prompt-tokens"] == str(len(str(LONG["prompt"])))
    assert told["x-tandem-prefill-url"] == endpoint.prefill[0].url
    assert told["x-tandem-decode-url"] == endpoint.decode[0].url
    assert float(told["x-tandem-prefill-ms"]) >= 0
    assert not [h for h in (await endpoint.post(LONG)).headers if h.startswith("x-tandem")]
    silent = await start()
    assert "x-tandem-path" not in (await silent.post(LONG, x_tandem_explain="1")).headers


async def test_what_is_told_of_a_prefill_is_left_out_when_the_decoder_computed_the_prompt(
    start: Start,
) -> None:
    endpoint = await start(explain=True)
    endpoint.decode[0].on_generate = lambda engine, seen, responder: (
        reads_kv(seen) and broken(500)(engine, seen, responder)
    )
    for body, reason in ((LONG, "handoff_failed"), (SHORT, "short"), ({**LONG, "n": 2}, "n")):
        answer = await endpoint.post(body, x_tandem_explain="1")
        told = {h: v for h, v in answer.headers.items() if h.startswith("x-tandem-")}
        assert (told["x-tandem-path"], told["x-tandem-reason"]) == ("decode_only", reason)
        assert not [h for h in told if "prefill" in h]
    assert len(endpoint.prefill[0].requests) == 1, "the first had been prefilled"


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


async def test_requests_are_spread_over_engines_in_turn(start: Start) -> None:
    endpoint = await start(prefill=2, decode=2)
    for _ in range(8):
        await endpoint.post(LONG)
    assert [len(e.requests) for e in endpoint.prefill] == [4, 4]
    assert [len(e.requests) for e in endpoint.decode] == [4, 4]


@pytest.mark.parametrize("known", [True, False])
async def test_what_no_engine_can_take_is_not_counted_and_gets_an_engines_own_answer(
    start: Start, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To tokenize it might take minutes; the engines' context, where they tell it, bounds what is counted."""
    monkeypatch.setattr("tandem.router.counting._LONGEST", 100)

    def short(prefill: list[FakeEngine], decode: list[FakeEngine]) -> None:
        for fake in (*prefill, *decode):
            fake.cards = [{"id": "m", **({"max_model_len": 100} if known else {})}]
            fake.on_generate = broken(400)

    endpoint = await start(before=short)
    asks = len(endpoint.decode[0].tokenized)
    for characters, counted in ((3000, 1), (3300, 0)):
        answer = await endpoint.post({"model": "m", "prompt": "x" * characters})
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, "engine says 400")
        assert len(endpoint.decode[0].tokenized) - asks == counted
        asks = len(endpoint.decode[0].tokenized)
    assert endpoint.prefill[0].requests == [] if known else len(endpoint.prefill[0].requests) == 1
    assert (await endpoint.outcomes())["decode_only", "over_context", "rejected"] == 1 + known


def context_of_100(prefill: list[FakeEngine], decode: list[FakeEngine]) -> None:
    for fake in (*prefill, *decode):
        fake.cards = [{"id": "m", "max_model_len": 100}]


IDS = list(range(60))
OVER = {
    "text": {"prompt": "x" * 100},
    "ids": {"prompt": 2 * IDS},
    "a chat": {"messages": [{"role": "user", "content": "x" * 100}]},
    "an answer": {"prompt": "x" * 60, "max_tokens": 101},
    "an answer to ids": {"prompt": IDS, "max_tokens": 101},
    "an answer in a chat": {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 101},
}


@pytest.mark.parametrize("what", OVER)
async def test_what_is_longer_than_the_context_gets_its_400_before_any_prefill(
    start: Start, what: str
) -> None:
    """In the engine's own words, which say how long the context is."""
    endpoint = await start(before=context_of_100)
    endpoint.decode[0].on_generate = broken(400)
    body = {"model": "m", **OVER[what]}
    answer = await endpoint.post(body, "/v1/chat/completions" if "messages" in body else "/v1/completions")
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "engine says 400")
    assert len(endpoint.decode[0].requests) == 1
    assert endpoint.prefill[0].requests == []


@pytest.mark.parametrize("prompt", ["x" * 60, IDS], ids=["text", "ids"])
async def test_prompt_and_answer_longer_than_the_context_together_are_no_mistake(
    start: Start, prompt: Any
) -> None:
    """vLLM cuts the answer to the room that there is."""
    endpoint = await start(before=context_of_100)
    answer = await endpoint.post({"model": "m", "prompt": prompt, "max_tokens": 60})
    assert answer.status_code == 200
    assert len(endpoint.prefill[0].requests) == 1
