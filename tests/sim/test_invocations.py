"""`/invocations` of the simulated engine, as vLLM 0.32 was seen to serve it, and a router of such engines."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.sim import virtual

from .helpers import FOX, engines, flags, in_virtual_time
from .matrix import Connector
from .matrix_bench import LONG, SHORT, bench, counted

PATH = "/invocations"
MESSAGES = [{"role": "user", "content": FOX}]
NO_SESSIONS = "Invalid payload. stateful sessions not enabled"


@in_virtual_time
async def test_the_body_says_which_api_it_is_for() -> None:
    async with engines(flags()) as e:
        for body, kind in (
            ({"messages": MESSAGES}, "chat.completion"),
            ({"messages": MESSAGES, "prompt": FOX}, "chat.completion"),
            ({"prompt": FOX}, "text_completion"),
            ({"messages": "no list", "prompt": FOX}, "text_completion"),
        ):
            answer = await e.ask(0, PATH, {**body, "max_tokens": 2})
            assert (answer.status, answer.json["object"]) == (200, kind)
        stream = await e.ask(0, PATH, {"messages": MESSAGES, "max_tokens": 2, "stream": True})
        assert stream.done
        assert stream.events[0]["object"] == "chat.completion.chunk"


@in_virtual_time
async def test_the_model_is_the_headers_and_never_the_bodys() -> None:
    async with engines(flags("--enable-lora", "--lora-modules", "sql=/adapters/sql")) as e:
        body = {"model": "sql", "prompt": FOX, "max_tokens": 2}
        assert (await e.ask(0, PATH, body)).json["model"] == "m"
        adapter = await e.ask(0, PATH, body, x_amzn_sagemaker_adapter_identifier="sql")
        assert adapter.json["model"] == "sql"
        assert (await e.ask(0, PATH, body, x_amzn_sagemaker_adapter_identifier="nope")).status == 404


ERRORS: list[tuple[Any, str, str]] = [
    (
        {},
        "BadRequestError",
        "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)",
    ),
    (
        {"prompt": 5},
        "BadRequestError",
        "Cannot find suitable handler for request. Expected one of: "
        "['ChatCompletionRequest', 'CompletionRequest']",
    ),
    ({"messages": None, "prompt": "a"}, "BadRequestError", "'NoneType' object is not iterable"),
    ({"requestType": "NEW_SESSION"}, "Bad Request", NO_SESSIONS),
    (
        {"requestType": "CLOSE", "prompt": "a"},
        "Bad Request",
        '[{"type":"extra_forbidden","loc":["prompt"],"msg":"Extra inputs are not permitted","input":"a"}]',
    ),
    (b"[]", "BadRequestError", "list indices must be integers or slices, not str"),
    (b"null", "BadRequestError", "argument of type 'NoneType' is not iterable"),
    (b'{"a": ', "Bad Request", "JSON decode error: Expecting value: line 1 column 7 (char 6)"),
    (
        b'{"a": "\xff"}',
        "BadRequestError",
        "'utf-8' codec can't decode byte 0xff in position 7: invalid start byte",
    ),
]


@pytest.mark.parametrize(("body", "kind", "said"), ERRORS)
def test_errors_are_in_vllms_words(body: Any, kind: str, said: str) -> None:
    async def ask() -> None:
        async with engines(flags()) as e:
            answer = await e.ask(0, PATH, body)
            error = answer.json["error"]
            assert (answer.status, error["type"], error["message"]) == (400, kind, said)

    virtual.run(ask())


@in_virtual_time
async def test_sessions_that_a_header_names_are_refused() -> None:
    async with engines(flags()) as e:
        answer = await e.ask(0, PATH, {"prompt": FOX}, x_amzn_sagemaker_session_id="s")
        assert answer.json["error"]["message"].startswith(NO_SESSIONS)
        assert (
            await e.ask(0, "/v1/completions", {"prompt": FOX}, x_amzn_sagemaker_session_id="s")
        ).status == 200


@pytest.mark.parametrize("connector", ["nixl", "lmcache"])
def test_behind_a_router_it_is_disaggregated_as_its_apis_are(connector: Connector) -> None:
    async def ask() -> None:
        async with bench(connector, 1) as pd:
            before = await pd.counters()
            for chat in (False, True):
                for stream in (False, True):
                    for tokens in (SHORT, LONG):
                        body = pd.request(tokens, stream=stream, chat=chat)
                        pd.legs.clear()
                        answer = await pd.ask(body, PATH)
                        assert answer.text == await pd.alone(body)
                        kinds = [kind for _, kind in pd.legs]
                        assert kinds == (["prefill", "decode"] if tokens == LONG else ["alone"])
            ended, failed = counted(await pd.counters() - before)
            assert ended == {("disaggregated", "threshold", "ok"): 4, ("decode_only", "short", "ok"): 4}
            assert not failed
            assert not await pd.end()

    virtual.run(ask())
