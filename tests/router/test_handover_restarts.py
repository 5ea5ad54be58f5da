"""LMCache PD when engines go and come: which pairs are used, and what a router leaves when it ends itself."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tandem.router.engines import State

from .conftest import LONG, PACE, StartLab
from .fakes import hang
from .lmcache_fakes import RIGHT, FakeLMCache, Hold, Lab, tag_of, until
from .test_handover import text_of

FOREVER_BROKEN = "the decode engine was restarted; restart the prefill engine, which cannot find it again"


async def seen_gone(pd: Lab, fake: FakeLMCache) -> None:
    """Cut an engine off until the router knows: a real one takes seconds to start again."""
    await fake.cut_off()
    pd.of(fake).doubt()
    await until(lambda: pd.of(fake).state is State.WAITING)


async def restart(pd: Lab, fake: FakeLMCache) -> None:
    await seen_gone(pd, fake)
    fake.renew()
    await fake.come_back()


async def in_use(pd: Lab, fake: FakeLMCache) -> None:
    await until(lambda: pd.of(fake).state is State.READY)


async def looked_at(pd: Lab, fake: FakeLMCache) -> None:
    """Until an engine has been visited a few times more."""
    for _ in range(3):
        pd.of(fake).doubt()
        await until(lambda: not pd.of(fake).alarm.is_set())


async def proved_again(pd: Lab) -> None:
    """Until all pairs are; prefillers are looked at as soon as there is a decoder."""
    for fake in pd.decode:
        await in_use(pd, fake)
    for fake in pd.prefill:
        pd.of(fake).doubt()
    await pd.endpoint.ready()


async def ready(pd: Lab) -> tuple[int, dict[str, Any]]:
    answer = await pd.endpoint.client.get("/ready")
    return answer.status_code, answer.json()


async def test_a_decoder_that_was_restarted_is_out_of_reach_until_its_prefiller_is_restarted(
    lab: StartLab,
) -> None:
    """A prefiller that met the old process would hang, or write into nothing."""
    pd = await lab()
    await restart(pd, pd.decoder)
    await in_use(pd, pd.decoder)
    canaries = len(pd.prefiller.seen)
    await looked_at(pd, pd.prefiller)
    assert len(pd.prefiller.seen) == canaries, "a canary could make it hang"
    assert pd.pairs() == set()
    status, told = await ready(pd)
    assert status == 503
    assert FOREVER_BROKEN in told["reason"]
    assert told["unproved"] == [f"{pd.prefiller.url} with {pd.decoder.url}: {FOREVER_BROKEN}"]
    assert await text_of(pd, LONG, False) == RIGHT
    assert await pd.endpoint.outcomes() == {("decode_only", "no_prefiller", "ok"): 1}

    await restart(pd, pd.prefiller)
    await proved_again(pd)
    assert await text_of(pd, LONG, False) == RIGHT
    assert [s for s in pd.decoder.computed if not s.is_canary] == [pd.decoder.requests[0]]


async def test_a_decoder_that_is_back_before_anybody_looks_is_known_to_be_another_process(
    lab: StartLab,
) -> None:
    pd = await lab()
    pd.decoder.renew()
    pd.of(pd.decoder).doubt()  # the next look, which comes every few seconds
    await until(lambda: pd.pairs() == set())
    await in_use(pd, pd.decoder)
    status, told = await ready(pd)
    assert status == 503
    assert FOREVER_BROKEN in told["reason"]


async def test_the_other_decoder_is_used_while_one_is_out_of_reach(lab: StartLab) -> None:
    pd = await lab(decode=2)
    first, second = pd.decode
    await restart(pd, first)
    await in_use(pd, first)
    await looked_at(pd, pd.prefiller)
    assert pd.pairs() == {("p0", "d1")}
    status, told = await ready(pd)
    assert status == 200
    assert told["unproved"] == [f"{pd.prefiller.url} with {first.url}: {FOREVER_BROKEN}"]
    for _ in range(3):
        assert await text_of(pd, LONG, False) == RIGHT
    assert len(second.tagged) == 3


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engine_that_could_not_be_reached_and_is_the_same_process_is_used_again(
    lab: StartLab, role: str
) -> None:
    pd = await lab()
    (fake,) = getattr(pd, role)
    await seen_gone(pd, fake)
    await fake.come_back()
    await proved_again(pd)
    assert await text_of(pd, LONG, False) == RIGHT
    assert len(pd.decoder.tagged) == 1


async def test_a_request_that_finds_the_decoder_gone_for_a_moment_does_not_part_the_pair(
    lab: StartLab,
) -> None:
    pd = await lab()
    await pd.decoder.cut_off()
    assert (await pd.endpoint.post(LONG)).status_code in (502, 503)
    assert pd.of(pd.decoder).state is State.WAITING
    await pd.decoder.come_back()
    pd.of(pd.decoder).doubt()
    await proved_again(pd)
    assert await text_of(pd, LONG, False) == RIGHT


async def test_a_decoder_that_does_not_say_when_it_started_is_taken_for_another_process(
    lab: StartLab,
) -> None:
    pd = await lab(before=lambda pd: setattr(pd.decode[0], "started", None))
    await seen_gone(pd, pd.decoder)
    await pd.decoder.come_back()
    await in_use(pd, pd.decoder)
    await looked_at(pd, pd.prefiller)
    _, told = await ready(pd)
    assert FOREVER_BROKEN in told["reason"]
    await restart(pd, pd.prefiller)
    await proved_again(pd)


async def test_a_prefiller_that_was_restarted_is_proved_anew(lab: StartLab) -> None:
    pd = await lab()
    await restart(pd, pd.prefiller)
    await proved_again(pd)
    assert await text_of(pd, LONG, False) == RIGHT


async def test_a_decoder_that_restarts_during_a_prefill_is_sent_no_release(lab: StartLab) -> None:
    """Its buffer is a new one: all that a release would find there is work."""
    pd = await lab(notification_timeout=0.1)
    hold = pd.prefiller.on_generate = Hold()
    waiting = asyncio.create_task(text_of(pd, LONG, False))
    await hold.holds()
    await restart(pd, pd.decoder)
    await in_use(pd, pd.decoder)
    hold.go_on.set()
    assert await waiting == RIGHT
    await pd.idle()
    assert pd.decoder.tagged == []


# The router's own end


async def leaves_a_prefill_at_work(pd: Lab) -> Hold:
    hold = pd.prefiller.on_generate = Hold()
    request = asyncio.create_task(pd.endpoint.post(LONG))
    await hold.holds()
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await until(lambda: pd.handovers.cleaning_up)
    return hold


async def test_a_router_that_ends_gives_clean_ups_a_moment(lab: StartLab) -> None:
    """The next router does not know of them."""
    pd = await lab(pace=replace(PACE, shutdown=30.0))
    hold = await leaves_a_prefill_at_work(pd)
    ending = asyncio.create_task(pd.handovers.aclose())
    await asyncio.sleep(0)
    hold.go_on.set()
    await ending
    assert pd.left() == {}
    assert tag_of(pd.decoder.releases[0].body) == tag_of(pd.prefiller.requests[0].body)


async def test_a_router_that_ends_does_not_wait_for_what_cannot_be_cleaned_up(
    lab: StartLab, caplog: pytest.LogCaptureFixture
) -> None:
    pd = await lab()
    hold = await leaves_a_prefill_at_work(pd)
    await pd.decoder.cut_off()
    hold.go_on.set()
    await pd.handovers.aclose()
    assert pd.handovers.cleaning_up == 0
    assert "1 hand-offs are not cleaned up" in caplog.text
    pd.explained = True  # the chunks of the old client lie in the decoder's buffer


async def test_a_router_that_ends_does_not_wait_for_notifications_that_are_late(
    lab: StartLab, caplog: pytest.LogCaptureFixture
) -> None:
    pd = await lab(pace=replace(PACE, late=3600.0), notification_timeout=0.1)
    pd.prefiller.silent_ranks = 1
    assert await text_of(pd, LONG, False) == RIGHT
    assert (pd.handovers.cleaning_up, pd.notifications.expected) == (1, 1)
    await pd.handovers.aclose()
    assert (pd.handovers.cleaning_up, pd.notifications.expected) == (0, 0)
    assert "1 hand-offs are not cleaned up" in caplog.text
    pd.explained = True  # its chunks lie in the decoder's buffer


async def test_a_router_ends_with_requests_at_work_in_every_phase(lab: StartLab) -> None:
    pd = await lab(buffer=2, drain_timeout=0)
    requests = []
    decodes = pd.decoder.on_generate = Hold()
    requests.append(asyncio.create_task(pd.endpoint.post(LONG)))
    await decodes.holds()
    pd.prefiller.on_generate = hang
    requests.append(asyncio.create_task(pd.endpoint.post(LONG)))
    await until(lambda: len(pd.prefiller.requests) == 2)
    requests.append(asyncio.create_task(pd.endpoint.post(LONG)))
    await until(lambda: len(pd.line) == 1)
    for request in requests:
        request.cancel()
    await asyncio.gather(*requests, return_exceptions=True)
    pd.explained = True  # the prefiller never ends; the fixtures end the router now
