"""Which decoder takes a request, on a running router: by load, KV use, cached prefix and receive buffer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from tandem.config import STRATEGIES
from tandem.http import Responder
from tandem.prompt import PromptCounter
from tandem.router.connectors import Claim
from tandem.router.engines import State

from .admin_fakes import LETTERS, ROUTE, admin_client
from .conftest import LONG, SHORT, Endpoint, Start, StartLab
from .fakes import SSE, FakeEngine, Seen, broken, chunk, eventually, hang, kv_metrics, reads_kv
from .lmcache_fakes import RIGHT, prompt
from .test_handover import text_of

TEXT = "".join(f"this is sentence number {i} of a text that goes on. " for i in range(40))


async def decoder_of(endpoint: Endpoint, body: dict[str, Any]) -> FakeEngine:
    """The decoder that answers a request."""
    before = [len(d.requests) for d in endpoint.decode]
    assert (await endpoint.post(body)).status_code == 200
    (chosen,) = [d for d, count in zip(endpoint.decode, before, strict=True) if len(d.requests) > count]
    return chosen


def other(endpoint: Endpoint, fake: FakeEngine) -> FakeEngine:
    (found,) = [d for d in endpoint.decode if d is not fake]
    return found


@asynccontextmanager
async def hanging(
    endpoint: Endpoint, fakes: Sequence[FakeEngine], *bodies: dict[str, Any]
) -> AsyncIterator[list[FakeEngine]]:
    """Requests that none of these engines answers, one after another, for the length of a block: which of
    them got them, in order."""
    got: list[FakeEngine] = []

    async def hold(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        got.append(engine)
        return bool(await hang(engine, seen, responder))

    before = [fake.on_generate for fake in fakes]
    for fake in fakes:
        fake.on_generate = hold
    requests = []
    for body in bodies:
        requests.append(asyncio.create_task(endpoint.post(body)))

        async def arrived() -> bool:
            return len(got) == len(requests)

        await eventually(arrived)
    for fake, was in zip(fakes, before, strict=True):
        fake.on_generate = was
    try:
        yield got
    finally:
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)

        async def nothing_is_left() -> bool:
            return all(e.held == e.held_tokens == e.in_flight == 0 for e in endpoint.app.fleet.engines)

        await eventually(nothing_is_left)


# Tokens in flight


async def test_decoders_that_are_alike_take_requests_in_turn(start: Start) -> None:
    endpoint = await start(prefill=0, decode=3)
    chosen = [(await decoder_of(endpoint, SHORT)).name for _ in range(6)]
    assert sorted(chosen[:3]) == ["d0", "d1", "d2"]
    assert chosen[3:] == chosen[:3]


async def test_a_decoder_whose_request_is_still_on_a_prefiller_counts_as_loaded(start: Start) -> None:
    """It will be busy in a moment: what comes meanwhile shall go elsewhere."""
    endpoint = await start(prefill=1, decode=2)
    async with hanging(endpoint, endpoint.prefill, LONG):
        assert [d.requests for d in endpoint.decode] == [[], []]
        (busy,) = [d for d in endpoint.decode if endpoint.of(d).held]
        engine = endpoint.of(busy)
        assert (engine.in_flight, engine.held_tokens) == (0, len(str(LONG["prompt"])) + LONG["max_tokens"])
        for _ in range(4):
            assert await decoder_of(endpoint, SHORT) is other(endpoint, busy)
    assert {(await decoder_of(endpoint, SHORT)).name for _ in range(2)} == {"d0", "d1"}


async def test_a_long_answer_weighs_more_than_several_short_ones(start: Start) -> None:
    endpoint = await start(prefill=0, decode=2)
    long, short = {**SHORT, "max_tokens": 200}, {**SHORT, "max_tokens": 10}
    async with hanging(endpoint, endpoint.decode, long, short, short, short) as got:
        assert got == [got[0], *[other(endpoint, got[0])] * 3]


async def test_the_load_is_told_in_the_metrics(start: Start) -> None:
    endpoint = await start(prefill=1, decode=1)
    (decoder,) = endpoint.decode
    decoder.metrics = kv_metrics(0.25)
    await endpoint.look_at(decoder, lambda engine: engine.kv_use == 0.25)
    async with hanging(endpoint, endpoint.decode, SHORT):
        tokens = len(SHORT["prompt"]) + SHORT["max_tokens"]
        held = await endpoint.samples("tandem_tokens_in_flight", "role", "engine")
        assert held == {("decode", decoder.url): tokens}
    use = await endpoint.samples("tandem_engine_kv_use", "engine")
    assert use[(decoder.url,)] == 0.25


@pytest.mark.parametrize("streamed", [False, True])
async def test_what_an_answer_is_expected_to_take_follows_those_before(start: Start, streamed: bool) -> None:
    """Their outputs have one token and two here, by usage or by what was streamed."""
    endpoint = await start(prefill=0, decode=1, routing_strategy="prefixaware")
    (decoder,) = endpoint.decode
    body = {"model": "m", "prompt": "hi"}

    async def expected() -> int:
        async with hanging(endpoint, endpoint.decode, body):
            return endpoint.of(decoder).held_tokens - len("hi")

    before = await expected()
    assert before > 100
    seen = [before]
    for _ in range(3):
        for _ in range(40):
            if streamed:
                await endpoint.stream(body)
            else:
                assert (await endpoint.post(body)).status_code == 200
        seen.append(await expected())
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] < 40
    async with hanging(endpoint, endpoint.decode, {**body, "max_tokens": 3}):
        assert endpoint.of(decoder).held_tokens - len("hi") == 3, "no more than it may have"


# KV use


@pytest.mark.parametrize("body", [SHORT, LONG], ids=["short", "disaggregated"])
async def test_a_decoder_whose_kv_cache_is_nearly_full_gets_no_requests_while_another_has_room(
    start: Start, body: dict[str, Any]
) -> None:
    endpoint = await start(prefill=1, decode=2)
    full, free = endpoint.decode
    full.metrics, free.metrics = kv_metrics(0.97), kv_metrics(0.5)
    await endpoint.look_at(full, lambda engine: engine.kv_use > 0.9)
    await endpoint.look_at(free, lambda engine: engine.kv_use > 0.4)
    for _ in range(4):
        assert await decoder_of(endpoint, body) is free
    full.metrics = kv_metrics(0.8)
    await endpoint.look_at(full, lambda engine: engine.kv_use < 0.9)
    assert {(await decoder_of(endpoint, body)).name for _ in range(2)} == {"d0", "d1"}, "it presses no more"


@pytest.mark.parametrize("page", [b"", b"vllm:kv_cache_usage_perc{} 7\n", b"<html>", b"\xff\x00"])
async def test_what_an_engine_does_not_tell_in_earnest_is_not_held_against_it(
    start: Start, page: bytes
) -> None:
    endpoint = await start(prefill=0, decode=2)
    odd = endpoint.decode[0]
    odd.metrics = kv_metrics(0.99)
    await endpoint.look_at(odd, lambda engine: engine.kv_use > 0.9)
    odd.metrics = page
    await endpoint.look_at(odd, lambda engine: engine.kv_use == 0)
    assert endpoint.of(odd).state is State.READY
    assert {(await decoder_of(endpoint, SHORT)).name for _ in range(2)} == {"d0", "d1"}


# The cached prefix


async def by_letters(start: Start, **options: Any) -> Endpoint:
    """Prompts have a token for each letter, and are known by them."""
    return await start(
        local=cast(PromptCounter, LETTERS),
        knows_ids=False,
        **{"routing_strategy": "prefixaware", "routing_threshold": 100, "explain": True, **options},
    )


def said(text: str) -> dict[str, Any]:
    return {"model": "m", "prompt": text, "max_tokens": 8}


async def test_a_short_chat_stays_with_the_decoder_that_has_its_beginning(start: Start) -> None:
    endpoint = await by_letters(start, prefill=0, decode=3, routing_threshold=100_000)
    chats = [f"{number}. chat: {TEXT[:300]}" for number in range(6)]
    homes = [await decoder_of(endpoint, said(chat)) for chat in chats]
    assert len(set(map(id, homes))) == 3, "new ones are spread"
    for turn in range(1, 5):
        for chat, home in zip(chats, homes, strict=True):
            assert await decoder_of(endpoint, said(chat + TEXT[300 : 300 + 40 * turn])) is home


async def test_a_disaggregated_chat_comes_back_to_the_decoder_that_has_its_kv(start: Start) -> None:
    """Its first turn was handed over there, so the next has less to hand over."""
    endpoint = await by_letters(start, prefill=1, decode=3)
    home = await decoder_of(endpoint, said(TEXT[:800]))
    for length in (900, 1000, 1100):
        assert await decoder_of(endpoint, said(TEXT[:length])) is home
    assert all(map(reads_kv, home.requests)), "each turn is disaggregated again"


async def test_load_outweighs_a_prefix_that_is_small(start: Start) -> None:
    endpoint = await by_letters(start, prefill=0, decode=2, routing_threshold=100_000)
    home = await decoder_of(endpoint, said(TEXT[:200]))
    with endpoint.of(home).holding(150):
        assert await decoder_of(endpoint, said(TEXT[:220])) is home
    with endpoint.of(home).holding(5000):
        assert await decoder_of(endpoint, said(TEXT[:220])) is other(endpoint, home)


@pytest.mark.parametrize("why", ["lost", "keeps no prefixes"])
async def test_a_decoder_that_has_no_prefix_any_more_is_not_believed_to(start: Start, why: str) -> None:
    endpoint = await by_letters(start, prefill=0, decode=2, routing_threshold=100_000)
    for decoder in endpoint.decode:
        decoder.metrics = kv_metrics(0.1, prefix_caching=why == "lost")
        await endpoint.look_at(decoder, lambda engine: engine.kv_use)
    home = await decoder_of(endpoint, said(TEXT[:500]))
    if why == "lost":
        endpoint.app.fleet.lost(endpoint.of(home), "restarted")
        endpoint.of(home).doubt()
        await endpoint.ready()
    answer = await endpoint.post(said(TEXT[:520]), x_tandem_explain="1")
    assert answer.headers["x-tandem-decode-expected-hit"] == "0"


# The threshold for what is not cached


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_what_a_decoder_has_already_can_be_left_out_of_the_count(
    start: Start, strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = await by_letters(
        start, prefill=1, decode=3, uncached_threshold=True, routing_strategy=strategy
    )
    home = await decoder_of(endpoint, said(TEXT[:800]))
    assert reads_kv(home.requests[0])
    prefills = len(endpoint.prefill[0].requests)
    caplog.set_level("INFO", logger="tandem.router")
    answer = await endpoint.post(said(TEXT[:850]), x_tandem_explain="1")
    assert not reads_kv(home.requests[-1]), "it computes the rest itself"
    assert len(home.requests) == 2
    assert len(endpoint.prefill[0].requests) == prefills
    told = {name.removeprefix("x-tandem-"): value for name, value in answer.headers.items()}
    cached = int(told["decode-expected-hit"])
    assert 750 < cached <= 800
    assert (told["path"], told["reason"]) == ("decode_only", "cached")
    assert (told["prompt-tokens"], told["effective-tokens"]) == ("850", str(850 - cached))
    assert told["decode-url"] == home.url
    assert (
        f"Conditional routing: estimated_tokens={850 - cached}, threshold=100, disaggregate=False, full=850, "
        f"cached={cached}"
    ) in caplog.text
    outcomes = await endpoint.outcomes()
    assert outcomes[("decode_only", "cached", "ok")] == 1


async def test_by_default_all_of_a_prompt_counts(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    endpoint = await by_letters(start, prefill=1, decode=2)
    home = await decoder_of(endpoint, said(TEXT[:800]))
    caplog.set_level("INFO", logger="tandem.router")
    answer = await endpoint.post(said(TEXT[:850]), x_tandem_explain="1")
    assert answer.headers["x-tandem-path"] == "disaggregated"
    assert "x-tandem-effective-tokens" not in answer.headers
    assert int(answer.headers["x-tandem-decode-expected-hit"]) > 0
    assert all(map(reads_kv, home.requests))
    assert "Conditional routing: estimated_tokens=850, threshold=100, disaggregate=True\n" in caplog.text


async def test_what_is_left_over_the_threshold_is_disaggregated_and_both_counts_are_told(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = await by_letters(start, prefill=1, decode=2, uncached_threshold=True)
    home = await decoder_of(endpoint, said(TEXT[:800]))
    caplog.set_level("INFO", logger="tandem.router")
    answer = await endpoint.post(said(TEXT[:1200]), x_tandem_explain="1")
    told = answer.headers
    assert (told["x-tandem-path"], told["x-tandem-prompt-tokens"]) == ("disaggregated", "1200")
    effective = int(told["x-tandem-effective-tokens"])
    assert 400 <= effective < 450
    assert told["x-tandem-decode-url"] == home.url
    assert (
        f"estimated_tokens={effective}, threshold=100, disaggregate=True, full=1200, cached=" in caplog.text
    )


async def test_a_prompt_that_nobody_has_counts_in_full(start: Start) -> None:
    endpoint = await by_letters(start, prefill=1, decode=2, uncached_threshold=True)
    await endpoint.post(said(TEXT[:800]))
    answer = await endpoint.post(said("other " + TEXT[:800]), x_tandem_explain="1")
    assert answer.headers["x-tandem-path"] == "disaggregated"
    assert "x-tandem-effective-tokens" not in answer.headers


async def test_a_prompt_is_short_by_itself_where_it_is_also_without_the_cache(start: Start) -> None:
    endpoint = await by_letters(start, prefill=1, decode=2, uncached_threshold=True)
    await endpoint.post(said(TEXT[:90]))
    answer = await endpoint.post(said(TEXT[:95]), x_tandem_explain="1")
    assert answer.headers["x-tandem-reason"] == "short"
    assert answer.headers["x-tandem-effective-tokens"] == "31"


async def test_a_busy_decoder_that_has_the_prefix_does_not_make_a_prompt_short(start: Start) -> None:
    """Where it goes decides what counts, and it goes elsewhere."""
    endpoint = await by_letters(start, prefill=1, decode=2, uncached_threshold=True)
    home = await decoder_of(endpoint, said(TEXT[:800]))
    with endpoint.of(home).holding(50_000):
        answer = await endpoint.post(said(TEXT[:850]), x_tandem_explain="1")
    assert answer.headers["x-tandem-path"] == "disaggregated"
    assert answer.headers["x-tandem-decode-url"] == other(endpoint, home).url


async def test_when_the_decoder_that_has_it_fails_the_whole_prompt_is_long_again(start: Start) -> None:
    """No other decoder may be made to compute it, past the cap for long prompts."""
    endpoint = await by_letters(start, prefill=1, decode=2, uncached_threshold=True, max_fallbacks=0)
    home = await decoder_of(endpoint, said(TEXT[:800]))
    home.refuses = lambda seen: True
    answer = await endpoint.post(said(TEXT[:850]), x_tandem_explain="1")
    assert answer.status_code == 200
    assert (answer.headers["x-tandem-path"], answer.headers["x-tandem-reason"]) == (
        "disaggregated",
        "threshold",
    )
    assert len(endpoint.prefill[0].requests) == 2
    assert reads_kv(other(endpoint, home).requests[-1])


# When a decoder has a prompt


@pytest.mark.parametrize("which", ["prefill", "decode"])
@pytest.mark.parametrize(("status", "answered"), [(500, 503), (400, 400)])
async def test_a_decoder_does_not_have_a_prompt_that_an_engine_failed_with(
    start: Start, which: str, status: int, answered: int
) -> None:
    """It would compute all of it, past its prefillers and past the cap for long prompts."""
    endpoint = await by_letters(start, prefill=1, decode=1, uncached_threshold=True, max_fallbacks=0)
    (failing,), (decoder,) = getattr(endpoint, which), endpoint.decode
    failing.on_generate = broken(status)
    for _ in range(2):
        assert (await endpoint.post(said(TEXT[:800]))).status_code == answered
    assert all(map(reads_kv, decoder.requests))
    failing.on_generate = None
    for reason in ("threshold", "cached"):
        answer = await endpoint.post(said(TEXT[:800]), x_tandem_explain="1")
        assert answer.headers["x-tandem-reason"] == reason


async def test_a_decoder_does_not_have_a_prompt_that_a_prefiller_still_computes(start: Start) -> None:
    endpoint = await by_letters(start, prefill=1, decode=1, uncached_threshold=True)
    async with hanging(endpoint, endpoint.prefill, said(TEXT[:800])):
        answer = await endpoint.post(said(TEXT[:850]), x_tandem_explain="1")
    assert answer.headers["x-tandem-reason"] == "threshold"
    assert all(map(reads_kv, endpoint.decode[0].requests))


@asynccontextmanager
async def asking(endpoint: Endpoint) -> AsyncIterator[Callable[[str], Awaitable[str]]]:
    """Asks why a prompt would take its path now, which leaves no trace."""
    async with admin_client(endpoint.app) as admin:

        async def why(text: str) -> str:
            return str((await admin.post(ROUTE, json=said(text))).json()["reason"])

        yield why


async def test_a_decoder_has_a_prompt_once_its_stream_has_begun(start: Start) -> None:
    """A stream's head shows nothing yet."""
    endpoint = await by_letters(start, prefill=1, decode=1, uncached_threshold=True, admin_port=0)
    (decoder,) = endpoint.decode
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def in_two_steps(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        responder.start(200, SSE)
        begun.set()
        await go_on.wait()
        responder.write(chunk("a"))
        return bool(await hang(engine, seen, responder))

    decoder.on_generate = in_two_steps
    async with asking(endpoint) as why:
        request = asyncio.create_task(endpoint.stream(said(TEXT[:800])))
        await begun.wait()
        assert await why(TEXT[:850]) == "threshold"
        go_on.set()

        async def has_it() -> bool:
            return await why(TEXT[:850]) == "cached"

        await eventually(has_it)
        assert not request.done()
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)


