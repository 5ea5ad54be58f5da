"""The allow-list: which paths and methods a router has, and what it says of all others."""

from __future__ import annotations

import pytest

from .conftest import LONG, SHORT, Start

PAGES = ("/health", "/ready", "/ready/decode", "/ping", "/metrics", "/v1/models")
GENERATION = ("/v1/completions", "/v1/chat/completions", "/invocations")


async def test_pages_answer_get_and_head(start: Start) -> None:
    endpoint = await start()
    for page in PAGES:
        got = await endpoint.client.get(page)
        head = await endpoint.client.head(page)
        assert (got.status_code, head.status_code) == (200, 200)
        assert got.content
        assert head.content == b""
        assert int(head.headers["content-length"]) > 0
        assert head.headers["content-type"] == got.headers["content-type"]


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "OPTIONS"])
async def test_generation_is_asked_for_by_post_alone(start: Start, method: str) -> None:
    endpoint = await start()
    for path in GENERATION:
        answer = await endpoint.client.request(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        if method != "HEAD":
            assert answer.json()["error"]["message"] == f"{path} does not take {method}."
    assert endpoint.decode[0].requests == []
    assert await endpoint.outcomes() == {}


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
async def test_pages_are_only_read(start: Start, method: str) -> None:
    endpoint = await start()
    for page in PAGES:
        answer = await endpoint.client.request(method, page, json=SHORT)
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1",
        "/v1/embeddings",
        "/v1/completions/",
        "/v1//completions",
        "/v1/completions%2F",
        "/v1/%63ompletions",
        "/%68ealth",
        "/tokenize",
        "/reset_prefix_cache",
        "/sleep",
        "/v1/load_lora_adapter",
        "/x/../sleep",
    ],
)
async def test_nothing_else_is_reachable(start: Start, path: str) -> None:
    endpoint = await start()
    for method in ("GET", "POST", "DELETE"):
        answer = await endpoint.client.request(method, path, json=SHORT)
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
        assert "allow" not in answer.headers
    assert endpoint.decode[0].requests == []


async def test_a_query_does_not_change_which_page_it_is(start: Start) -> None:
    endpoint = await start()
    assert (await endpoint.client.get("/health?x=%20")).status_code == 200
    assert (await endpoint.post(SHORT, "/v1/completions?api-version=1")).status_code == 200


async def test_models_are_those_of_the_decoders(start: Start) -> None:
    endpoint = await start()
    listed = (await endpoint.client.get("/v1/models")).json()
    assert listed == {"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 100_000}]}


async def test_ready_says_what_is_missing(start: Start) -> None:
    endpoint = await start()
    assert (await endpoint.client.get("/ready")).json() == {"ready": True, "reason": None, "unproved": []}
    (decoder,) = endpoint.decode
    assert decoder.server is not None
    await decoder.server.close()
    await endpoint.post(SHORT)
    answer = await endpoint.client.get("/ready")
    assert answer.status_code == 503
    assert decoder.url in answer.json()["reason"]
    assert (await endpoint.client.get("/ready/decode")).json() == answer.json()
    assert (await endpoint.client.get("/health")).status_code == 200, "the router itself is well"


async def test_requests_are_answered_before_hand_offs_are_proved(start: Start) -> None:
    endpoint = await start()
    (prefiller,) = endpoint.prefill
    assert prefiller.server is not None
    await prefiller.server.close()
    await endpoint.post(LONG)
    assert (await endpoint.client.get("/ready")).status_code == 503
    answer = await endpoint.client.get("/ready/decode")
    assert answer.status_code == 200
    assert answer.json()["ready"] is True
