"""A router with API keys, over HTTP: who is let in, to what, how much, and that no key is told to anybody."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.config import RouterConfig
from tandem.http import Responder
from tandem.router.app import running

from .conftest import CHAT, LONG, SHORT, Endpoint, Start
from .fakes import DONE, ROLE, SSE, FakeEngine, Seen, broken, chunk, eventually, hang, local_counter
from .key_fakes import KEY_A, KEY_B, A, B, listed, replace

GUARDED = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/other", "/invocations")
OPEN = ("/health", "/ready", "/ready/decode", "/ping", "/metrics")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A file with the keys of `a` and `b`, without limits."""
    path = tmp_path / "keys.yaml"
    replace(path, listed(a={}, b={}))
    return path


def limited(path: Path, **limits: Any) -> str:
    """`a` has limits, `b` has none."""
    replace(path, listed(a=limits, b={}))
    return str(path)


async def refused(endpoint: Endpoint) -> dict[tuple[str, ...], float]:
    return await endpoint.samples("tandem_api_key_refused_total", "key", "reason")


async def tokens(endpoint: Endpoint) -> tuple[float, float]:
    """Those of `a`: of prompts, and generated."""
    found = await endpoint.samples("tandem_api_key_tokens_total", "key", "kind")
    return found["a", "prompt"], found["a", "generated"]


async def test_without_a_file_everybody_may_call(start: Start) -> None:
    endpoint = await start()
    assert (await endpoint.post(SHORT)).status_code == 200
    assert (await endpoint.post(SHORT, **KEY_A)).status_code == 200
    assert (await endpoint.client.get("/v1/models")).status_code == 200
    assert "tandem_api_key" not in (await endpoint.client.get("/metrics")).text


async def test_with_a_file_only_who_has_a_key(start: Start, keys: Path) -> None:
    endpoint = await start(api_keys_file=str(keys))
    for path in GUARDED:
        for method in ("GET", "POST", "DELETE"):
            for key, challenge in (
                ({}, "Bearer"),
                ({"authorization": "Bearer x"}, 'Bearer error="invalid_token"'),
            ):
                answer = await endpoint.client.request(method, path, headers={**key, "x-request-id": "mine"})
                assert answer.status_code == 401
                assert answer.headers["www-authenticate"] == challenge
                assert answer.headers["x-request-id"] == "mine"
                error = answer.json()["error"]
                assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
                assert error["param"] is None
    assert endpoint.decode[0].requests == []
    assert await refused(endpoint) == {("", "no_key"): 15, ("", "unknown_key"): 15}
    for path in OPEN:
        assert (await endpoint.client.get(path)).status_code == 200
    assert (await endpoint.client.get("/nothing")).status_code == 404
    for body, path in ((SHORT, GUARDED[0]), (LONG, GUARDED[0]), (CHAT, GUARDED[1]), (SHORT, "/invocations")):
        assert (await endpoint.post(body, path, **KEY_A)).status_code == 200
    assert (await endpoint.client.get("/v1/models", headers=KEY_B)).status_code == 200
    assert (await endpoint.client.get("/v1/other", headers=KEY_A)).status_code == 404
    assert await endpoint.samples("tandem_api_key_requests_total", "key") == {("a",): 4, ("b",): 0}


async def test_an_escaped_path_is_no_way_around(start: Start, keys: Path) -> None:
    endpoint = await start(api_keys_file=str(keys))
    for path in ("/%76%31/completions", "/v1/%63ompletions", "/%69nvocations"):
        assert (await endpoint.post(SHORT, path)).status_code == 401
        assert (await endpoint.post(SHORT, path, **KEY_A)).status_code == 404


async def test_another_name_of_invocations_is_guarded_too(start: Start, keys: Path) -> None:
    endpoint = await start(api_keys_file=str(keys), invocation_path="/call")
    assert (await endpoint.post(SHORT, "/call")).status_code == 401
    assert (await endpoint.post(SHORT, "/call", **KEY_A)).status_code == 200


