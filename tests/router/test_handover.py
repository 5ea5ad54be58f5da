"""Requests over LMCache PD: the decode leg comes when the KV is there, and the text is right where it is not.

At the end of every test nothing is reserved, waited for or left in a buffer (the fixture `lab`)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tandem.http import Responder

from .conftest import CHAT, LONG, PACE, SHORT, StartLab
from .fakes import JSON, FakeEngine, Seen, broken, hang
from .lmcache_fakes import (
    GARBAGE,
    RIGHT,
    FakeDecoder,
    FakePrefiller,
    Hold,
    Lab,
    notification,
    prompt,
    tag_of,
    until,
)

LATE = 60.0  # seconds, for what does not wait
STREAMED = pytest.mark.parametrize("stream", [False, True])


async def text_of(lab: Any, body: dict[str, Any], stream: bool) -> str:
    """The text a client gets for a completion."""
    if not stream:
        answer = await lab.endpoint.post(body)
        assert answer.status_code == 200
        return str(answer.json()["choices"][0]["text"])
    received, whole = await lab.endpoint.stream(body)
    assert whole
    assert received.endswith(b"data: [DONE]\n\n")
    return RIGHT if b'"He"' in received and b'"llo"' in received else GARBAGE


@STREAMED
async def test_a_prompt_goes_over_a_prefiller_and_is_computed_once(lab: StartLab, stream: bool) -> None:
    pd = await lab()
    assert await text_of(pd, LONG, stream) == RIGHT
    (prefill,), (decode,) = pd.prefiller.requests, pd.decoder.requests
    assert tag_of(prefill.body) == tag_of(decode.body) is not None
    assert [s for s in pd.decoder.computed if not s.is_canary] == []
    assert await pd.endpoint.outcomes() == {("disaggregated", "threshold", "ok"): 1}
    await pd.idle()
    assert pd.decoder.releases == []


@pytest.mark.parametrize("ranks", [1, 4])
async def test_notifications_may_come_before_the_prefill_legs_answer(lab: StartLab, ranks: int) -> None:
    pd = await lab(ranks=ranks)
    before = pd.notifications.taken

    async def writes_first(engine: FakePrefiller, seen: Seen, responder: Responder) -> bool:
        engine.write(seen)
        await until(lambda: pd.notifications.taken == before + ranks)
        assert pd.decoder.requests == []
        return False

    pd.prefiller.on_generate = writes_first
    assert await text_of(pd, LONG, False) == RIGHT


@pytest.mark.parametrize("ranks", [1, 4])
async def test_the_decode_leg_waits_for_the_notification_of_every_rank(lab: StartLab, ranks: int) -> None:
    """Chunks are found from their allocation on: decoded earlier, the text would be garbage."""
    pd = await lab(ranks=ranks)
    before = pd.notifications.taken
    pd.prefiller.silent_ranks = 1
    waiting = asyncio.create_task(text_of(pd, LONG, False))
    await until(lambda: pd.prefiller.requests and pd.of(pd.prefiller).in_flight == 0)
    await until(lambda: pd.notifications.taken == before + ranks - 1)
    assert pd.decoder.requests == []
    tag = tag_of(pd.prefiller.requests[0].body)
    assert tag is not None
    pd.prefiller.notify(notification(tag))
    assert await waiting == RIGHT
    assert [tag_of(s.body) for s in pd.decoder.requests] == [tag]


def lost(prefiller: FakePrefiller) -> None:
    prefiller.silent_ranks = 1


def not_written(prefiller: FakePrefiller) -> None:
    prefiller.write_fails = True


@STREAMED
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("fault", [lost, not_written])
async def test_without_a_notification_the_decoder_computes_the_prompt_and_the_text_is_right(
    lab: StartLab, fault: Any, ranks: int, stream: bool
) -> None:
    pd = await lab(ranks=ranks, notification_timeout=0.1)
    fault(pd.prefiller)
    assert await text_of(pd, LONG, stream) == RIGHT
    assert [tag_of(s.body) for s in pd.decoder.requests][:1] == [None]
    assert await pd.endpoint.outcomes() == {("decode_only", "prefill_failed", "ok"): 1}
    assert await pd.endpoint.failures() == {("prefill", "no_notification"): 1}
    await pd.idle()
    assert [tag_of(s.body) for s in pd.decoder.releases] == [tag_of(pd.prefiller.requests[0].body)]


async def test_without_a_notification_another_prefiller_is_tried_under_another_tag(lab: StartLab) -> None:
    pd = await lab(prefill=2, notification_timeout=0.3)

    def first_is_lost(engine: FakePrefiller, seen: Seen, responder: Responder) -> bool:
        if sum(len(p.requests) for p in pd.prefill) > 1:
            return False
        engine.allocate(seen)
        engine.say(seen, responder, "x")
        return True

    for prefiller in pd.prefill:
        prefiller.on_generate = first_is_lost
    assert await text_of(pd, LONG, False) == RIGHT
    assert [len(p.requests) for p in pd.prefill] == [1, 1]
    assert len({tag_of(s.body) for p in pd.prefill for s in p.requests}) == 2
    assert await pd.endpoint.outcomes() == {("disaggregated", "threshold", "ok"): 1}


async def test_room_that_a_silent_prefiller_may_still_write_into_is_nobody_elses(lab: StartLab) -> None:
    """Chunks that were freed meanwhile could be another request's, and be written over."""
    pd = await lab(
        pace=replace(PACE, late=60.0),
        prefill_timeout=0.1,
        notification_timeout=0.1,
        seconds_per_1000_tokens=0,
    )
    pd.prefiller.on_generate = hang
    assert await text_of(pd, LONG, False) == RIGHT
    assert await pd.endpoint.failures() == {("prefill", "head_timeout"): 1}
    assert (pd.decoder.releases, pd.reserved) == ([], 1)
    pd.prefiller.write(pd.prefiller.requests[0])
    assert pd.decoder.used == 1
    await pd.idle()
    assert len(pd.decoder.releases) == 1


