"""Requests whose decode leg an engine would reject are not worth a prefill; all others are."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tandem.http import Responder
from tandem.router.body import Body
from tandem.router.classify import Api, why_decode_only
from tandem.router.connectors import Nixl
from tandem.router.plausible import is_plausible
from tandem.sim import virtual

from ..sim.helpers import Answer, engines, flags
from .conftest import Start
from .fakes import JSON, FakeEngine, Seen, local_counter

CONTEXT = 2048  # of the simulated engines
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "f"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": {"type": "object"}}}

# What OpenAI's clients and others send every day.
ORDINARY: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.95, "presence_penalty": -0.5, "frequency_penalty": 1, "seed": 7},
    {"max_tokens": 256},
    {"max_tokens": 256.0, "temperature": 1, "top_p": 1, "top_k": -1},
    {"max_tokens": None, "stop": None, "stream": None, "stream_options": None, "logprobs": None},
    {"max_tokens": CONTEXT},  # cut to what there is room for
    {"stream": True, "stream_options": {"include_usage": True}},
    {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": False}},
    {"stream": False, "stream_options": {}},
    {"stop": "\n"},
    {"stop": ["a", "b", "c", "d"], "include_stop_str_in_output": True},
    {"stop": []},
    {"stop_token_ids": [1, 2.0], "ignore_eos": True, "min_tokens": 5},
    {"logit_bias": {"50": -100, "51": 0.5}},
    {"response_format": {"type": "text"}},
    {"response_format": {"type": "json_object"}},
    {"response_format": SCHEMA},
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"structured_outputs": {"regex": "a+", "json": None}},
    {"user": "somebody", "unknown": {"to": ["engines"]}},
    {"return_token_ids": True},
]
ORDINARY_CHATS: list[dict[str, Any]] = [
    {"max_completion_tokens": 64},
    {"max_completion_tokens": 64, "max_tokens": 0},  # the older field does not count beside the newer
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 20},
    {"logprobs": False, "top_logprobs": 0},
    {"tools": [FUNCTION]},
    {"tools": [FUNCTION], "tool_choice": "auto", "parallel_tool_calls": True},
    {"tools": [FUNCTION], "tool_choice": "required"},
    {"tools": [FUNCTION], "tool_choice": NAMED},
    {"tools": None, "tool_choice": None},
    {"tool_choice": "none"},
    {"min_tokens": 500},
    {"reasoning_effort": "low"},
]
ORDINARY_COMPLETIONS: list[dict[str, Any]] = [
    {"logprobs": 0},
    {"logprobs": 5},
    {"logprobs": True},
    {"max_tokens": 5, "max_completion_tokens": 0},  # not a field of completions
    {"min_tokens": 16},
    {"top_logprobs": 3},
]

# Faults that the prefill leg does not have.
FAULTY: list[dict[str, Any]] = [
    {"max_tokens": 0},
    {"max_tokens": -1},
    {"max_tokens": CONTEXT + 1},
    {"max_tokens": 1.5},
    {"max_tokens": "many"},
    {"min_tokens": 5, "max_tokens": 4},
    {"min_tokens": -1},
    {"min_tokens": None},
    {"min_tokens": CONTEXT, "max_tokens": CONTEXT},  # the prompt needs room, too
    {"ignore_eos": None},
    {"stream_options": {"include_usage": True}},
    {"stream": True, "stream_options": {"include_usage": "perhaps"}},
    {"stream": True, "stream_options": [1]},
    {"stop": ""},
    {"stop": ["a", ""]},
    {"stop": list("abcde")},
    {"stop": 5},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": ["a"]},
    {"response_format": "json"},
    {"response_format": {"type": "xml"}},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "json_schema", "json_schema": {}}},
    {"return_token_ids": "perhaps"},
]
FAULTY_CHATS: list[dict[str, Any]] = [
    {"max_completion_tokens": 0, "max_tokens": 5},
    {"max_completion_tokens": CONTEXT + 1},
    {"min_tokens": CONTEXT},
    {"logprobs": 5},
    {"top_logprobs": 5},
    {"logprobs": True, "top_logprobs": 21},
    {"logprobs": True, "top_logprobs": -2},
    {"tools": [FUNCTION], "tool_choice": "any"},
    {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "g"}}},
    {"tools": [FUNCTION], "tool_choice": {"type": "auto"}},
]
FAULTY_COMPLETIONS: list[dict[str, Any]] = [
    {"min_tokens": 17},  # a completion has 16 tokens unless it asks for more
    {"logprobs": 21},
    {"logprobs": "all"},
]
# The same, in fields that the simulator does not know.
FAULTY_UNSIMULATED: list[dict[str, Any]] = [
    {"structured_outputs": {}},
    {"structured_outputs": {"regex": "a", "choice": ["a"]}},
    {"structured_outputs": "json"},
    {"logprob_token_ids": [1]},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "s"}}},
]


def of(
    both: list[dict[str, Any]], chats: list[dict[str, Any]], completions: list[dict[str, Any]]
) -> list[tuple[Api, dict[str, Any]]]:
    return [(api, fields) for api in Api for fields in both] + [
        *((Api.CHAT, fields) for fields in chats),
        *((Api.COMPLETIONS, fields) for fields in completions),
    ]


GOOD = of(ORDINARY, ORDINARY_CHATS, ORDINARY_COMPLETIONS)
BAD = of(FAULTY, FAULTY_CHATS, FAULTY_COMPLETIONS)
TEXT = "one two three " * 10


def request(api: Api, fields: dict[str, Any]) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": TEXT}]} if api is Api.CHAT else {"prompt": TEXT}
    return {"model": "m", **prompt, **fields}


def trusted(api: Api, fields: dict[str, Any], tokens: int = 30) -> bool:
    return is_plausible(api, Body.parse(json.dumps(request(api, fields)).encode()), tokens, CONTEXT)


@pytest.mark.parametrize(("api", "fields"), GOOD)
def test_ordinary_requests_are_not_doubted(api: Api, fields: dict[str, Any]) -> None:
    assert trusted(api, fields)


@pytest.mark.parametrize(("api", "fields"), BAD + of(FAULTY_UNSIMULATED, [], []))
def test_requests_that_a_decoder_would_reject_are_doubted(api: Api, fields: dict[str, Any]) -> None:
    assert not trusted(api, fields)


@pytest.mark.parametrize(
    "text", ["[" * 5000 + "]" * 5000, '{"a":' * 5000 + "1" + "}" * 5000, '"\\ud800"', "1e999"], ids=range(4)
)
@pytest.mark.parametrize("field", ["structured_outputs", "stream_options", "max_tokens"])
def test_what_cannot_be_read_is_doubted(field: str, text: str) -> None:
    """It is as the client wrote it."""
    assert not is_plausible(Api.CHAT, Body({field: msgspec.Raw(text.encode())}), None, None)


def test_where_nothing_is_known_of_prompt_or_context_a_request_is_trusted() -> None:
    body = Body.parse(b'{"max_tokens": 1000000, "min_tokens": 999999}')
    assert is_plausible(Api.CHAT, body, None, None)
    assert is_plausible(Api.CHAT, body, 5, None)
    assert not is_plausible(Api.CHAT, body, None, 4096)


# Against an engine


def asked(pairs: list[tuple[Api, dict[str, Any]]]) -> list[tuple[Answer, Answer]]:
    """What a simulated engine says to requests, and to their prefill legs."""

    async def ask() -> list[tuple[Answer, Answer]]:
        async with engines(
            flags("--enable-auto-tool-choice", "--tool-call-parser", "hermes", role="kv_both")
        ) as e:
            answers = []
            for api, fields in pairs:
                body = request(api, fields)
                leg = prefill_leg(api, fields)
                answers.append((await e.ask(0, api.value, body), await e.ask(0, api.value, leg)))
            return answers

    return virtual.run(ask())


def accepted(answer: Answer) -> bool:
    return answer.status == 200 and b'"error"' not in answer.body


def prefill_leg(api: Api, fields: dict[str, Any]) -> bytes:
    body = Body.parse(json.dumps(request(api, fields)).encode())
    return Nixl().attempt(None).prepare_prefill(api, body)  # type: ignore[arg-type]


def test_what_the_simulator_does_not_know_is_not_in_the_prefill_leg_either() -> None:
    for api, fields in of(FAULTY_UNSIMULATED, [], []):
        assert not fields.keys() & json.loads(prefill_leg(api, fields)).keys()


def test_an_engine_takes_the_ordinary_requests() -> None:
    for (api, fields), (whole, leg) in zip(GOOD, asked(GOOD), strict=True):
        assert accepted(whole), (api, fields, whole.body)
        assert accepted(leg), (api, fields, leg.body)


def test_an_engine_rejects_the_faulty_ones_and_computes_their_prefill_legs() -> None:
    """So a router that did not doubt them would have the work done for nothing."""
    for (api, fields), (whole, leg) in zip(BAD, asked(BAD), strict=True):
        assert not accepted(whole), (api, fields)
        assert accepted(leg), (api, fields, leg.body)


NUMBERS = st.sampled_from([None, -1, 0, 1, 2, 2.0, 2.5, 5, 16, 17, 20, 21, CONTEXT, CONTEXT + 1, "3"])
FLAGS = st.sampled_from([None, True, False, 1, "true", "x"])
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": NUMBERS,
    "max_completion_tokens": NUMBERS,
    "min_tokens": NUMBERS,
    "ignore_eos": FLAGS,
    "stream": st.sampled_from([None, True, False]),
    "stream_options": st.none() | st.fixed_dictionaries({}, optional={"include_usage": FLAGS}),
    "stop": st.none() | st.lists(st.sampled_from(["", "zz", "yy"]), max_size=5) | st.sampled_from(["", "zz"]),
    "stop_token_ids": st.none() | st.lists(st.integers(-1, 5), max_size=2),
    # vLLM takes "3" for 3 in all fields but these.
    "logprobs": (NUMBERS | FLAGS).filter(lambda value: not isinstance(value, str)),
    "top_logprobs": NUMBERS.filter(lambda value: not isinstance(value, str)),
    "response_format": st.sampled_from([None, {"type": "text"}, {"type": "json_object"}, SCHEMA, {}]),
    "return_token_ids": FLAGS,
    "temperature": st.sampled_from([None, 0, 0.5, 2, 2.5, -1, "x"]),
    "logit_bias": st.sampled_from([None, {"5": -100}, {"5": 1.5}, {"x": 1}]),
    "top_p": st.sampled_from([None, 0, 0.5, 1]),
}


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(Api),
            st.lists(st.sampled_from(sorted(FIELDS)), max_size=4, unique=True).flatmap(
                lambda names: st.fixed_dictionaries({name: FIELDS[name] for name in names})
            ),
        ),
        min_size=1,
        max_size=12,
    )
)
@example([(Api.CHAT, {"ignore_eos": "true"}), (Api.COMPLETIONS, {"logprobs": 2.0, "min_tokens": "3"})])
def test_a_request_is_doubted_where_an_engine_computes_its_prompt_and_then_rejects_it(
    pairs: list[tuple[Api, dict[str, Any]]],
) -> None:
    for (api, fields), (whole, leg) in zip(pairs, asked(pairs), strict=True):
        if why_decode_only(api, Body.parse(json.dumps(request(api, fields)).encode())) is not None:
            continue
        if accepted(whole):
            assert trusted(api, fields), (api, fields)
        elif accepted(leg):
            assert not trusted(api, fields), (api, fields, whole.body)


# In a router


def choosy(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
    """An engine that rejects what asks for more than eight tokens."""
    if seen.body.get("max_tokens", 0) <= 8:
        return False
    responder.send(400, JSON, b'{"error":{"message":"max_tokens cannot be that","code":400}}')
    return True


async def test_a_doubtful_request_costs_no_prefill_and_the_decoders_own_words_reach_the_client(
    start: Start,
) -> None:
    endpoint = await start(local=local_counter())
    for engine in (*endpoint.prefill, *endpoint.decode):
        engine.on_generate = choosy
    prompt = {"model": "m", "prompt": "a prompt that is longer than the threshold"}
    answer = await endpoint.post({**prompt, "max_tokens": 100_001})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "max_tokens cannot be that")
    assert endpoint.prefill[0].requests == []
    assert [s.kv for s in endpoint.decode[0].requests] == [None]
    # A doubt that was needless costs nothing but the prefiller.
    answer = await endpoint.post({**prompt, "max_tokens": 8, "stream_options": {"include_usage": True}})
    assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "Hello")
    assert endpoint.prefill[0].requests == []
    assert await endpoint.outcomes() == {
        ("decode_only", "doubtful", "rejected"): 1,
        ("decode_only", "doubtful", "ok"): 1,
    }
    assert await endpoint.failures() == {}


async def test_a_request_without_room_for_its_least_answer_costs_no_prefill(start: Start) -> None:
    def small(prefill: list[FakeEngine], decode: list[FakeEngine]) -> None:
        decode[0].max_model_len = 100

    endpoint = await start(local=local_counter(), before=small)
    body = {"model": "m", "prompt": "x" * 60, "max_tokens": 50, "min_tokens": 40}
    await endpoint.post(body)
    assert endpoint.prefill[0].requests != []
    await endpoint.post({**body, "min_tokens": 41})
    assert len(endpoint.prefill[0].requests) == 1
    assert (await endpoint.outcomes())["decode_only", "doubtful", "ok"] == 1