async def test_requests_in_a_second_are_limited_for_each_key(start: Start, keys: Path) -> None:
    endpoint = await start(api_keys_file=limited(keys, requestsPerSecond=0.001, burst=2))
    for _ in range(2):
        assert (await endpoint.post(SHORT, **KEY_A)).status_code == 200
    answer = await endpoint.post(LONG, x_request_id="mine", **KEY_A)
    assert (answer.status_code, answer.headers["x-request-id"]) == (429, "mine")
    assert 900 < int(answer.headers["retry-after"]) <= 1000
    assert answer.json()["error"] == {
        "message": f"Your key has reached its limit: it may send 0.001 requests per second. Try again in "
        f"{answer.headers['retry-after']} s.",
        "type": "requests",
        "param": None,
        "code": "rate_limit_exceeded",
    }
    assert (await endpoint.post(SHORT, **KEY_B)).status_code == 200
    assert await refused(endpoint) == {("a", "requests"): 1}
    assert (await endpoint.outcomes())["none", "limit", "rejected"] == 1
    assert len(endpoint.decode[0].requests) == 3
    assert (await endpoint.client.get("/v1/models", headers=KEY_A)).status_code == 200, "they cost nothing"


async def test_requests_at_once_are_limited_and_end_however_they_end(start: Start, keys: Path) -> None:
    endpoint = await start(api_keys_file=limited(keys, concurrentRequests=2))
    (decoder,) = endpoint.decode
    running = 'tandem_api_key_requests_running{key="a"}'
    decoder.on_generate = hang
    waiting = [asyncio.create_task(endpoint.post(SHORT, **KEY_A)) for _ in range(2)]

    async def both() -> bool:
        return len(decoder.requests) == 2

    await eventually(both)
    answer = await endpoint.post(SHORT, **KEY_A)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert "2 requests of it run" in answer.json()["error"]["message"]
    assert await endpoint.metric(running) == 2
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)

    async def none() -> bool:
        return await endpoint.metric(running) == 0

    await eventually(none)
    for answers in (broken(400), broken(500), None):
        decoder.on_generate = answers
        for _ in range(3):
            await endpoint.post(SHORT, **KEY_A)
        await endpoint.post(b"{", **KEY_A)
        assert await endpoint.metric(running) == 0
    assert await refused(endpoint) == {("a", "concurrent"): 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_are_those_counted_and_those_reported(start: Start, keys: Path, stream: bool) -> None:
    endpoint = await start(api_keys_file=limited(keys, tokensPerMinute=1000))

    def answer(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        if (seen.kv or {}).get("do_remote_decode"):
            return False
        usage = b'data: {"choices":[],"usage":{"prompt_tokens":999,"completion_tokens":200}}\n\n'
        if seen.body.get("stream"):
            responder.start(200, SSE)
            for part in (chunk("a"), usage, DONE):
                responder.write(part)
            responder.finish()
        else:
            text = b'{"choices":[{"text":"x"}],"usage":{"prompt_tokens":999,"completion_tokens":200}}'
            responder.send(200, [(b"content-type", b"application/json")], text)
        return True

    endpoint.decode[0].on_generate = answer
    for n, body in enumerate((SHORT, LONG), 1):
        assert (await endpoint.post({**body, "stream": stream}, **KEY_A)).status_code == 200
        assert (await tokens(endpoint))[1] == 200 * n
    counted = len(str(SHORT["prompt"])) + len(str(LONG["prompt"]))
    assert await tokens(endpoint) == (counted, 400)
    big = {**SHORT, "prompt": "x" * 700}
    refusal = await endpoint.post(big, **KEY_A)
    assert refusal.status_code == 429
    assert refusal.json()["error"]["type"] == "tokens"
    lacks = 700 - (1000 - counted - 400)
    assert int(refusal.headers["retry-after"]) == pytest.approx(lacks * 60 / 1000, abs=2)
    assert await refused(endpoint) == {("a", "tokens"): 1}
    assert (await endpoint.outcomes())["none", "limit", "rejected"] == 1
    assert (await endpoint.post(SHORT, **KEY_A)).status_code == 200, "a short one still has room"
    assert (await endpoint.post(big, **KEY_B)).status_code == 200


async def test_prompts_of_a_key_with_a_limit_are_counted_where_no_others_are(
    start: Start, keys: Path
) -> None:
    endpoint = await start(prefill=0, api_keys_file=limited(keys, tokensPerMinute=1000))
    (decoder,) = endpoint.decode
    decoder.tokenized.clear()
    large = {**SHORT, "prompt": "x" * 600}
    for key, statuses, counted in ((KEY_B, [200, 200], 0), (KEY_A, [200, 429], 2)):
        assert [(await endpoint.post(large, **key)).status_code for _ in range(2)] == statuses
        assert len(decoder.tokenized) == counted
    assert len(decoder.requests) == 3


async def test_a_stream_that_does_not_say_has_as_many_tokens_as_events(start: Start, keys: Path) -> None:
    endpoint = await start(api_keys_file=limited(keys, tokensPerMinute=1000), local=local_counter())
    said = (chunk("a"), chunk("b"), chunk("c"))

    async def answer(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        responder.start(200, SSE)
        for part in (*([ROLE] if "messages" in seen.body else []), *said, DONE):
            responder.write(part)
        responder.finish()
        return True

    endpoint.decode[0].on_generate = answer
    await endpoint.post({**SHORT, "stream": True}, **KEY_A)
    assert await tokens(endpoint) == (2, 3)
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    await endpoint.post(chat, "/v1/chat/completions", **KEY_A)
    assert await tokens(endpoint) == (2 + len(str(chat["messages"])), 6)


async def test_a_client_that_leaves_pays_for_what_it_got(start: Start, keys: Path) -> None:
    endpoint = await start(api_keys_file=limited(keys, tokensPerMinute=1000))
    more = asyncio.Event()

    async def answer(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        responder.start(200, SSE)
        responder.write(chunk("a") + chunk("b"))
        await more.wait()
        return True

    endpoint.decode[0].on_generate = answer
    async with endpoint.client.stream(
        "POST", "/v1/completions", json={**SHORT, "stream": True}, headers=KEY_A
    ) as stream:
        async for _ in stream.aiter_bytes():
            break

    async def charged() -> bool:
        return await tokens(endpoint) == (2, 2)

    await eventually(charged)


@pytest.mark.parametrize("status", [400, 500])
async def test_who_gets_no_answer_pays_nothing(start: Start, keys: Path, status: int) -> None:
    endpoint = await start(api_keys_file=limited(keys, tokensPerMinute=50))
    endpoint.decode[0].on_generate = broken(status)
    for _ in range(3):
        assert (await endpoint.post({**SHORT, "prompt": "x" * 50}, **KEY_A)).status_code == status
    assert await tokens(endpoint) == (0, 0)


SEVERAL = {"model": "m", "prompt": ["one", "two"], "max_tokens": 8}
IMAGE = {
    "model": "m",
    "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}],
}


@pytest.mark.parametrize(
    ("body", "path"), [(SEVERAL, "/v1/completions"), (IMAGE, "/v1/chat/completions")], ids=["list", "image"]
)
async def test_prompts_that_are_not_counted_have_what_is_reported_or_at_most_can_be(
    start: Start, keys: Path, body: dict[str, Any], path: str
) -> None:
    endpoint = await start(api_keys_file=limited(keys, tokensPerMinute=100_000), decode=1, prefill=0)
    assert (await endpoint.post(body, path, **KEY_A)).status_code == 200
    assert await tokens(endpoint) == (7, 1)
    streamed = json.dumps({**body, "stream": True}).encode()
    await endpoint.post(streamed, path, **KEY_A)
    assert (await tokens(endpoint))[0] == 7 + len(streamed)
    await endpoint.post(streamed, path, **KEY_B)
    found = await endpoint.samples("tandem_api_key_tokens_total", "key", "kind")
    assert found["b", "prompt"] == 0, "without a limit nothing is guessed"


async def test_models_of_a_key_are_all_that_there_is_for_it(start: Start, keys: Path) -> None:
    both = ["m", "n"]
    endpoint = await start(api_keys_file=limited(keys, models=["n"]), serves={"p0": both, "d0": both})
    listed_for = [
        [card["id"] for card in (await endpoint.client.get("/v1/models", headers=key)).json()["data"]]
        for key in (KEY_A, KEY_B)
    ]
    assert listed_for == [["n"], ["m", "n"]]
    n = {**SHORT, "model": "n"}
    assert (await endpoint.post(n, **KEY_A)).status_code == 200
    for body, status in ((SHORT, 404), ({**SHORT, "model": None}, 400), ({"prompt": "x"}, 400)):
        assert (await endpoint.post(body, **KEY_A)).status_code == status
    adapter = {"X-Amzn-SageMaker-Adapter-Identifier": "m"}
    assert (await endpoint.post(n, "/invocations", **KEY_A, **adapter)).status_code == 404
    assert (await endpoint.post(SHORT, **KEY_B)).status_code == 200
    assert await refused(endpoint) == {("a", "model"): 4}
    assert [seen.body["model"] for seen in endpoint.decode[0].requests] == ["n", "m"]


@pytest.mark.parametrize("pad", [0, 100_000], ids=["small", "read elsewhere"])
async def test_a_keys_salt_reaches_both_legs_in_place_of_the_clients(
    start: Start, keys: Path, pad: int
) -> None:
    endpoint = await start(api_keys_file=limited(keys, cacheSalt="salt-of-a"))
    body = {**LONG, "cache_salt": "mine", "user": "x" * pad}
    assert (await endpoint.post(body, **KEY_A)).status_code == 200
    assert (await endpoint.post(body, **KEY_B)).status_code == 200
    for engine in (*endpoint.prefill, *endpoint.decode):
        assert [seen.body["cache_salt"] for seen in engine.requests] == ["salt-of-a", "mine"]
        assert [seen.raw.count(b'"cache_salt"') for seen in engine.requests] == [1, 1]
    theirs = await endpoint.post({**SHORT, "cache_salt": "salt-of-a"}, **KEY_B)
    assert (theirs.status_code, theirs.json()["error"]["param"]) == (400, "cache_salt")
    assert await refused(endpoint) == {("b", "salt"): 1}


async def test_a_salted_key_is_not_told_what_another_has_sent(start: Start, keys: Path) -> None:
    endpoint = await start(
        api_keys_file=limited(keys, cacheSalt="salt-of-a"),
        routing_strategy="prefixaware",
        explain=True,
        local=local_counter(),
    )
    body = {**SHORT, "prompt": "the same long prompt " * 20}

    async def hit(key: dict[str, str]) -> int:
        answer = await endpoint.post(body, x_tandem_explain="1", **key)
        return int(answer.headers["x-tandem-decode-expected-hit"])

    assert [await hit(KEY_B) > 0 for _ in range(2)] == [False, True]
    assert [await hit(KEY_A) > 0 for _ in range(2)] == [False, True]


async def test_a_session_belongs_to_its_key(start: Start, keys: Path) -> None:
    endpoint = await start(
        api_keys_file=str(keys),
        routing_strategy="session",
        session_field="user",
        prefill=0,
        decode=0,
        roleless=16,
    )

    async def engine_of(key: dict[str, str], **session: Any) -> str:
        for engine in endpoint.roleless:
            engine.seen.clear()
        header = {"x_session_id": session["header"]} if "header" in session else {}
        field = {"user": session["field"]} if "field" in session else {}
        await endpoint.post({**SHORT, **field}, **key, **header)
        (taken,) = [engine.name for engine in endpoint.roleless if engine.requests]
        return taken

    for where in ("header", "field"):
        names = [f"s{n}" for n in range(8)]
        of_a, again, of_b = [
            [await engine_of(key, **{where: name}) for name in names] for key in (KEY_A, KEY_A, KEY_B)
        ]
        assert of_a == again
        assert of_a != of_b


async def test_a_change_of_the_file_is_taken_over_while_requests_run(start: Start, keys: Path) -> None:
    endpoint = await start(api_keys_file=str(keys))
    go_on = asyncio.Event()

    async def answer(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        responder.start(200, SSE)
        responder.write(chunk("a"))
        await go_on.wait()
        responder.write(chunk("b") + DONE)
        responder.finish()
        return True

    endpoint.decode[0].on_generate = answer
    async with endpoint.client.stream(
        "POST", "/v1/completions", json={**SHORT, "stream": True}, headers=KEY_A
    ) as stream:
        parts = stream.aiter_bytes()
        received = await anext(parts)
        replace(keys, listed(b={}))

        async def gone() -> bool:
            return (await endpoint.client.get("/v1/models", headers=KEY_A)).status_code == 401

        await eventually(gone)
        go_on.set()
        received += b"".join([part async for part in parts])
    assert received == chunk("a") + chunk("b") + DONE
    assert (await endpoint.client.get("/v1/models", headers=KEY_B)).status_code == 200


@pytest.mark.parametrize("how", ["passed on", "dropped", "replaced"])
async def test_no_key_is_told_to_anybody(
    start: Start, keys: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    (tmp_path / "engine-key").write_text("sk-of-engines\n")
    options: dict[str, Any] = {
        "passed on": {"engine_authorization": "pass"},
        "dropped": {},
        "replaced": {"engine_key_file": str(tmp_path / "engine-key")},
    }[how]
    caplog.set_level(logging.DEBUG)
    for name in ("httpx", "httpcore"):  # the test's own client
        logging.getLogger(name).setLevel(logging.WARNING)
    replace(keys, listed(a={"cacheSalt": "pepper-of-a", "tokensPerMinute": 100_000}, b={}))
    endpoint = await start(api_keys_file=str(keys), admin_port=0, explain=True, **options)
    assert endpoint.app.admin is not None
    said = []
    for answers in (None, broken(500), broken(401), broken(400), hang):
        for engine in (*endpoint.prefill, *endpoint.decode):
            engine.on_generate = answers
        for body in (SHORT, LONG, {"prompt": 3}):
            with_key = endpoint.post(body, x_tandem_explain="1", **KEY_A)
            try:
                answer = await asyncio.wait_for(with_key, None if answers is not hang else 0.2)
            except TimeoutError:
                continue
            said += [answer.text, str(answer.headers)]
    said.append((await endpoint.post(SHORT, authorization="Bearer sk-of-nobody")).text)
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{endpoint.app.admin.port}", trust_env=False
    ) as admin:
        said += [(await admin.get(page)).text for page in ("/metrics", "/engines")]
        said.append((await admin.post("/admin/route", json=SHORT, headers=KEY_A)).text)
    logged = "\n".join([caplog.text, *(str(record.__dict__) for record in caplog.records)])
    for secret in (A, B, "sk-of-engines", "sk-of-nobody", "pepper-of-a"):
        assert secret not in logged
        assert not [text for text in said if secret in text]
    sent = {s.headers.get("authorization") for e in (*endpoint.prefill, *endpoint.decode) for s in e.requests}
    assert (
        sent
        == {
            "passed on": {KEY_A["authorization"]},
            "dropped": {None},
            "replaced": {"Bearer sk-of-engines"},
        }[how]
    )


async def test_a_router_whose_keys_cannot_be_read_does_not_start(tmp_path: Path) -> None:
    config = RouterConfig(port=0, decode=("http://127.0.0.1:1",), api_keys_file=str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"--api-keys-file: .*none: it does not exist"):
        async with running(config, None):
            pass
