"""SageMaker's paths: `/invocations`, where a body says which API it is for, and `/ping`."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import CHAT, LONG, SHORT, Start, StartLab
from .fakes import broken
from .lmcache_fakes import RIGHT, tag_of

CHATS, COMPLETIONS, INVOCATIONS = "/v1/chat/completions", "/v1/completions", "/invocations"
SHORT_CHAT = {"model": "m", "messages": []}
ADAPTER = "x_amzn_sagemaker_adapter_identifier"

APIS = pytest.mark.parametrize(
    ("body", "api"),
    [
        (SHORT, COMPLETIONS),
        (LONG, COMPLETIONS),
        (SHORT_CHAT, CHATS),
        (CHAT, CHATS),
        ({**CHAT, "prompt": "x"}, CHATS),  # as vLLM takes it
        ({"model": "m", "prompt_embeds": "x"}, COMPLETIONS),
        ({**LONG, "n": 2}, COMPLETIONS),
    ],
)


# The API that a body is for


@APIS
@pytest.mark.parametrize("stream", [False, True])
async def test_it_is_the_same_as_at_the_apis_own_path(
    start: Start, body: dict[str, Any], api: str, stream: bool
) -> None:
    """Answers, what engines get, and what is counted."""
    endpoint = await start(explain=True)
    seen, answers = [], []
    for path in (api, INVOCATIONS):
        answer = await endpoint.post({**body, "stream": stream}, path, x_tandem_explain="1")
        assert answer.status_code == 200
        told = {k: v for k, v in answer.headers.items() if not k.endswith(("-id", "-ms", "date"))}
        answers.append((answer.content, told))
        engines = (*endpoint.prefill, *endpoint.decode)
        legs = [
            (e.name, s.path, {**s.body, "kv_transfer_params": s.kv and 1})
            for e in engines
            for s in e.requests
        ]
        seen.append(legs)
        for engine in engines:
            engine.seen.clear()
    assert answers[0] == answers[1]
    assert seen[0] == seen[1]
    assert {path for _, path, _ in seen[1]} == {api}
    assert list((await endpoint.outcomes()).values()) == [2.0]


async def test_a_long_prompt_is_handed_over(start: Start) -> None:
    endpoint = await start()
    assert (await endpoint.post(LONG, INVOCATIONS)).status_code == 200
    (prefill,), (decode,) = endpoint.prefill[0].requests, endpoint.decode[0].requests
    assert prefill.path == decode.path == COMPLETIONS
    assert (decode.kv or {})["remote_request_id"] == prefill.headers["x-request-id"]
    assert await endpoint.outcomes() == {("disaggregated", "threshold", "ok"): 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_long_prompt_is_handed_over_by_lmcache(lab: StartLab, stream: bool) -> None:
    pd = await lab()
    if stream:
        received, whole = await pd.endpoint.stream(LONG, INVOCATIONS)
        assert whole
        assert b'"He"' in received
    else:
        answer = await pd.endpoint.post(LONG, INVOCATIONS)
        assert answer.json()["choices"][0]["text"] == RIGHT
    (prefill,), (decode,) = pd.prefiller.requests, pd.decoder.requests
    assert prefill.path == decode.path == COMPLETIONS
    assert tag_of(prefill.body) == tag_of(decode.body) is not None
    await pd.idle()


async def test_a_prefiller_that_fails_is_made_up_for(start: Start) -> None:
    endpoint = await start(max_attempts=1)
    endpoint.prefill[0].on_generate = broken(500)
    assert (await endpoint.post(CHAT, INVOCATIONS)).status_code == 200
    assert await endpoint.outcomes() == {("decode_only", "prefill_failed", "ok"): 1}


# Bodies that are for none


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            {},
            "'messages' (/v1/chat/completions) or 'prompt' (/v1/completions). It has neither, and",
        ),
        ({"model": "m", "input": "embed this"}, "It has neither"),
        ({"inputs": "hi", "parameters": {}}, "It has neither"),
        ({"query": "q", "documents": ["d"]}, "It has neither"),
        ({"requestType": "NEW_SESSION"}, "There are no stateful sessions here"),
        ({"requestType": "CLOSE", "prompt": "x"}, "There are no stateful sessions here"),
        ({**SHORT, "kv_transfer_params": {}}, "'kv_transfer_params' is set by the router"),
        ({**CHAT, "chat_template": "{{ x }}"}, "Templates sent by clients are not accepted"),
        ({**SHORT, "stream": "yes"}, "'stream' must be true or false"),
        (b'{"prompt": ', "The request body is not a JSON object"),
        (b"[]", "The request body is not a JSON object"),
        (b"", "The request body is not a JSON object"),
    ],
)
async def test_what_cannot_be_served_is_refused(start: Start, body: Any, said: str) -> None:
    endpoint = await start()
    answer = await endpoint.post(body, INVOCATIONS)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (400, 400, "invalid_request_error")
    assert said in error["message"]
    assert endpoint.decode[0].requests == endpoint.prefill[0].requests == []
    ((_, _, outcome),) = await endpoint.outcomes()
    assert outcome == "rejected"


async def test_engines_headers_are_refused_here_too(start: Start) -> None:
    endpoint = await start()
    assert (await endpoint.post(SHORT, INVOCATIONS, x_data_parallel_rank="1")).status_code == 400


# The model


async def test_sagemakers_header_names_the_adapter_whatever_the_body_says(start: Start) -> None:
    names = ("m", "sql:m")
    endpoint = await start(serves={"p0": names, "d0": names})
    for body in (LONG, {"prompt": LONG["prompt"]}, {**LONG, "model": "nope"}):
        assert (await endpoint.post(body, INVOCATIONS, **{ADAPTER: "sql"})).status_code == 200
    legs = [*endpoint.prefill[0].requests, *endpoint.decode[0].requests]
    assert [leg.body["model"] for leg in legs] == ["sql"] * 6
    assert legs[-1].body["prompt"] == LONG["prompt"]

    missing = await endpoint.post(SHORT, INVOCATIONS, **{ADAPTER: "other"})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_elsewhere_it_means_nothing(start: Start) -> None:
    endpoint = await start()
    assert (await endpoint.post(SHORT, COMPLETIONS, **{ADAPTER: "other"})).status_code == 200
    assert endpoint.decode[0].requests[0].body == SHORT


@pytest.mark.parametrize("header", [{}, {ADAPTER: ""}])
async def test_without_it_the_bodys_model_counts(start: Start, header: dict[str, str]) -> None:
    endpoint = await start()
    assert (await endpoint.post(SHORT, INVOCATIONS, **header)).status_code == 200
    assert endpoint.decode[0].requests[0].raw == b'{"model":"m","prompt":"hi","max_tokens":8}'
    assert (await endpoint.post({"prompt": "hi"}, INVOCATIONS, **header)).status_code == 200
    assert (await endpoint.post({**SHORT, "model": "nope"}, INVOCATIONS, **header)).status_code == 404


# The path


@pytest.mark.parametrize("path", ["/", "/my/model/predict", "/completions", "/v1"])
async def test_it_can_have_another_path(start: Start, path: str) -> None:
    endpoint = await start(invocation_path=path)
    assert (await endpoint.post(CHAT, path)).status_code == 200
    assert endpoint.decode[0].requests[0].path == CHATS
    assert (await endpoint.post(CHAT, INVOCATIONS)).status_code == 404
    assert (await endpoint.client.get(path)).headers["allow"] == "POST"
    assert (await endpoint.post(SHORT, COMPLETIONS)).status_code == 200
    refused = await endpoint.post({}, path)
    assert f"{path} takes nothing else" in refused.json()["error"]["message"]


async def test_the_path_of_an_api_is_that_apis(start: Start) -> None:
    """HyperPod's own examples have it so."""
    endpoint = await start(invocation_path=CHATS)
    assert (await endpoint.post(CHAT | SHORT, CHATS)).status_code == 200
    assert endpoint.decode[0].requests[0].path == CHATS, "whatever else the body has"
    assert (await endpoint.post(CHAT, CHATS, **{ADAPTER: "other"})).status_code == 200


async def test_a_page_stays_a_page(start: Start) -> None:
    endpoint = await start(invocation_path="/v1/models")
    assert (await endpoint.client.get("/v1/models")).json()["object"] == "list"
    assert (await endpoint.post(SHORT, "/v1/models")).status_code == 200
    assert (await endpoint.client.put("/v1/models")).headers["allow"] == "POST, GET, HEAD"


# /ping


async def test_ping_says_whether_requests_can_be_taken(start: Start) -> None:
    """What load balancers and SageMaker ask, so it is the same as /ready."""
    endpoint = await start()
    assert (await endpoint.client.get("/ping")).status_code == 200
    (decoder,) = endpoint.decode
    assert decoder.server is not None
    await decoder.server.close()
    await endpoint.post(SHORT)
    ping, ready = await endpoint.client.get("/ping"), await endpoint.client.get("/ready")
    assert ping.status_code == ready.status_code == 503
    assert ping.json() == ready.json()


async def test_ping_says_no_while_the_router_drains(start: Start) -> None:
    endpoint = await start()
    endpoint.app.draining = True
    assert (await endpoint.client.get("/ping")).status_code == 503
    assert (await endpoint.post(SHORT, INVOCATIONS)).status_code == 200, "those who ask anyway are served"
