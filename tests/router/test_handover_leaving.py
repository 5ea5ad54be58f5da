"""Clients that leave a request over LMCache PD: its KV is read all the same, and its room is free again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tandem.http import Responder

from .conftest import CHAT, LONG, PACE, StartLab
from .fakes import FakeEngine, OnGenerate, Seen, broken, chunk, hang, streams
from .lmcache_fakes import Hold, Lab, notification, prompt, tag_of, until

STREAMED = pytest.mark.parametrize("stream", [False, True])
COMPLETIONS = "/v1/completions"


@asynccontextmanager
async def client_that_leaves(
    pd: Lab, body: dict[str, Any] = LONG, path: str = COMPLETIONS
) -> AsyncIterator[None]:
    """A request whose client leaves at the block's end."""
    request = asyncio.create_task(pd.endpoint.post(body, path))
    try:
        yield
    finally:
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)


async def left(pd: Lab) -> None:
    """Until the router has noticed."""

    async def counted() -> bool:
        return any(outcome == "client_left" for _, _, outcome in await pd.endpoint.outcomes())

    while not await counted():
        await asyncio.sleep(0.005)


async def test_a_client_that_leaves_while_it_waits_for_room_takes_none(lab: StartLab) -> None:
    pd = await lab(buffer=1)
    hold = pd.prefiller.on_generate = Hold()
    first = asyncio.create_task(pd.endpoint.post(LONG))
    await hold.holds()
    async with client_that_leaves(pd):
        await until(lambda: len(pd.line) == 1)
    await until(lambda: len(pd.line) == 0)
    hold.go_on.set()
    assert (await first).status_code == 200
    await pd.idle()
    assert len(pd.prefiller.requests) == 1
    assert pd.decoder.releases == []


@STREAMED
async def test_a_prefill_goes_on_when_its_client_leaves_and_its_kv_is_read(
    lab: StartLab, stream: bool
) -> None:
    """Cancelled, it would leave chunks behind that nobody can free."""
    pd = await lab()
    hold = pd.prefiller.on_generate = Hold()
    async with client_that_leaves(pd, {**prompt(2), "stream": stream, "stop": ["x"], "seed": 7}):
        await hold.holds()
    await left(pd)
    assert (pd.prefiller.cancelled, pd.reserved, pd.decoder.tagged) == (0, 2, [])
    assert await pd.endpoint.metric("tandem_handoffs_cleaning_up") == 1
    hold.go_on.set()
    await pd.idle()
    assert pd.prefiller.cancelled == 0
    (release,) = pd.decoder.requests
    assert release in pd.decoder.releases
    assert tag_of(release.body) == tag_of(pd.prefiller.requests[0].body)
    assert (release.body["max_tokens"], release.body["stream"], release.body["seed"]) == (1, False, 7)
    assert release.body["prompt"] == prompt(2)["prompt"]
    assert pd.decoder.freed >= {tag_of(release.body)}
    assert await pd.endpoint.metric("tandem_handoffs_cleaning_up") == 0


async def test_a_prefill_at_work_for_a_client_that_stays_is_none_to_be_cleaned_up(lab: StartLab) -> None:
    pd = await lab()
    hold = pd.prefiller.on_generate = Hold()
    waiting = asyncio.create_task(pd.endpoint.post(LONG))
    await hold.holds()
    assert await pd.endpoint.metric("tandem_handoffs_cleaning_up") == 0
    hold.go_on.set()
    await waiting


async def test_a_chat_is_released_as_one(lab: StartLab) -> None:
    pd = await lab()
    hold = pd.prefiller.on_generate = Hold()
    async with client_that_leaves(pd, {**CHAT, "max_completion_tokens": 500}, "/v1/chat/completions"):
        await hold.holds()
    hold.go_on.set()
    await pd.idle()
    (release,) = pd.decoder.requests
    assert release.path == "/v1/chat/completions"
    assert release.body["messages"] == CHAT["messages"]
    assert (release.body["max_tokens"], release.body["max_completion_tokens"]) == (1, 1)


