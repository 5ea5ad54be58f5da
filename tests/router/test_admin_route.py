"""`POST /admin/route`: the engines that a request would get, without sending it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tandem.config import STRATEGIES
from tandem.http import Request, Responder
from tandem.router.engines import State

from .admin_fakes import LETTERS, Administer, Administered, Patient, admin_client, administering
from .conftest import CHAT, LONG, SHORT, Start, StartLab
from .fakes import FakeEngine
from .lmcache_fakes import Hold, prompt
from .test_handover import text_of


@pytest.fixture
async def administer(start: Start) -> AsyncIterator[Administer]:
    """See `administering`."""
    async with AsyncExitStack() as stack:
        yield administering(start, stack)


BODIES = {
    "completion": [{**LONG, "prompt": "a chat that goes on and on" + i * ", it does"} for i in range(4)],
    "chat": [
        {**CHAT, "messages": [{"role": "user", "content": "a chat that goes on" + i * ", it does"}]}
        for i in range(4)
    ],
}


@pytest.mark.parametrize("api", BODIES)
@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_the_engine_that_is_told_is_the_one_that_is_taken(
    administer: Administer, strategy: str, api: str
) -> None:
    both = [FakeEngine(name) for name in "abc"]
    admin = await administer(
        *both, routing_strategy=strategy, explain=True, local=LETTERS, kv_block_size=4, session_field="user"
    )
    path = "/v1/chat/completions" if api == "chat" else "/v1/completions"
    for number, body in enumerate(BODIES[api] * 2):
        named = {**body, "user": f"user {number % 4}"}
        told = await admin.chosen(named)
        assert told == await admin.chosen(named), "asking again changes nothing"
        before = [len(e.requests) for e in both]
        answer = await admin.endpoint.post(named, path, x_tandem_explain="1")
        (taken,) = [e for e, had in zip(both, before, strict=True) if len(e.requests) > had]
        assert told["decode"]["url"] == taken.url == answer.headers["x-tandem-decode-url"]
        assert told["prefill"] is None
        assert (told["path"], told["reason"]) == ("decode_only", answer.headers["x-tandem-reason"])
        assert told["promptTokens"] == int(answer.headers["x-tandem-prompt-tokens"])
        assert told["decode"]["expectedHitTokens"] == int(answer.headers["x-tandem-decode-expected-hit"])
        assert told["decode"]["why"] == answer.headers["x-tandem-decode-why"]
        assert told["waitsForRoom"] is False


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_both_engines_of_a_pair_are_told(administer: Administer, strategy: str) -> None:
    admin = await administer(
        prefill=3, decode=2, routing_strategy=strategy, explain=True, local=LETTERS, kv_block_size=4
    )
    for number, body in enumerate(BODIES["completion"] * 2):
        session = {"x_session_id": f"user {number % 4}"}
        told = await admin.chosen(body, **session)
        answer = await admin.endpoint.post(body, x_tandem_explain="1", **session)
        assert told["path"] == answer.headers["x-tandem-path"] == "disaggregated"
        assert told["prefill"]["url"] == answer.headers["x-tandem-prefill-url"]
        assert told["decode"]["url"] == answer.headers["x-tandem-decode-url"]
        hit = int(answer.headers["x-tandem-prefill-expected-hit"])
        assert told["prefill"]["expectedHitTokens"] == hit
        assert told["threshold"] == 20
        assert told["effectiveTokens"] == told["promptTokens"] == len(body["prompt"])


async def test_a_short_prompt_is_told_to_go_to_a_decoder_alone(administer: Administer) -> None:
    admin = await administer(prefill=1, decode=1, local=LETTERS)
    told = await admin.chosen(SHORT)
    assert (told["path"], told["reason"], told["prefill"]) == ("decode_only", "short", None)
    assert told["decode"]["url"] == admin.endpoint.decode[0].url
    assert told["expectedOutputTokens"] == 8


async def test_what_a_decoder_has_already_does_not_count(administer: Administer) -> None:
    admin = await administer(
        prefill=1,
        decode=1,
        local=LETTERS,
        routing_strategy="prefixaware",
        kv_block_size=4,
        uncached_threshold=True,
    )
    body = {**LONG, "prompt": 20 * "abcd" + "e"}
    await admin.endpoint.post(body)
    told = await admin.chosen(body)
    assert (told["path"], told["reason"]) == ("decode_only", "cached")
    # prefixaware remembers what was sent in spans of 64 tokens.
    assert (told["promptTokens"], told["effectiveTokens"]) == (81, 81 - 64)


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({**LONG, "prompt": 'a text about "messages" and what they are'}, 41),
        ({**LONG, "prompt": "ab", "metadata": {"messages": []}}, 2),
        (CHAT, len(str(CHAT["messages"]))),
    ],
    ids=["text", "a field within a field", "chat"],
)
async def test_a_chat_is_told_from_a_completion_by_its_fields(
    administer: Administer, body: dict[str, Any], tokens: int
) -> None:
    admin = await administer(FakeEngine("a"), local=LETTERS)
    assert (await admin.chosen(body))["promptTokens"] == tokens


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", [{}, {"prefill": 2, "decode": 2}], ids=["alike", "pairs"])
async def test_asking_leaves_no_trace(
    administer: Administer, strategy: str, layout: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    both = [] if layout else [FakeEngine(name) for name in "ab"]
    admin = await administer(*both, **layout, routing_strategy=strategy, local=LETTERS, kv_block_size=4)
    fakes = [*both, *admin.endpoint.prefill, *admin.endpoint.decode]
    before = await admin.metrics()
    told = await admin.get("/engines")
    first = await admin.chosen(LONG)
    for _ in range(10):
        await admin.chosen(LONG)
        await admin.chosen(CHAT)
    assert await admin.chosen(LONG) == first
    assert [len(e.requests) for e in fakes] == [0] * len(fakes)
    assert await admin.metrics() == before
    assert await admin.get("/engines") == told
    assert "falls back" not in caplog.text


async def test_asking_reserves_no_room_and_tells_of_waiting(lab: StartLab) -> None:
    pd = await lab(buffer=3, admin_port=0)
    async with admin_client(pd.endpoint.app) as client:
        admin = Administered(pd.endpoint, client, [])
        for _ in range(10):
            told = await admin.chosen(prompt(2))
            assert (told["waitsForRoom"], told["path"]) == (False, "disaggregated")
        assert (await admin.engine(pd.decoder))["reserved"] == 0
        hold = pd.decoder.on_generate = Hold()
        request = asyncio.create_task(text_of(pd, prompt(2), False))
        await hold.holds()
        assert (await admin.engine(pd.decoder))["reserved"] == round(2 / 3, 4)
        assert (await admin.chosen(prompt(1)))["waitsForRoom"] is False
        full = await admin.chosen(prompt(2))
        assert (full["waitsForRoom"], full["prefill"], full["decode"]) == (True, None, None)
        alone = await admin.chosen(prompt(4))
        assert (alone["path"], alone["reason"]) == ("decode_only", "over_buffer")
        hold.go_on.set()
        await request


BAD = {
    "no JSON": b"{",
    "no object": b"[]",
    "not UTF-8": b'{"model": "m", "prompt": "\xff"}',
    "unknown model": b'{"model": "other", "prompt": "hi"}',
    "model is no text": b'{"model": 5, "prompt": "hi"}',
    "internal field": b'{"model": "m", "prompt": "hi", "kv_transfer_params": {}}',
    "stream is no boolean": b'{"model": "m", "prompt": "hi", "stream": 1}',
    "a template of its own": b'{"model": "m", "messages": [], "chat_template": "x"}',
}


@pytest.mark.parametrize("body", BAD.values(), ids=BAD.keys())
async def test_errors_are_those_that_the_request_would_get(administer: Administer, body: bytes) -> None:
    admin = await administer(FakeEngine("a"), local=LETTERS)
    path = "/v1/chat/completions" if b"messages" in body else "/v1/completions"
    told, got = await admin.route(body), await admin.endpoint.post(body, path)
    assert 400 <= told.status_code < 500
    assert (told.status_code, told.json()) == (got.status_code, got.json())


async def test_internal_headers_are_refused(administer: Administer) -> None:
    admin = await administer(FakeEngine("a"), local=LETTERS)
    told = await admin.route(SHORT, x_data_parallel_rank="1")
    got = await admin.endpoint.post(SHORT, x_data_parallel_rank="1")
    assert (told.status_code, told.json()) == (got.status_code, got.json())
    assert told.status_code == 400


async def test_before_engines_are_ready_the_answer_is_503(administer: Administer) -> None:
    admin = await administer(FakeEngine("a", refuses=lambda seen: True), wait=False)
    told = await admin.route(SHORT)
    assert (told.status_code, told.headers["retry-after"]) == (503, "1")
    got = await admin.endpoint.post(SHORT)
    assert told.json() == got.json()


async def test_an_engine_that_is_suspect_is_told_where_no_other_is_left(administer: Administer) -> None:
    fakes = [Patient("a"), Patient("b")]
    for fake in fakes:
        fake.go_on.set()
    admin = await administer(*fakes, local=LETTERS, suspect_after=1)
    for fake in fakes:
        fake.go_on.clear()
    fleet = admin.endpoint.app.fleet
    first, second = sorted(fleet.engines, key=lambda e: e.url)
    fleet.failed(first)
    assert (await admin.chosen(LONG))["decode"]["url"] == second.url
    fleet.failed(second)
    assert {first.state, second.state} == {State.SUSPECT}
    assert (await admin.chosen(LONG))["decode"]["url"] in (first.url, second.url)
    for fake in fakes:
        fake.go_on.set()


async def test_a_client_that_hangs_up_while_it_is_counted_leaves_nothing(administer: Administer) -> None:
    """Where engines count, asking takes a while."""
    fake = FakeEngine("a")
    admin = await administer(fake)
    asked = asyncio.Event()

    async def never(request: Request, responder: Responder) -> None:
        if request.path != "/tokenize":
            await fake(request, responder)
            return
        asked.set()
        await asyncio.Event().wait()

    assert fake.server is not None
    fake.server.handler = never
    asking = asyncio.create_task(admin.chosen(LONG))
    await asked.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await admin.told(fake, requestsInFlight=0)
    assert fake.requests == []
