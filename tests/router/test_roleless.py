"""Engines without a role (`--engine`): each serves whole requests, and the strategy chooses among them."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, cast

import pytest

from tandem.config import STRATEGIES, RouterConfig
from tandem.prompt import PromptCounter
from tandem.router.engines import EngineRole, State

from .admin_fakes import LETTERS
from .conftest import CHAT, LONG, SHORT, Endpoint, Start
from .fakes import broken, chunk, eventually, hang, kv_metrics, local_counter, streams
from .test_models import Letters, counter_of

TEXT = "a shared beginning that is longer than a block of sixteen tokens, "


async def alone(start: Start, roleless: int = 3, **options: Any) -> Endpoint:
    return await start(prefill=0, decode=0, roleless=roleless, **options)


async def by_letters(start: Start, **options: Any) -> Endpoint:
    """Prompts have a token for each letter, and are known by them."""
    return await start(
        local=cast(PromptCounter, LETTERS),
        knows_ids=False,
        **{"prefill": 0, "decode": 0, "routing_strategy": "prefixaware", "explain": True, **options},
    )


async def chosen(endpoint: Endpoint, body: dict[str, Any], **headers: str) -> int:
    """The number of the engine that a request goes to."""
    before = [len(e.requests) for e in endpoint.roleless]
    assert (await endpoint.post(body, **headers)).status_code == 200
    (which,) = [i for i, e in enumerate(endpoint.roleless) if len(e.requests) > before[i]]
    return which


def prompt(text: str, **more: Any) -> dict[str, Any]:
    return {**LONG, "prompt": text, **more}


# Every strategy chooses among them


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("body", [SHORT, LONG, {**LONG, "n": 2}], ids=["short", "long", "not to be split"])
async def test_every_strategy_spreads_requests_over_them(
    start: Start, strategy: str, body: dict[str, Any]
) -> None:
    endpoint = await alone(start, routing_strategy=strategy)
    took = Counter([await chosen(endpoint, body) for _ in range(12)])
    assert took.keys() == {0, 1, 2}
    if strategy == "roundrobin":
        assert set(took.values()) == {4}
    answer = await endpoint.post(CHAT, "/v1/chat/completions")
    assert answer.status_code == 200


@pytest.mark.parametrize("strategy", ["prefixaware", "kvaware"])
async def test_what_begins_alike_goes_where_that_was_computed(start: Start, strategy: str) -> None:
    endpoint = await by_letters(start, roleless=3, routing_strategy=strategy)
    text = 3 * TEXT
    first = await chosen(endpoint, prompt(text))
    for more in ("one", "two", "three"):
        text += more
        assert await chosen(endpoint, prompt(text)) == first
    others = {await chosen(endpoint, prompt(f"{i} is another text, {i} {TEXT}")) for i in range(12)}
    assert len(others) > 1, "prompts that share nothing are spread"
    told = (await endpoint.post(prompt(text), x_tandem_explain="1")).headers
    assert int(told["x-tandem-decode-expected-hit"]) >= 128
    assert told["x-tandem-decode-why"].startswith("cached prefix and load")
    assert not [name for name in told if name.startswith("x-tandem-prefill")]


@pytest.mark.parametrize(
    "more",
    [{"n": 2}, {"best_of": 2}, {"echo": True}, {"prompt_logprobs": 1}, {"use_beam_search": True}],
    ids=lambda more: next(iter(more)),
)
async def test_what_is_never_split_is_placed_by_its_prefix_too(start: Start, more: dict[str, Any]) -> None:
    endpoint = await by_letters(start, roleless=3)
    for first, then in (({}, more), (more, {})):
        text = f"{first}: {3 * TEXT}"
        home = endpoint.roleless[await chosen(endpoint, prompt(text, **first))]
        told = (await endpoint.post(prompt(text + "and more", **then), x_tandem_explain="1")).headers
        assert told["x-tandem-decode-url"] == home.url
        assert int(told["x-tandem-decode-expected-hit"]) >= 128
        assert told["x-tandem-prompt-tokens"] == str(len(text + "and more"))


@pytest.mark.parametrize("body", [SHORT, LONG, {**LONG, "n": 2}], ids=["short", "long", "not to be split"])
async def test_a_session_stays_with_its_engine_whatever_is_asked(start: Start, body: dict[str, Any]) -> None:
    endpoint = await alone(start, roleless=4, routing_strategy="session")
    homes = {name: await chosen(endpoint, LONG, x_session_id=name) for name in "abcdefghijklmnop"}
    assert len(set(homes.values())) > 1
    for name, home in homes.items():
        assert await chosen(endpoint, body, x_session_id=name) == home


async def test_what_a_request_asks_of_its_engine_counts_there_until_it_ends(start: Start) -> None:
    """Prompts that are not computed yet, and tokens that it will hold until the answer is whole."""
    endpoint = await alone(start, roleless=1, local=local_counter(), routing_strategy="prefixaware")
    (fake,) = endpoint.roleless
    fake.on_generate = hang
    request = asyncio.create_task(endpoint.post(LONG))
    engine = endpoint.of(fake)

    async def arrived() -> bool:
        return len(fake.requests) == 1

    await eventually(arrived)
    tokens = len(str(LONG["prompt"]))
    assert (engine.in_flight, engine.pending_tokens) == (1, tokens)
    assert (engine.held, engine.held_tokens) == (1, tokens + LONG["max_tokens"])
    request.cancel()

    async def gone() -> bool:
        return engine.in_flight == engine.pending_tokens == engine.held == engine.held_tokens == 0

    await eventually(gone)


# Long prompts


async def test_a_long_prompt_is_what_they_are_for_so_nothing_is_a_fallback_and_none_is_refused(
    start: Start,
) -> None:
    endpoint = await alone(start, roleless=1, max_fallbacks=0, max_fallback_tokens=0)
    (fake,) = endpoint.roleless
    fake.on_generate = hang
    requests = [asyncio.create_task(endpoint.post(LONG)) for _ in range(5)]

    async def all_there() -> bool:
        return len(fake.requests) == 5

    await eventually(all_there)
    for request in requests:
        request.cancel()
    await asyncio.gather(*requests, return_exceptions=True)
    fake.on_generate = None
    assert (await endpoint.post(LONG)).status_code == 200
    outcomes = await endpoint.outcomes()
    assert outcomes[("decode_only", "no_prefillers_configured", "ok")] == 1


async def test_a_prompt_over_the_context_gets_the_engines_own_rejection(start: Start) -> None:
    endpoint = await alone(start, roleless=1)
    endpoint.roleless[0].on_generate = broken(400)
    answer = await endpoint.post(LONG)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "engine says 400")


@pytest.mark.parametrize(
    ("length", "more", "reason", "options"),
    [
        (100_000, {}, "over_context", {}),
        (100_000, {"n": 2}, "n", {}),
        (100_000, {}, "short", {"prefill": 1, "decode": 1, "routing_threshold": 10**6}),
        (100_000, {}, "over_context", {"prefill": 1, "decode": 1}),
        (90_000, {"min_tokens": 9}, "doubtful", {"prefill": 1, "decode": 1}),
    ],
    ids=["alone", "not to be split", "below the threshold", "beside others", "doubtful"],
)
async def test_a_prompt_that_is_refused_costs_an_engine_nothing(
    start: Start, length: int, more: dict[str, Any], reason: str, options: dict[str, Any]
) -> None:
    """None of it is computed: it is no work, and it pushes no other prompt out of the cache."""
    endpoint = await by_letters(start, roleless=2, **options)
    for decoder in endpoint.decode:  # so that the others stand in for it
        decoder.refuses = lambda seen: True
        endpoint.app.fleet.lost(endpoint.of(decoder), "restarted")
    for fake in endpoint.roleless:
        fake.metrics = kv_metrics(0.1, cache_tokens=4096)
        await endpoint.look_at(fake, lambda engine: engine.cache_tokens == 4096)
    chats: dict[int, list[str]] = {0: [], 1: []}
    for number in range(3):
        chat = f"{number}. chat: {10 * TEXT}"
        chats[await chosen(endpoint, prompt(chat))].append(chat)
    home = max(chats, key=lambda which: len(chats[which]))
    one, other = chats[home][:2]

    async def expected(text: str) -> tuple[str, int]:
        told = (await endpoint.post(prompt(text), x_tandem_explain="1")).headers
        return told["x-tandem-decode-url"], int(told["x-tandem-decode-expected-hit"])

    before = await expected(other)
    for fake in endpoint.roleless:
        fake.on_generate = broken(400)
    for _ in range(3):
        answer = await endpoint.post(prompt(one + length * "x", **more), x_tandem_explain="1")
        assert (answer.status_code, answer.headers["x-tandem-reason"]) == (400, reason)
        assert answer.headers["x-tandem-decode-url"] == endpoint.roleless[home].url
    for fake in endpoint.roleless:
        fake.on_generate = None
    assert await expected(other) == before
    assert await chosen(endpoint, prompt(one)) == home


# Counting

COUNTS = pytest.mark.parametrize("here", [True, False], ids=["counted here", "counted by engines"])


async def counting(start: Start, here: bool, **options: Any) -> tuple[Endpoint, Letters]:
    """A router whose prompts are counted by itself, or by engines; nothing is counted yet."""
    letters = Letters()
    endpoint = await start(local=counter_of(letters) if here else None, explain=True, **options)
    letters.counted()
    for fake in (*endpoint.decode, *endpoint.roleless):
        fake.tokenized.clear()
    return endpoint, letters


def counted(endpoint: Endpoint, letters: Letters) -> bool:
    """Whether anybody has counted a prompt."""
    return bool(letters.counted()) or any(e.tokenized for e in (*endpoint.decode, *endpoint.roleless))


@COUNTS
@pytest.mark.parametrize("strategy", ["session", "roundrobin"])
@pytest.mark.parametrize("layout", [{"decode": 0, "roleless": 2}, {"decode": 2}], ids=["alike", "decode"])
async def test_a_prompt_is_counted_by_nobody_where_nothing_depends_on_it(
    start: Start, layout: dict[str, int], strategy: str, here: bool
) -> None:
    endpoint, letters = await counting(start, here, prefill=0, **layout, routing_strategy=strategy)
    for body in (SHORT, LONG, {**LONG, "n": 2}, {**LONG, "stream": True}):
        assert (await endpoint.post(body)).status_code == 200
    assert (await endpoint.post(CHAT, "/v1/chat/completions")).status_code == 200
    assert not counted(endpoint, letters)


@COUNTS
@pytest.mark.parametrize("strategy", ["session", "roundrobin"])
async def test_with_prefill_engines_prompts_are_counted_for_the_threshold(
    start: Start, strategy: str, here: bool
) -> None:
    endpoint, letters = await counting(start, here, prefill=1, decode=1, routing_strategy=strategy)
    for body in (SHORT, LONG):
        await endpoint.post(body)
    assert counted(endpoint, letters)
    assert len(endpoint.prefill[0].requests) == 1


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
PICTURE = {"model": "m", "messages": [{"role": "user", "content": [IMAGE]}]}


@COUNTS
@pytest.mark.parametrize(
    ("reason", "body", "path"),
    [
        ("multimodal", PICTURE, "/v1/chat/completions"),
        ("prompt_list", prompt("", prompt=["one", "two"]), "/v1/completions"),
        ("prompt_embeds", prompt("", prompt_embeds="AA=="), "/v1/completions"),
    ],
)
async def test_prompts_whose_tokens_cannot_be_known_are_counted_by_nobody(
    start: Start, reason: str, body: dict[str, Any], path: str, here: bool
) -> None:
    endpoint, letters = await counting(
        start, here, prefill=0, decode=0, roleless=2, routing_strategy="prefixaware"
    )
    answer = await endpoint.post(body, path, x_tandem_explain="1")
    assert (answer.status_code, answer.headers["x-tandem-reason"]) == (200, reason)
    assert "x-tandem-prompt-tokens" not in answer.headers
    assert not counted(endpoint, letters)


# Failures


@pytest.mark.parametrize("body", [SHORT, LONG], ids=["short", "long"])
async def test_a_request_that_fails_on_one_is_served_by_another(start: Start, body: dict[str, Any]) -> None:
    endpoint = await alone(start, roleless=2)
    bad, good = endpoint.roleless
    bad.on_generate = broken(500)
    for _ in range(3):
        assert (await endpoint.post(body)).status_code == 200
    assert len(good.requests) == 3
    assert len(bad.requests) > 0
    assert await endpoint.failures() == {("both", "status"): len(bad.requests)}


async def test_one_that_fails_request_after_request_is_left_out_until_a_canary_clears_it(
    start: Start,
) -> None:
    endpoint = await alone(start, roleless=2, suspect_after=2, max_attempts=3)
    bad, good = endpoint.roleless
    # Only what carries this fails, so that its canaries can be held back.
    bad.on_generate = broken(500)
    bad.refuses = lambda seen: seen.is_canary
    engine = endpoint.of(bad)
    for _ in range(6):
        assert (await endpoint.post(SHORT)).status_code == 200
    assert len(bad.requests) == 2
    assert len(good.requests) == 6

    async def out_of_use() -> bool:
        return engine.state is State.WAITING

    await eventually(out_of_use)
    assert endpoint.app.fleet.ready(EngineRole.BOTH) == [endpoint.of(good)]
    bad.on_generate, bad.refuses = None, lambda seen: False
    await endpoint.ready()
    for _ in range(2):
        assert (await endpoint.post(SHORT)).status_code == 200
    assert len(bad.requests) == 3


async def test_the_only_one_is_still_used_when_it_is_suspect(start: Start) -> None:
    endpoint = await alone(start, roleless=1, suspect_after=1)
    (fake,) = endpoint.roleless
    fake.on_generate = broken(500)
    assert (await endpoint.post(SHORT)).status_code == 500
    fake.on_generate = None
    assert (await endpoint.post(SHORT)).status_code == 200, "some request must find out"


@pytest.mark.parametrize("body", [SHORT, LONG], ids=["short", "long"])
async def test_one_that_is_gone_is_lost_and_its_requests_go_to_others(
    start: Start, body: dict[str, Any]
) -> None:
    endpoint = await alone(start, roleless=2)
    gone, other = endpoint.roleless
    assert gone.server is not None
    await gone.server.close()
    for _ in range(4):
        assert (await endpoint.post(body)).status_code == 200
    assert len(other.requests) == 4
    assert endpoint.of(gone).state is State.WAITING
    ready = (await endpoint.client.get("/ready")).json()
    assert ready["ready"] is True
    assert any(gone.url in line for line in ready["unproved"])


async def test_without_any_the_endpoint_says_that_it_is_not_ready(start: Start) -> None:
    endpoint = await alone(start, roleless=1)
    (gone,) = endpoint.roleless
    assert gone.server is not None
    await gone.server.close()
    await endpoint.look_at(gone, lambda engine: engine.state is State.WAITING)
    assert (await endpoint.post(SHORT)).status_code == 503
    ready = await endpoint.client.get("/ready")
    assert ready.status_code == 503
    assert ready.json()["reason"].startswith(f"no engine is ready: {gone.url}: cannot connect")


async def test_a_stream_that_breaks_off_is_an_error_and_never_looks_whole(start: Start) -> None:
    endpoint = await alone(start, roleless=1)
    endpoint.roleless[0].on_generate = streams(chunk("a"), whole=False)
    received, whole = await endpoint.stream(SHORT)
    assert received.startswith(chunk("a"))
    assert b"The answer broke off: the engine failed (closed)." in received
    assert not whole


async def test_what_failed_is_told_by_its_name(start: Start) -> None:
    endpoint = await alone(start, roleless=1)
    endpoint.roleless[0].on_generate = streams(whole=False)
    answer = await endpoint.post(SHORT)
    assert answer.status_code == 502
    assert answer.json()["error"]["message"].startswith("The engine failed (")


# A canary comes before traffic


async def test_no_request_reaches_one_before_it_has_answered_a_canary(start: Start) -> None:
    endpoint = await alone(start, roleless=2)
    late, other = endpoint.roleless
    assert all([s.is_canary for s in e.seen] == [True] for e in endpoint.roleless)
    late.refuses = lambda seen: seen.is_canary
    endpoint.app.fleet.lost(endpoint.of(late), "restarted")
    await endpoint.look_at(late, lambda engine: "HTTP 500" in engine.why)
    for _ in range(3):
        assert (await endpoint.post(SHORT)).status_code == 200
    assert (len(late.requests), len(other.requests)) == (0, 3)
    late.refuses = lambda seen: False
    await endpoint.ready()
    await endpoint.post(SHORT)
    assert len(late.requests) == 1


# Beside decode engines


async def test_decode_engines_come_first_and_those_without_a_role_stand_in_for_them(start: Start) -> None:
    endpoint = await start(prefill=1, decode=1, roleless=2, max_fallbacks=0)
    (decoder,), (prefiller,) = endpoint.decode, endpoint.prefill
    for body in (SHORT, LONG):
        assert (await endpoint.post(body)).status_code == 200
    assert [len(e.requests) for e in endpoint.roleless] == [0, 0]
    assert len(decoder.requests) == 2
    assert len(prefiller.requests) == 1

    decoder.refuses = lambda seen: True  # canaries too, so it stays away
    endpoint.app.fleet.lost(endpoint.of(decoder), "restarted")
    for body in (SHORT, LONG, SHORT, LONG):
        assert (await endpoint.post(body)).status_code == 200
    assert [len(e.requests) for e in endpoint.roleless] == [2, 2]
    assert len(prefiller.requests) == 1, "they take no KV from anybody"
    assert all(s.kv is None for e in endpoint.roleless for s in e.seen)

    decoder.refuses = lambda seen: False
    back = endpoint.of(decoder)
    await endpoint.look_at(decoder, lambda engine: engine.state is State.READY)
    await endpoint.look_at(prefiller, lambda engine: endpoint.app.fleet.is_proved(engine, back))
    assert (await endpoint.post(LONG)).status_code == 200
    assert len(prefiller.requests) == 2
    assert [len(e.requests) for e in endpoint.roleless] == [2, 2]


async def test_a_decode_engine_that_is_suspect_is_spared_where_one_without_a_role_is_well(
    start: Start,
) -> None:
    endpoint = await start(prefill=0, decode=1, roleless=1, suspect_after=1)
    (decoder,), (other,) = endpoint.decode, endpoint.roleless
    decoder.refuses = lambda seen: True
    for _ in range(3):
        assert (await endpoint.post(SHORT)).status_code == 200, "the first one goes on there"
    assert (len(decoder.requests), len(other.requests)) == (1, 3)


async def test_a_model_that_only_they_serve_is_theirs(start: Start) -> None:
    endpoint = await start(
        prefill=1, decode=1, roleless=1, serves={"p0": ["a"], "d0": ["a"], "e0": ["b"]}, max_fallbacks=0
    )
    for model in ("a", "b"):
        for body in (SHORT, LONG):
            assert (await endpoint.post({**body, "model": model})).status_code == 200
    assert {s.body["model"] for s in endpoint.roleless[0].requests} == {"b"}
    assert {s.body["model"] for s in endpoint.decode[0].requests} == {"a"}
    assert len(endpoint.prefill[0].requests) == 1


async def test_requests_are_limited_by_all_engines_that_answer(start: Start) -> None:
    """`requestLimits` are for one pod: an engine that alone serves a model has room of its own."""
    endpoint = await start(
        prefill=0,
        decode=1,
        roleless=1,
        serves={"d0": ["a"], "e0": ["b"]},
        max_concurrent_requests=1,
    )
    for fake in (*endpoint.decode, *endpoint.roleless):
        fake.on_generate = hang
    requests = [asyncio.create_task(endpoint.post({**SHORT, "model": model})) for model in ("a", "b")]

    async def both_there() -> bool:
        return bool(endpoint.decode[0].requests and endpoint.roleless[0].requests)

    await eventually(both_there)
    assert (await endpoint.post({**SHORT, "model": "a"})).status_code == 429
    for request in requests:
        request.cancel()
    await asyncio.gather(*requests, return_exceptions=True)


def test_prefill_engines_are_of_no_use_to_them() -> None:
    with pytest.raises(ValueError, match="--prefill: prefill engines need decode engines"):
        RouterConfig(prefill=("http://p:1",), engine=("http://e:1",))