async def test_a_late_notification_disturbs_nobody(lab: StartLab) -> None:
    pd = await lab(notification_timeout=0.1)
    pd.prefiller.silent_ranks = 1
    assert await text_of(pd, LONG, False) == RIGHT
    await pd.idle()
    tag = tag_of(pd.prefiller.requests[0].body)
    assert tag is not None
    pd.prefiller.silent_ranks = 0
    before = pd.notifications.unexpected
    pd.prefiller.notify(notification(tag))
    await until(lambda: pd.notifications.unexpected == before + 1)
    assert await text_of(pd, LONG, False) == RIGHT


def resets(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
    responder.abort()
    return True


PREFILL_FAULTS = {
    "status 500": broken(500),
    "status 503": broken(503),
    "reset": resets,
    "hang": hang,
}


@pytest.mark.parametrize("written", ["nothing", "allocated", "written"])
@pytest.mark.parametrize("prefillers", [1, 2])
@pytest.mark.parametrize("fault", PREFILL_FAULTS)
async def test_whatever_a_failing_prefiller_has_written_is_freed(
    lab: StartLab, fault: str, prefillers: int, written: str
) -> None:
    pd = await lab(
        prefill=prefillers,
        prefill_timeout=0.5 if fault == "hang" else LATE,
        notification_timeout=0.3,
        seconds_per_1000_tokens=0,
    )

    def first_fails(engine: FakePrefiller, seen: Seen, responder: Responder) -> Any:
        if sum(len(p.requests) for p in pd.prefill) > 1:
            return False
        if written == "written":
            engine.write(seen)
        elif written == "allocated":
            engine.allocate(seen)
        return PREFILL_FAULTS[fault](engine, seen, responder)

    for prefiller in pd.prefill:
        prefiller.on_generate = first_fails
    assert await text_of(pd, LONG, False) == RIGHT
    if prefillers == 1:
        assert await pd.endpoint.outcomes() == {("decode_only", "prefill_failed", "ok"): 1}
    else:
        assert await pd.endpoint.outcomes() == {("disaggregated", "threshold", "ok"): 1}
    await pd.idle()
    assert len(pd.decoder.releases) == 1


@pytest.mark.parametrize("status", [400, 404, 413, 422])
async def test_a_prefill_that_was_rejected_wrote_nothing_and_nothing_is_released(
    lab: StartLab, status: int
) -> None:
    pd = await lab()
    pd.prefiller.on_generate = broken(status)
    assert await text_of(pd, LONG, False) == RIGHT
    assert await pd.endpoint.outcomes() == {("decode_only", "prefill_rejected", "ok"): 1}
    await pd.idle()
    assert pd.decoder.tagged == []


async def test_a_prefiller_that_cannot_be_reached_wrote_nothing(lab: StartLab) -> None:
    pd = await lab()
    await pd.prefiller.cut_off()
    assert await text_of(pd, LONG, False) == RIGHT
    assert await pd.endpoint.outcomes() == {("decode_only", "prefill_failed", "ok"): 1}
    await pd.idle()
    assert pd.decoder.tagged == []


async def test_a_prefill_leg_is_never_sent_twice_over_a_connection_that_died(lab: StartLab) -> None:
    """Under a tag that was used, a prefiller says that it has written without doing so."""
    pd = await lab(notification_timeout=0.3)
    assert await text_of(pd, LONG, False) == RIGHT  # leaves a connection that is kept
    pd.prefiller.on_generate = lambda engine, seen, responder: (
        len(engine.requests) == 2 and resets(engine, seen, responder)
    )
    assert await text_of(pd, LONG, False) == RIGHT
    assert len(pd.prefiller.requests) == 2
    assert await pd.endpoint.failures() == {("prefill", "closed"): 1}


def in_band(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
    responder.send(200, JSON, b'{"error": {"message": "KV load failed"}}')
    return True


DECODE_FAULTS = {"status 500": broken(500), "reset": resets, "hang": hang, "in band": in_band}


@STREAMED
@pytest.mark.parametrize("read", [False, True], ids=["unread", "read"])
@pytest.mark.parametrize("decoders", [1, 2])
@pytest.mark.parametrize("fault", DECODE_FAULTS)
async def test_a_decode_leg_that_fails_is_repaired_and_its_kv_freed(
    lab: StartLab, fault: str, decoders: int, read: bool, stream: bool
) -> None:
    """The tag never goes to that decoder twice at once: it would die of it (the fakes tell)."""
    pd = await lab(
        decode=decoders, first_token_timeout=0.5 if fault == "hang" else LATE, seconds_per_1000_tokens=0
    )

    def first_fails(engine: FakeDecoder, seen: Seen, responder: Responder) -> Any:
        if sum(len(d.requests) for d in pd.decode) > 1:
            return False
        if read:
            engine.take(seen)
        return DECODE_FAULTS[fault](engine, seen, responder)

    for decoder in pd.decode:
        decoder.on_generate = first_fails
    assert await text_of(pd, LONG, stream) == RIGHT
    await pd.idle()
    first, second = (s for s in (s for d in pd.decode for s in d.requests) if s not in release_legs(pd))
    assert [tag_of(s.body) for s in release_legs(pd)] == [tag_of(failed_leg(pd).body)]
    assert tag_of(first.body) != tag_of(second.body), "a hand-off is used once"
    if decoders == 1:
        assert await pd.endpoint.outcomes() == {("decode_only", "handoff_failed", "ok"): 1}
    else:
        assert await pd.endpoint.outcomes() == {("disaggregated", "threshold", "ok"): 1}
        assert len(pd.prefiller.requests) == 2


def release_legs(pd: Lab) -> list[Seen]:
    return [s for d in pd.decode for s in d.releases]


def failed_leg(pd: Lab) -> Seen:
    """The decode leg of the first hand-off."""
    tag = tag_of(pd.prefiller.requests[0].body)
    (leg,) = [s for d in pd.decode for s in d.tagged if tag_of(s.body) == tag and s not in d.releases]
    return leg


@pytest.mark.parametrize("status", [400, 404, 422])
async def test_what_a_decoder_rejects_is_freed_there(lab: StartLab, status: int) -> None:
    pd = await lab()
    pd.decoder.on_generate = lambda engine, seen, responder: (
        seen not in engine.releases and broken(status)(engine, seen, responder)
    )
    assert (await pd.endpoint.post(LONG)).status_code == status
    await pd.idle()
    assert len(pd.decoder.releases) == 1


async def test_short_prompts_and_what_a_decoder_must_serve_alone_carry_no_tag(lab: StartLab) -> None:
    pd = await lab()
    assert await text_of(pd, SHORT, False) == RIGHT
    assert await text_of(pd, {**LONG, "n": 2}, False) == RIGHT
    assert pd.prefiller.requests == []
    assert pd.decoder.tagged == []


async def test_with_threshold_0_every_prompt_is_counted_and_handed_over(lab: StartLab) -> None:
    """What is reserved depends on the count."""
    pd = await lab(routing_threshold=0)
    hold = pd.prefiller.on_generate = Hold()
    waiting = asyncio.create_task(text_of(pd, prompt(2), False))
    await hold.holds()
    assert pd.reserved == 2
    assert (
        await pd.endpoint.metric(
            f'tandem_reserved{{engine="{pd.decoder.url}",resource="receive_chunks",role="decode"}}'
        )
        == 2
    )
    hold.go_on.set()
    assert await waiting == RIGHT
    assert await text_of(pd, SHORT, False) == RIGHT
    assert await pd.endpoint.metric('tandem_prompt_tokens_total{path="disaggregated"}') == 2 * 64 - 4 + 2
    assert len(pd.prefiller.requests) == 2


@STREAMED
async def test_a_chat_is_handed_over_too(lab: StartLab, stream: bool) -> None:
    pd = await lab()
    answer = await pd.endpoint.post({**CHAT, "stream": stream}, "/v1/chat/completions")
    assert answer.status_code == 200
    (prefill,), (decode,) = pd.prefiller.requests, pd.decoder.requests
    assert prefill.body["max_completion_tokens"] == 1
    assert tag_of(prefill.body) == tag_of(decode.body) is not None
    assert [s for s in pd.decoder.computed if not s.is_canary] == []


async def test_the_same_prompt_at_once_is_handed_over_under_tags_of_its_own(lab: StartLab) -> None:
    """Equal keys would have requests take each other's chunks."""
    pd = await lab()
    texts = await asyncio.gather(*[text_of(pd, LONG, i % 2 == 0) for i in range(6)])
    assert texts == [RIGHT] * 6
    assert len({tag_of(s.body) for s in pd.decoder.tagged}) == 6
    assert [s for s in pd.decoder.computed if not s.is_canary] == []