async def test_a_decoder_has_a_prompt_once_its_whole_answer_is_there(start: Start) -> None:
    endpoint = await by_letters(start, prefill=1, decode=1, uncached_threshold=True, admin_port=0)
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def late(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        begun.set()
        await go_on.wait()
        return False

    endpoint.decode[0].on_generate = late
    async with asking(endpoint) as why:
        request = asyncio.create_task(endpoint.post(said(TEXT[:800])))
        await begun.wait()
        assert await why(TEXT[:850]) == "threshold"
        go_on.set()
        assert (await request).status_code == 200
        assert await why(TEXT[:850]) == "cached"


@pytest.mark.parametrize(
    ("refused", "reason"),
    [(said(100_000 * "x"), "over_context"), ({**said(TEXT[:200]), "min_tokens": 9}, "doubtful")],
)
async def test_a_prompt_that_is_refused_takes_no_decoders_turn(
    start: Start, refused: dict[str, Any], reason: str
) -> None:
    endpoint = await by_letters(start, prefill=1, decode=2)
    for decoder in endpoint.decode:
        decoder.on_generate = broken(400)
    taken = set()
    for _ in range(3):
        answer = await endpoint.post(refused, x_tandem_explain="1")
        assert (answer.status_code, answer.headers["x-tandem-reason"]) == (400, reason)
        taken.add(answer.headers["x-tandem-decode-url"])
    for decoder in endpoint.decode:
        decoder.on_generate = None
    assert {(await decoder_of(endpoint, said("hi"))).url} == taken


# The receive buffer


async def test_a_decoder_whose_receive_buffer_fills_up_is_left_to_empty_it(lab: StartLab) -> None:
    """The other has more to do; with a full buffer prefillers would have to wait."""
    pd = await lab(decode=2, buffer=8)
    filling, busy = (pd.of(d) for d in pd.decode)
    with busy.holding(5000):
        for _ in range(2):
            assert await text_of(pd, prompt(1), False) == RIGHT
        assert [len(d.requests) for d in pd.decode] == [2, 0]
        taken = pd.budgets.take([Claim(filling, "receive_chunks", 6, 8)])
        assert pd.budgets.share(filling) == 0.75
        for _ in range(2):
            assert await text_of(pd, prompt(1), False) == RIGHT
        assert [len(d.requests) for d in pd.decode] == [2, 2]
        taken.release()
        assert await text_of(pd, prompt(1), False) == RIGHT
        assert [len(d.requests) for d in pd.decode] == [3, 2]
    assert pd.budgets.share(filling) == 0


# Joining


async def test_a_decoder_that_comes_back_gets_its_share_little_by_little(start: Start) -> None:
    endpoint = await start(prefill=0, decode=2, ramp_up=3600.0)
    old, back = endpoint.decode
    endpoint.of(old).joined -= 2 * 3600
    endpoint.app.fleet.lost(endpoint.of(back), "restarted")
    endpoint.of(back).doubt()
    await endpoint.ready()
    async with hanging(endpoint, endpoint.decode, *[SHORT] * 6) as got:
        assert sorted(fake.name for fake in got) == [old.name] * 5 + [back.name]