async def test_a_client_that_leaves_between_the_legs_has_its_kv_read_once_it_is_written(
    lab: StartLab,
) -> None:
    pd = await lab()
    pd.prefiller.silent_ranks = 1
    async with client_that_leaves(pd):
        await until(lambda: pd.prefiller.requests and pd.of(pd.prefiller).in_flight == 0)
    await left(pd)
    assert (pd.reserved, pd.decoder.tagged) == (1, [])
    tag = tag_of(pd.prefiller.requests[0].body)
    assert tag is not None
    pd.prefiller.notify(notification(tag))
    await pd.idle()
    assert pd.decoder.requests == pd.decoder.releases != []


@pytest.mark.parametrize(
    ("then", "releases"),
    [(broken(400), 0), (broken(500), 1), (lambda engine, seen, responder: responder.abort() or True, 1)],
    ids=["rejected", "failed", "reset"],
)
async def test_a_prefill_that_fails_behind_a_client_that_left_is_released_if_it_may_have_written(
    lab: StartLab, then: OnGenerate, releases: int
) -> None:
    pd = await lab(notification_timeout=0.1)
    hold = pd.prefiller.on_generate = Hold(then)
    async with client_that_leaves(pd):
        await hold.holds()
    await left(pd)
    hold.go_on.set()
    await pd.idle()
    assert len(pd.decoder.requests) == len(pd.decoder.releases) == releases


async def test_a_prefill_that_hangs_behind_a_client_that_left_is_given_up_at_its_time_out(
    lab: StartLab,
) -> None:
    pd = await lab(prefill_timeout=0.2, notification_timeout=0.1, seconds_per_1000_tokens=0)
    pd.prefiller.on_generate = hang
    async with client_that_leaves(pd):
        await until(lambda: pd.prefiller.requests)
    await left(pd)
    assert (pd.prefiller.cancelled, pd.reserved) == (0, 1)
    await pd.idle()
    assert pd.prefiller.cancelled == 1


@STREAMED
async def test_a_client_that_leaves_a_decode_leg_before_its_first_byte_has_its_kv_read(
    lab: StartLab, stream: bool
) -> None:
    pd = await lab()
    hold = pd.decoder.on_generate = Hold()
    async with client_that_leaves(pd, {**LONG, "stream": stream}):
        await hold.holds()
        pd.decoder.on_generate = None
    await pd.idle()
    decode, release = pd.decoder.requests
    assert pd.decoder.cancelled == 1
    assert tag_of(decode.body) == tag_of(release.body)
    assert [release] == pd.decoder.releases
    assert [s for s in pd.decoder.computed if not s.is_canary] == []


async def test_a_client_that_leaves_a_stream_that_has_begun_leaves_nothing_to_read(lab: StartLab) -> None:
    pd = await lab()

    def begins(engine: Any, seen: Seen, responder: Responder) -> Any:
        engine.take(seen)
        return streams(chunk("He"), then_hangs=True)(engine, seen, responder)

    pd.decoder.on_generate = begins
    async with pd.endpoint.client.stream("POST", COMPLETIONS, json={**LONG, "stream": True}) as answer:
        async for _ in answer.aiter_bytes():
            break
        assert pd.reserved == 0, "the decoder has read its chunks: others may come"
    await left(pd)
    await pd.idle()
    assert pd.decoder.releases == []


async def test_an_answer_that_is_not_streamed_holds_its_room_to_the_end_and_is_released_if_it_breaks_off(
    lab: StartLab,
) -> None:
    """Whether its chunks were read is not known before. They were here: the release costs a prefill."""
    pd = await lab()

    def reads(engine: Any, seen: Seen, responder: Responder) -> Any:
        engine.take(seen)
        return hang(engine, seen, responder)

    pd.decoder.on_generate = reads
    async with client_that_leaves(pd):
        await until(lambda: pd.decoder.freed and pd.decoder.requests)
        assert pd.reserved == 1
        pd.decoder.on_generate = None
    await pd.idle()
    assert [s for s in pd.decoder.computed if not s.is_canary] == pd.decoder.releases != []


