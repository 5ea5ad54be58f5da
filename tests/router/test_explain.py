"""Why a request goes where it goes, told in headers and in the log, and what is never told."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any, cast

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.config import STRATEGIES, RouterConfig
from tandem.http import Origin, Request, Responder
from tandem.router.body import Body
from tandem.router.classify import Api
from tandem.router.counting import Counter
from tandem.router.engines import Engine, EngineRole
from tandem.router.errors import ApiError
from tandem.router.explain import explanation
from tandem.router.job import Job, Reason
from tandem.router.strategies import Choice, Prompt, make

from .conftest import CHAT, LONG, SHORT, Endpoint, Start
from .fakes import JSON, FakeEngine, OnGenerate, broken, chunk, engines, streams

SECRET = "xylophone"
TOKENS = len(cast(str, LONG["prompt"]))


def told(headers: Any) -> dict[str, str]:
    """The headers that explain, without what they all begin with."""
    return {k.removeprefix("x-tandem-"): v for k, v in headers.items() if k.startswith("x-tandem-")}


async def asked(endpoint: Endpoint, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, str]:
    answer = await endpoint.post(body, path, x_tandem_explain="1")
    assert answer.status_code == 200
    return told(answer.headers)


# Headers


async def test_a_disaggregated_request_is_explained(start: Start) -> None:
    endpoint = await start(prefill=2, decode=1, explain=True)
    explained = await asked(endpoint, LONG)
    assert float(explained.pop("prefill-ms")) > 0
    assert explained == {
        "path": "disaggregated",
        "reason": "threshold",
        "prompt-tokens": str(TOKENS),
        "threshold": "20",
        "prefill-url": min(p.url for p in endpoint.prefill),
        "prefill-expected-hit": "0",
        "prefill-why": "in turn",
        "decode-url": endpoint.decode[0].url,
        "decode-expected-hit": "0",
        "decode-why": "lowest score",
        "decode-scores": f"{endpoint.decode[0].url}={0.1 * TOKENS:.0f}",
    }


async def test_a_short_request_is_explained(start: Start) -> None:
    endpoint = await start(explain=True)
    assert await asked(endpoint, SHORT) == {
        "path": "decode_only",
        "reason": "short",
        "prompt-tokens": "2",
        "threshold": "20",
        "decode-url": endpoint.decode[0].url,
        "decode-expected-hit": "0",
        "decode-why": "lowest score",
        "decode-scores": f"{endpoint.decode[0].url}=2",
    }


async def test_a_prompt_that_is_mostly_cached_is_told_with_both_counts(start: Start) -> None:
    endpoint = await start(explain=True, uncached_threshold=True, routing_strategy="prefixaware")
    body = {**LONG, "prompt": 81 * "a"}
    await asked(endpoint, body)
    explained = await asked(endpoint, body)
    assert (explained["path"], explained["reason"]) == ("decode_only", "cached")
    assert (explained["prompt-tokens"], explained["effective-tokens"]) == ("81", "17")
    assert explained["decode-expected-hit"] == "64"


async def test_why_a_decoder_serves_alone_after_all_is_told(start: Start) -> None:
    endpoint = await start(explain=True, max_attempts=1)
    endpoint.prefill[0].on_generate = broken(500)
    explained = await asked(endpoint, LONG)
    assert (explained["path"], explained["reason"]) == ("decode_only", "prefill_failed")
    assert not {name for name in explained if name.startswith("prefill")}


async def test_streams_and_chats_are_explained(start: Start) -> None:
    endpoint = await start(explain=True)
    body = {**CHAT, "stream": True}
    headers = {"x-tandem-explain": "1"}
    async with endpoint.client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        assert told(answer.headers)["path"] == "disaggregated"
        assert answer.headers["content-type"].startswith("text/event-stream")
        await answer.aread()


@pytest.mark.parametrize(
    ("enabled", "header"), [(False, "1"), (True, None), (True, "0"), (True, "true"), (True, "1, 1")]
)
async def test_nothing_is_told_unless_it_is_enabled_and_asked_for(
    start: Start, enabled: bool, header: str | None
) -> None:
    endpoint = await start(explain=enabled)
    named = {} if header is None else {"x_tandem_explain": header}
    for body in (SHORT, LONG, {**SHORT, "x_tandem_explain": "1", "explain": True}):
        answer = await endpoint.post(body, **named)
        assert told(answer.headers) == {}
        assert (await endpoint.post(body, "/v1/completions?x-tandem-explain=1", **named)).status_code == 200
    for fake in (*endpoint.prefill, *endpoint.decode):
        assert not [name for seen in fake.requests for name in seen.headers if name.startswith("x-tandem")]


async def test_labels_are_not_in_headers(start: Start) -> None:
    fake = FakeEngine("a")
    async with engines(fake):
        endpoint = await start(prefill=0, decode=0, engine=(f"{fake.url},zone=Köln→1",), explain=True)
        assert "zone" not in str(await asked(endpoint, SHORT))


def job(decode: Choice | None, prefill: Choice | None = None) -> Job:
    request = Request("POST", b"/", "/", b"", [], b"", "1.1", "")
    made = Job(request, cast(Responder, None), Api.COMPLETIONS, Body({}), "r", 0.0, True, Prompt(5))
    made.decode_choice, made.prefill_choice, made.reason = decode, prefill, Reason.SHORT
    return made


def engine(url: str) -> Engine:
    return Engine(url, EngineRole.BOTH, Origin.parse("http://e:1"))


@given(st.text(), st.text())
def test_values_can_stand_in_headers_whatever_an_engine_is_called(url: str, why: str) -> None:
    named = engine(url)
    choice = Choice(named, scores={url: 1.0}, why=why)
    for name, value in explanation(job(choice, choice), named, 5).items():
        assert (name + value).isascii()
        assert (name + value).isprintable()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_of_many_engines_a_few_are_told(strategy: str) -> None:
    many = [engine(f"http://engine-{i:03}.a-namespace.svc.cluster.local:8081") for i in range(256)]
    for each in many:
        each.in_flight = 1 if each is many[7] else 400  # so that sessions pass many
    choosing = make(RouterConfig(decode=("http://d:1",), routing_strategy=strategy)).strategy
    choice = choosing.choose(Prompt(100, [1] * 100, session="s"), many)
    explained = explanation(job(choice), choice.engine, 5)
    assert explained["decode-url"] == choice.engine.url
    compared = explained.get("decode-scores", "").split(", ")
    assert len(compared) <= 8
    assert sum(len(name) + len(value) for name, value in explained.items()) < 2000


def test_the_best_scores_come_first() -> None:
    choice = Choice(engine("http://e:1"), scores={f"http://e{i}:1": float(-i) for i in range(20)})
    scores = explanation(job(choice), choice.engine, 5)["decode-scores"]
    assert scores.startswith("http://e19:1=-19, http://e18:1=-18, ")


# The log


async def test_at_debug_candidates_and_scores_are_logged(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "tandem.router")
    endpoint = await start(prefill=2, routing_strategy="prefixaware")
    caplog.clear()
    await endpoint.post(LONG, x_request_id="abc")
    (decoder,) = [line for line in caplog.messages if line.startswith("abc decoder ")]
    (prefiller,) = [line for line in caplog.messages if line.startswith("abc prefiller ")]
    (used,) = [p.url for p in endpoint.prefill if p.requests]
    assert prefiller.startswith(f"abc prefiller {used}: load: no cached prefix, 0 tokens expected")
    assert all(f"{p.url}=" in prefiller for p in endpoint.prefill)
    assert f"{endpoint.decode[0].url}=" in decoder
    assert f"estimated_tokens={TOKENS}, threshold=20, disaggregate=True" in caplog.text


async def test_above_debug_they_are_not(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tandem.router")
    endpoint = await start(prefill=2, routing_strategy="prefixaware")
    await endpoint.post(LONG)
    assert "compared" not in caplog.text
    assert f"selected {next(p.url for p in endpoint.prefill if p.requests)}" in caplog.text


ENDINGS: dict[str, OnGenerate | None] = {
    "well": None,
    "an error": broken(500),
    "a rejection": broken(400),
    "an error that quotes": lambda engine, seen, responder: (
        responder.send(400, JSON, b'{"error":{"message":"%s"}}' % seen.raw.replace(b'"', b"'")) or True
    ),
    "a stream that breaks off": streams(chunk(SECRET), whole=False),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ending", ENDINGS)
async def test_prompts_and_answers_are_never_logged(
    start: Start, caplog: pytest.LogCaptureFixture, strategy: str, ending: str
) -> None:
    caplog.set_level(logging.DEBUG)
    endpoint = await start(
        routing_strategy=strategy, max_attempts=1, explain=True, admin_port=None, session_field="user"
    )
    caplog.clear()
    for fake in (*endpoint.prefill, *endpoint.decode):
        fake.on_generate = ENDINGS[ending]
    text = f"a prompt that is long enough for two engines, {SECRET}"
    message = {"role": "user", "content": text}
    for stream in (False, True):
        bodies = [
            ("/v1/completions", {**LONG, "prompt": text, "user": SECRET, "cache_salt": SECRET}),
            ("/v1/completions", {**LONG, "prompt": text, "suffix": {SECRET: 1}, "stream": 1}),
            ("/v1/chat/completions", {**CHAT, "messages": [message], "chat_template": SECRET}),
            ("/v1/chat/completions", {**CHAT, "messages": [message], "kv_transfer_params": {SECRET: 1}}),
            ("/v1/chat/completions", {**CHAT, "messages": [message]}),
        ]
        for path, body in bodies:
            with suppress(httpx.RemoteProtocolError, httpx.ReadError):
                await endpoint.post({"stream": stream, **body}, path)
    await endpoint.post(b'{"model": "m", "prompt": "%s' % SECRET.encode())
    await endpoint.post(b'{"model": "m", "prompt": "%s", "stream": tru}' % SECRET.encode())
    assert caplog.messages
    assert SECRET not in caplog.text


async def test_what_is_said_of_a_prompt_that_cannot_be_counted_is_told_and_not_logged(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(self: Counter, api: Api, body: Body) -> Prompt:
        raise ApiError(400, f"bad input: {SECRET}", quotes=True)

    endpoint = await start()
    monkeypatch.setattr(Counter, "count", refuse)
    answer = await endpoint.post(LONG)
    assert answer.status_code == 400
    assert SECRET in answer.text
    assert "ends with HTTP 400" in caplog.text
    assert SECRET not in caplog.text
