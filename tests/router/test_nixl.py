"""The NIXL connector without sockets: what each leg's body says, field by field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.http import Origin
from tandem.router.body import Body
from tandem.router.classify import Api
from tandem.router.connectors import Nixl, PrefillFailed
from tandem.router.connectors.nixl import NixlAttempt
from tandem.router.engines import Engine, EngineRole

APIS = pytest.mark.parametrize("api", list(Api))


def prefill(api: Api, **fields: Any) -> dict[str, Any]:
    """The prefill leg's body for a client's fields."""
    body: dict[str, Any] = json.loads(attempt().prepare_prefill(api, Body.parse(json.dumps(fields).encode())))
    return body


def attempt() -> NixlAttempt:
    url = "http://127.0.0.1:8081"
    return Nixl().attempt(Engine(url, EngineRole.DECODE, Origin.parse(url)))


def handed_over(reply: bytes) -> NixlAttempt:
    begun = attempt()
    begun.on_prefill_reply(reply)
    return begun


@APIS
def test_the_prefill_leg_asks_for_one_token_and_a_hand_off(api: Api) -> None:
    leg = prefill(
        api, model="m", prompt="x", stream=True, stream_options={"include_usage": True}, max_tokens=64
    )
    assert leg["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    assert leg["max_tokens"] == 1
    assert leg["stream"] is False
    assert "stream_options" not in leg


def test_a_chat_that_names_its_length_in_the_newer_way_is_cut_too() -> None:
    leg = prefill(Api.CHAT, messages=[], max_completion_tokens=500)
    assert (leg["max_tokens"], leg["max_completion_tokens"]) == (1, 1)


def test_a_completion_gets_no_field_that_only_chats_know() -> None:
    assert "max_completion_tokens" not in prefill(Api.COMPLETIONS, prompt="x")
    assert "tool_choice" not in prefill(Api.COMPLETIONS, prompt="x")


@APIS
def test_its_one_token_ends_by_length_whatever_the_client_set(api: Api) -> None:
    """Parameters come back only from a request that was ended by its length."""
    leg = prefill(
        api, prompt="x", min_tokens=32, ignore_eos=False, stop=["a"], stop_token_ids=[7], max_tokens=None
    )
    assert (leg["min_tokens"], leg["ignore_eos"], leg["max_tokens"]) == (1, True, 1)
    assert leg.keys().isdisjoint({"stop", "stop_token_ids"})


@APIS
@pytest.mark.parametrize(
    "field",
    [
        "logprobs",
        "top_logprobs",
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "return_token_ids",
    ],
)
def test_what_shapes_only_the_answer_is_left_out(api: Api, field: str) -> None:
    assert field not in prefill(api, prompt="x", **{field: 1})


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        ("required", "auto"),
        ({"type": "function", "function": {"name": "f"}}, "auto"),
        ("auto", "auto"),
        ("none", "none"),
        (None, None),
    ],
)
def test_a_forced_tool_call_is_not_forced_on_one_token_and_the_tools_stay(choice: Any, sent: Any) -> None:
    leg = prefill(Api.CHAT, messages=[], tools=TOOLS, tool_choice=choice)
    assert (leg["tool_choice"], leg["tools"]) == (sent, TOOLS)


SAME = {
    "model": "m:lora",
    "messages": [{"role": "user", "content": "hi"}],
    "prompt": "hi",
    "tools": TOOLS,
    "chat_template_kwargs": {"enable_thinking": False},
    "documents": [{"text": "d"}],
    "add_generation_prompt": False,
    "continue_final_message": True,
    "add_special_tokens": True,
    "mm_processor_kwargs": {"x": 1},
    "cache_salt": "s",
    "priority": 3,
    "seed": 7,
    "temperature": 0.3,
    "truncate_prompt_tokens": 100,
    "reasoning_effort": "low",
    "unknown": [1, 2],
}


@APIS
@pytest.mark.parametrize("field", SAME)
def test_what_shapes_the_prompt_or_its_cache_key_is_the_same(api: Api, field: str) -> None:
    assert prefill(api, **SAME)[field] == SAME[field]


def test_numbers_of_the_client_stay_as_written() -> None:
    leg = attempt().prepare_prefill(
        Api.COMPLETIONS, Body.parse(b'{"prompt":"x","temperature":0.10,"seed":1E2}')
    )
    assert b'"temperature":0.10,"seed":1E2' in leg


PARAMS = (
    b'{"do_remote_prefill": true, "remote_block_ids": [[1, 2], [3]], "remote_engine_id":"e\\u00e9",'
    b' "remote_request_id": "r", "remote_port": 5600, "x": 1.0e0, "tp_size":1}'
)


def reply(params: bytes = PARAMS) -> bytes:
    return b'{"id": "c", "choices": [], "usage": {"prompt_tokens": 9}, "kv_transfer_params": %s}' % params


def test_the_decode_leg_is_the_clients_body_plus_the_parameters_verbatim() -> None:
    client = b'{"prompt":"x","temperature":0.10,"stream":true,"max_tokens":64,"stop":["a"],"min_tokens":3}'
    leg = handed_over(reply()).prepare_decode(Api.COMPLETIONS, Body.parse(client))
    assert leg == client[:-1] + b',"kv_transfer_params":' + PARAMS + b"}"


@given(st.dictionaries(st.text("abc_", min_size=1), st.integers() | st.text() | st.none(), min_size=1))
def test_parameters_are_opaque(params: dict[str, Any]) -> None:
    """Whatever a later vLLM puts there is passed on."""
    text = json.dumps(params).encode()
    leg = handed_over(reply(text)).prepare_decode(Api.CHAT, Body.parse(b"{}"))
    assert leg == b'{"kv_transfer_params":' + text + b"}"


def test_parameters_are_spent_once() -> None:
    """An engine accepts stale ones with another prompt and answers from the wrong KV."""
    begun = handed_over(reply())
    body = Body.parse(b"{}")
    begun.prepare_decode(Api.CHAT, body)
    with pytest.raises(RuntimeError, match="once"):
        begun.prepare_decode(Api.CHAT, body)


def test_there_is_no_decode_leg_before_the_prefill_legs_answer() -> None:
    begun = attempt()
    assert begun.missing == "the prefill leg's answer"
    with pytest.raises(RuntimeError, match="after the prefill leg's answer"):
        begun.prepare_decode(Api.CHAT, Body.parse(b"{}"))
    begun.on_prefill_reply(reply())
    assert begun.missing is None


def test_nothing_is_reserved_and_nothing_is_left_to_release() -> None:
    """vLLM queues what has no room, and a lease that nobody takes ends by itself."""
    url = "http://127.0.0.1:8081"
    assert Nixl().reservation(100_000, Engine(url, EngineRole.DECODE, Origin.parse(url))) == ()
    assert attempt().prepare_release(Api.CHAT, Body.parse(b"{}")) is None


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b'{"choices": [], "kv_transfer_params": null}', "no_kv_params"),
        (b'{"choices": []}', "no_kv_params"),
        (b"", "bad_reply"),
        (b"[]", "bad_reply"),
        (b"{", "bad_reply"),
        (b'{"kv_transfer_params": {}', "bad_reply"),
    ],
)
def test_an_answer_without_a_hand_off_is_told_by_its_reason(answer: bytes, reason: str) -> None:
    with pytest.raises(PrefillFailed) as failure:
        handed_over(answer)
    assert failure.value.reason == reason
