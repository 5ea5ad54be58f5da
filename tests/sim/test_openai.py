"""The OpenAI API: answers and errors field by field, as vLLM 0.32 was seen to give them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tandem.http import Origin

from .helpers import FOX, Engines, engines, flags, in_virtual_time

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def chat(text: str = "What is the capital of France?", **more: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 4,
        **more,
    }


@in_virtual_time
async def test_a_chat_completion() -> None:
    async with engines(flags()) as e:
        answer = await e.ask(0, CHAT, chat())
        assert answer.status == 200
        assert (b"server", b"uvicorn") in answer.headers
        told = answer.json
        assert list(told) == [
            "id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage",
            "prompt_logprobs", "prompt_token_ids", "prompt_text", "kv_transfer_params", "ec_transfer_params",
            "metrics",
        ]  # fmt: skip
        assert told["id"].startswith("chatcmpl-")
        assert (told["object"], told["model"]) == ("chat.completion", "m")
        (choice,) = told["choices"]
        assert choice["message"]["role"] == "assistant"
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
        assert told["usage"]["completion_tokens"] == 4
        assert told["usage"]["prompt_tokens_details"] == {
            "cached_tokens": 0,
            "created_cache_tokens": told["usage"]["prompt_tokens"] // 16 * 16,
            "multimodal_tokens": None,
        }


@in_virtual_time
async def test_a_streamed_chat_is_the_same_text_in_events() -> None:
    async with engines(flags()) as e:
        whole = await e.ask(0, CHAT, chat())
        options = {"include_usage": True}
        answer = await e.ask(0, CHAT, chat(stream=True, stream_options=options, return_token_ids=True))
        assert (b"content-type", b"text/event-stream; charset=utf-8") in answer.headers
        first, *middle, last = answer.events
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert len(first["prompt_token_ids"]) == last["usage"]["prompt_tokens"]
        assert [len(event["choices"][0]["token_ids"]) for event in middle] == [1] * 4
        assert [event["choices"][0]["finish_reason"] for event in middle] == [None, None, None, "length"]
        assert "stop_reason" not in middle[0]["choices"][0]
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 4
        assert "system_fingerprint" in last
        assert answer.done
        assert answer.text == whole.text


@in_virtual_time
async def test_a_stream_without_usage_names_the_fingerprint_in_its_last_event() -> None:
    async with engines(flags()) as e:
        answer = await e.complete(0, stream=True)
        assert ["system_fingerprint" in event for event in answer.events] == [False] * 7 + [True]
        assert all("usage" not in event for event in answer.events)


@in_virtual_time
async def test_usage_in_every_event_grows() -> None:
    async with engines(flags()) as e:
        options = {"include_usage": True, "continuous_usage_stats": True}
        answer = await e.ask(0, CHAT, chat(stream=True, stream_options=options, max_tokens=2))
        assert [event["usage"]["completion_tokens"] for event in answer.events] == [0, 1, 2, 2]


@in_virtual_time
async def test_completions_take_text_ids_and_lists() -> None:
    async with engines(flags()) as e:
        ids = (await e.ask(0, "/tokenize", {"model": "m", "prompt": FOX})).json["tokens"]
        text, by_ids = await e.complete(0, FOX), await e.complete(0, ids)
        assert text.text == by_ids.text
        both = (await e.complete(0, [FOX, "x"], n=2, temperature=1, return_token_ids=True)).json
        assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
        assert both["choices"][1]["prompt_token_ids"] == ids
        assert both["usage"]["completion_tokens"] == 32


@in_virtual_time
async def test_choices_differ_unless_sampling_is_greedy_and_a_seed_repeats_them() -> None:
    async with engines(flags()) as e:
        first = await e.complete(0, n=2, temperature=1, seed=3)
        one, two = (choice["text"] for choice in first.json["choices"])
        assert one != two
        again = await e.complete(0, n=2, temperature=1, seed=3)
        assert [choice["text"] for choice in again.json["choices"]] == [one, two]


@in_virtual_time
async def test_an_answer_ends_by_itself_and_its_last_token_counts() -> None:
    async with engines(flags(), answer_tokens=(5, 5)) as e:
        answer = await e.complete(0, max_tokens=60, return_token_ids=True)
        (choice,) = answer.json["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
        assert len(choice["token_ids"]) == answer.json["usage"]["completion_tokens"] == 6
        longer = await e.complete(0, max_tokens=9, ignore_eos=True)
        assert (longer.json["choices"][0]["finish_reason"], longer.json["usage"]["completion_tokens"]) == (
            "length",
            9,
        )
        least = await e.complete(0, max_tokens=60, min_tokens=20)
        assert least.json["usage"]["completion_tokens"] == 21


@in_virtual_time
async def test_stop_strings_end_an_answer_and_never_show() -> None:
    async with engines(flags()) as e:
        plain = (await e.complete(0)).text
        stop = plain.split()[3]
        for stream in (False, True):
            answer = await e.complete(0, stop=[stop], stream=stream)
            assert answer.text == plain[: plain.index(stop)]
            last = answer.events[-1] if stream else answer.json
            assert last["choices"][0]["finish_reason"] == "stop"
            assert last["choices"][0]["stop_reason"] == stop
        kept = await e.complete(0, stop=stop, include_stop_str_in_output=True)
        assert kept.text == plain[: plain.index(stop) + len(stop)]
        assert e.idle(0)


@in_virtual_time
async def test_a_stop_token_ends_an_answer_and_its_text_does_not_show() -> None:
    async with engines(flags()) as e:
        ids = (await e.complete(0, return_token_ids=True)).json["choices"][0]["token_ids"]
        answer = await e.complete(0, stop_token_ids=[ids[2]])
        (choice,) = answer.json["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ids[2])
        assert answer.json["usage"]["completion_tokens"] == ids.index(ids[2]) + 1


@in_virtual_time
async def test_log_probabilities() -> None:
    async with engines(flags()) as e:
        told = (await e.ask(0, CHAT, chat(logprobs=True, top_logprobs=2))).json["choices"][0]
        content = told["logprobs"]["content"]
        assert "".join(entry["token"] for entry in content) == told["message"]["content"]
        for entry in content:
            assert bytes(entry["bytes"]).decode() == entry["token"]
            assert entry["top_logprobs"][0]["token"] == entry["token"]
            assert len(entry["top_logprobs"]) == 2
        text = (await e.complete(0, logprobs=2)).json["choices"][0]
        lists = text["logprobs"]
        assert "".join(lists["tokens"]) == text["text"]
        assert lists["text_offset"] == [
            text["text"].index(t, o) for t, o in zip(lists["tokens"], lists["text_offset"], strict=True)
        ]
        assert [len(top) for top in lists["top_logprobs"]] == [2] * 8
        named = await e.ask(0, CHAT, chat(logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True))
        assert named.json["choices"][0]["logprobs"]["content"][0]["token"].startswith("token_id:")


@in_virtual_time
async def test_streamed_log_probabilities_are_those_of_the_whole_answer() -> None:
    async with engines(flags()) as e:
        whole = (await e.complete(0, logprobs=1)).json["choices"][0]["logprobs"]
        events = (await e.complete(0, logprobs=1, stream=True)).events
        parts = [event["choices"][0]["logprobs"] for event in events]
        for name in whole:
            assert [value for part in parts for value in part[name]] == whole[name]


@in_virtual_time
async def test_the_request_id_names_the_answer() -> None:
    async with engines(flags("--enable-request-id-headers")) as e:
        answer = await e.ask(0, CHAT, chat(), x_request_id="abc")
        assert answer.json["id"] == "chatcmpl-abc"
        assert (b"x-request-id", b"abc") in answer.headers


def refusal(body: Any, param: str | None, said: str, path: str = CHAT, kind: str = "BadRequestError") -> Any:
    return pytest.param(path, body, kind, param, said, id=said[:50])


INVALID = {"kind": "Bad Request"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
ERRORS = [
    refusal(b'{"model": ', "body.10", "JSON decode error", **INVALID),
    refusal(b"", "body", "Field required", **INVALID),
    refusal(b"[1]", "body", "Input should be a valid dictionary", **INVALID),
    refusal({"model": "m"}, "body.messages", "'missing'", **INVALID),
    refusal(chat(max_tokens="zz"), "body.max_tokens", "'int_parsing'", **INVALID),
    refusal(chat(temperature="zz"), "body.temperature", "'float_parsing'", **INVALID),
    refusal(chat(stop=3), "body.stop", "'string_type'", **INVALID),
    refusal(chat(max_tokens=0), "max_tokens", "max_tokens must be at least 1, got 0."),
    refusal(chat(max_tokens=5000), "max_tokens", "cannot be greater than max_model_len=2048"),
    refusal(chat(FOX * 300), "input_tokens", "your prompt contains at least 2049 input tokens"),
    refusal(chat(temperature=-1), "temperature", "temperature must be non-negative, got -1.0."),
    refusal(chat(top_p=2), "top_p", "top_p must be in (0, 1], got 2.0."),
    refusal(chat(n=0), None, "n must be at least 1, got 0."),
    refusal(chat(logprobs=True, top_logprobs=99), "logprobs", "greater than max allowed: 20"),
    refusal(chat(top_logprobs=2), "top_logprobs", "`logprobs` must be set to true"),
    refusal(chat(min_tokens=9), None, "less than or equal to max_tokens=4, got 9."),
    refusal(chat(stream_options={"include_usage": True}), "stream_options", "when `stream=True`"),
    refusal(chat(cache_salt=""), "cache_salt", "must be a non-empty string"),
    refusal({"model": "m", "messages": []}, None, "empty conversation"),
    refusal(chat(tools=TOOLS), None, "--enable-auto-tool-choice"),
    refusal({"model": "m"}, "prompt", "must be provided and non-empty", COMPLETIONS),
    refusal({"model": "m", "prompt": []}, None, "You must pass at least one prompt", COMPLETIONS),
    refusal({"model": "m", "prompt": [99999999]}, None, "Token id 99999999 is out of", COMPLETIONS),
    refusal({"model": "m", "prompt": [5] * 2048}, "max_tokens", "at least 1, got 0.", COMPLETIONS),
    refusal(chat(n=2), None, "n must be 1 when using greedy sampling, got 2."),
    refusal(chat(n=10**6), None, "n must be at most 16384"),
    refusal(chat(stop=5), "body.stop", "2 validation errors", **INVALID),
    refusal(chat(user=7), "body.user", "'string_type'", **INVALID),
    refusal(chat(response_format={}), "body.response_format.type", "6 validation errors", **INVALID),
    refusal(chat(logit_bias={"x": 1}), "logit_bias", "cannot be converted to integer token IDs: ['x']"),
    refusal(chat(tool_choice="required"), "tool_choice", "`tools` must be set"),
    refusal(chat(messages=None), None, "'NoneType' object is not iterable"),
    refusal({"prompt": [5, "a"]}, "body.prompt.1", "5 validation errors", COMPLETIONS, **INVALID),
    refusal({"prompt": ["a", ""]}, None, "The decoder prompt cannot be empty", COMPLETIONS),
    refusal({"prompt": [5] * 3000}, "input_tokens", "contains 3000 input tokens", COMPLETIONS),
    refusal({"prompt": "a " * 3000}, "input_tokens", "contains at least 2049 input tokens", COMPLETIONS),
    refusal({}, "body.prompt", "2 validation errors", "/tokenize", **INVALID),
    refusal({"model": "m"}, "body.tokens", "Field required", "/detokenize", **INVALID),
]


@pytest.mark.parametrize(("path", "body", "kind", "param", "said"), ERRORS)
def test_errors_are_worded_as_vllm_words_them(
    path: str, body: Any, kind: str, param: str | None, said: str
) -> None:
    @in_virtual_time
    async def ask() -> None:
        async with engines(flags()) as e:
            answer = await e.ask(0, path, body)
            error = answer.json["error"]
            assert (answer.status, error["code"]) == (400, 400)
            assert (error["type"], error["param"]) == (kind, param)
            assert said in error["message"]
            assert list(error) == ["message", "type", "param", "code"]

    ask()


@pytest.mark.parametrize("body", [{"prompt": [10**8]}, {"stop_token_ids": [-1]}, {"logprobs": 99}])
def test_what_the_engine_finds_wrong_is_told_within_a_stream(body: dict[str, Any]) -> None:
    @in_virtual_time
    async def ask() -> None:
        async with engines(flags()) as e:
            whole, stream = [
                await e.ask(0, COMPLETIONS, {"prompt": "x", **body, "stream": s}) for s in (False, True)
            ]
            assert (whole.status, stream.status, stream.done) == (400, 200, True)
            assert stream.events == [whole.json]

    ask()


@in_virtual_time
async def test_values_of_another_type_are_taken_where_they_can_be_read() -> None:
    async with engines(flags()) as e:
        answer = await e.complete(0, max_tokens="3", temperature="0", echo="no", ignore_eos=1)
        assert answer.json["usage"]["completion_tokens"] == 3


@in_virtual_time
async def test_a_prompt_can_be_had_back_alone() -> None:
    async with engines(flags()) as e:
        answer = (await e.complete(0, echo=True, max_tokens=0)).json
        assert answer["choices"][0]["text"] == FOX
        assert answer["usage"]["completion_tokens"] == 1, "vLLM computes one and throws it away"
        stream = await e.complete(0, echo=True, stream=True)
        first = stream.events[0]["choices"][0]
        assert first["text"].startswith(FOX)
        assert len(first["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]


@in_virtual_time
async def test_a_request_is_named_by_its_header_else_by_its_body() -> None:
    async with engines(flags()) as e:
        body = chat(request_id="body")
        assert (await e.ask(0, CHAT, body)).json["id"] == "chatcmpl-body"
        assert (await e.ask(0, CHAT, body, x_request_id="header")).json["id"] == "chatcmpl-header"


@in_virtual_time
async def test_an_answer_that_a_stop_string_ends_does_not_hold_up_others() -> None:
    """It ends within a step, and the next step begins once."""
    async with engines(flags("--max-num-batched-tokens", "64", "--max-num-seqs", "8")) as e:
        every = {"stop": [" "], "max_tokens": 50, "ignore_eos": True}
        answers = await asyncio.gather(
            *(e.complete(0, [i + 7] * 100, **(every if i % 2 else {})) for i in range(12))
        )
        assert {answer.status for answer in answers} == {200}
        assert e.idle(0)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize"])
def test_a_model_that_is_not_served_is_404(path: str) -> None:
    @in_virtual_time
    async def ask() -> None:
        async with engines(flags()) as e:
            answer = await e.ask(0, path, {**chat(), "prompt": "x", "model": "zz"})
            assert answer.status == 404
            assert answer.json["error"] == {
                "message": "The model `zz` does not exist. Valid aliases: m.",
                "type": "NotFoundError",
                "param": "model",
                "code": 404,
            }

    ask()


@in_virtual_time
async def test_a_body_that_is_not_json_by_its_type_is_refused() -> None:
    async with engines(flags()) as e:
        answer = await e.ask(0, CHAT, b"{}", content_type="text/plain")
        assert answer.status == 400
        assert "Unsupported Media Type" in answer.json["error"]["message"]


@in_virtual_time
async def test_other_paths() -> None:
    async with engines(flags("--served-model-name", "a", "b")) as e:
        assert (await e.ask(0, "/health")).status == 200
        assert (await e.ask(0, "/version")).json == {"version": "0.32.0"}
        cards = (await e.ask(0, "/v1/models")).json["data"]
        assert [card["id"] for card in cards] == ["a", "b"]
        assert cards[0]["max_model_len"] == 2048
        missing = await e.ask(0, "/nope")
        assert (missing.status, missing.json) == (404, {"detail": "Not Found"})
        slash = await e.ask(0, "/v1/models/")
        assert slash.status == 307
        assert (b"location", f"{e[0].url}/v1/models".encode()) in slash.headers
        wrong = await e.ask(0, CHAT)
        assert (wrong.status, wrong.json) == (405, {"detail": "Method Not Allowed"})
        assert (b"allow", b"POST") in wrong.headers
        tokens = (await e.ask(0, "/tokenize", {"prompt": FOX, "return_token_strs": True})).json
        assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
        assert (await e.ask(0, "/detokenize", {"tokens": tokens["tokens"]})).json == {"prompt": FOX}


@in_virtual_time
async def test_an_api_key_is_asked_for() -> None:
    async with engines(flags("--api-key", "secret")) as e:
        assert (await e.ask(0, CHAT, chat())).status == 401
        assert (await e.ask(0, CHAT, chat(), authorization="Bearer secret")).status == 200
        assert (await e.ask(0, "/health")).status == 200


async def leaves_early(e: Engines) -> None:
    body = b'{"model":"m","prompt":"x","max_tokens":1000,"ignore_eos":true,"stream":true}'
    headers = [(b"content-type", b"application/json")]
    async with e.client.stream(Origin.parse(e[0].url), "POST", b"/v1/completions", headers, body):
        assert not e.idle(0)


@in_virtual_time
async def test_a_client_that_leaves_frees_the_engine() -> None:
    async with engines(flags()) as e:
        await leaves_early(e)
        await asyncio.sleep(0.1)
        assert e.idle(0)
        assert await e.metric(0, "vllm:request_success_total", finished_reason="abort") == 0, (
            "vLLM counts no aborts"
        )


@in_virtual_time
async def test_any_served_name_is_taken_and_the_first_is_told_but_an_adapter_has_its_own() -> None:
    names = ("--served-model-name", "a", "b", "--lora-modules", "tuned=/adapters/tuned")
    async with engines(flags(*names)) as e:
        assert (await e.complete(0, model="b")).json["model"] == "a"
        assert (await e.complete(0, FOX * 4, model="tuned")).json["model"] == "tuned"
        again = await e.complete(0, FOX * 4, model="a")
        assert again.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, (
            "an adapter's KV is its own"
        )


@in_virtual_time
async def test_salts_keep_caches_apart() -> None:
    async with engines(flags()) as e:
        cached = []
        for salt in ("x", "y", "x"):
            answer = await e.complete(0, FOX * 4, cache_salt=salt)
            cached.append(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached == [0, 0, 32]