async def leaves_kv_on_a_decoder_that_cannot_be_reached(pd: Lab) -> None:
    hold = pd.prefiller.on_generate = Hold()
    async with client_that_leaves(pd):
        await hold.holds()
    await left(pd)
    await pd.decoder.cut_off()
    hold.go_on.set()
    await until(lambda: pd.handovers.cleaning_up == 1 and pd.notifications.taken >= 2)
    assert pd.reserved == 1


async def test_kv_on_a_decoder_that_cannot_be_reached_is_read_when_it_can(lab: StartLab) -> None:
    pd = await lab()
    await leaves_kv_on_a_decoder_that_cannot_be_reached(pd)
    await pd.decoder.come_back()
    await pd.idle()
    assert len(pd.decoder.releases) == 1


async def test_kv_on_a_decoder_that_is_another_process_now_is_gone(lab: StartLab) -> None:
    pd = await lab()
    await leaves_kv_on_a_decoder_that_cannot_be_reached(pd)
    # Seen as gone before it is back: a real one takes seconds to start.
    pd.of(pd.decoder).doubt()
    await until(lambda: not pd.endpoint.app.fleet.ready(pd.of(pd.decoder).role))
    pd.decoder.renew()
    await pd.decoder.come_back()
    await pd.idle()
    assert pd.decoder.releases == []


async def test_kv_on_a_decoder_that_was_removed_is_gone(lab: StartLab) -> None:
    pd = await lab()
    await leaves_kv_on_a_decoder_that_cannot_be_reached(pd)
    pd.members.remove(pd.decoder.url)
    pd.decoder.renew()
    await pd.idle()
    assert pd.decoder.releases == []


async def test_a_release_that_fails_is_repeated_until_it_works(lab: StartLab) -> None:
    pd = await lab()
    hold = pd.prefiller.on_generate = Hold()
    pd.decoder.on_generate = fails_times(3)
    async with client_that_leaves(pd):
        await hold.holds()
    hold.go_on.set()
    await pd.idle()
    assert len(pd.decoder.releases) == 4
    assert len({tag_of(s.body) for s in pd.decoder.releases}) == 1


@pytest.mark.parametrize(("prefill_fails", "kept"), [(True, 0), (False, 1)])
async def test_a_decoder_that_refuses_to_release_is_not_asked_for_ever(
    lab: StartLab, prefill_fails: bool, kept: int
) -> None:
    """What was written stays there, and its room reserved; a prefill leg that failed too wrote nothing."""
    pd = await lab()
    pd.decoder.on_generate = broken(500)
    if prefill_fails:
        pd.prefiller.on_generate = broken(500)
    assert (await pd.endpoint.post(LONG)).status_code >= 500
    await until(lambda: len(pd.decoder.releases) == PACE.refusals)
    await until(lambda: pd.reserved == kept)
    if kept:
        await pd.handovers.aclose()
        pd.explained = True  # its chunks lie in the decoder's buffer
    else:
        await pd.idle()
    assert len(pd.decoder.releases) == PACE.refusals


def fails_times(times: int) -> Callable[[FakeEngine, Seen, Responder], Any]:
    def answer(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        return len(engine.requests) <= times and bool(broken(500)(engine, seen, responder))

    return answer


async def test_one_release_at_a_time_goes_to_a_decoder(lab: StartLab) -> None:
    """One that finds nothing costs it a whole prefill."""
    pd = await lab(buffer=4)
    prefills = pd.prefiller.on_generate = Hold()
    decodes = pd.decoder.on_generate = Hold()
    async with client_that_leaves(pd), client_that_leaves(pd), client_that_leaves(pd):
        await prefills.holds(3)
    prefills.go_on.set()
    await until(lambda: pd.notifications.taken >= 4)
    await decodes.holds()
    assert (decodes.held, pd.of(pd.decoder).in_flight) == (1, 1)
    decodes.go_on.set()
    await pd.idle()
    assert len(pd.decoder.releases) == 3
