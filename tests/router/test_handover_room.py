"""Room in a decoder's receive buffer: never more is asked of it than it has, and nobody waits for ever."""

from __future__ import annotations

import asyncio

import pytest

from tandem.http import Responder

from .conftest import SHORT, StartLab
from .fakes import FakeEngine, Seen, hang
from .lmcache_fakes import RIGHT, Hold, Lab, notification, prompt, tag_of, until
from .test_handover import text_of


async def arrive(pd: Lab, *sizes: int) -> list[asyncio.Task[str]]:
    """Send prompts of so many chunks, each when the one before has its room or waits for it."""
    tasks = []
    for n, size in enumerate(sizes):
        begun = pd.endpoint.app.fleet.engines[0], len(pd.line), pd.reserved
        tasks.append(asyncio.create_task(text_of(pd, prompt(size, "abcdefgh"[n]), False)))
        await until(lambda begun=begun: begun[1:] != (len(pd.line), pd.reserved))
    return tasks


def order(engine: FakeEngine) -> list[str]:
    return [s.body["prompt"][0] for s in engine.requests]


@pytest.mark.parametrize("sizes", [(1,) * 8, (2, 1, 3, 1, 2, 2, 3, 1), (3,) * 8])
async def test_more_prompts_than_a_buffer_holds_are_served_in_order_of_arrival(
    lab: StartLab, sizes: tuple[int, ...]
) -> None:
    """LMCache would take them all, and stand still (the fakes tell)."""
    pd = await lab(buffer=3)
    hold = pd.prefiller.on_generate = Hold()
    tasks = await arrive(pd, *sizes)
    assert pd.reserved <= 3
    assert len(pd.line) > 0
    hold.go_on.set()
    assert await asyncio.gather(*tasks) == [RIGHT] * 8
    assert order(pd.prefiller) == list("abcdefgh")
    assert pd.decoder.most <= 3
    assert await pd.endpoint.outcomes() == {("disaggregated", "threshold", "ok"): 8}


async def test_no_prompt_in_the_line_deadlocks_with_decodes_that_hold_its_room(lab: StartLab) -> None:
    pd = await lab(buffer=3)
    hold = pd.decoder.on_generate = Hold()
    tasks = await arrive(pd, 2, 3, 1, 2, 3, 1, 1, 2)
    await hold.holds()
    assert pd.decoder.used == 2
    hold.go_on.set()
    assert await asyncio.gather(*tasks) == [RIGHT] * 8
    assert pd.decoder.most <= 3


async def test_a_prompt_larger_than_the_buffer_goes_to_a_decoder_alone(lab: StartLab) -> None:
    """No room that is freed would ever be enough for it."""
    pd = await lab(buffer=3)
    assert await text_of(pd, prompt(4), False) == RIGHT
    assert pd.prefiller.requests == []
    assert await pd.endpoint.outcomes() == {("decode_only", "over_buffer", "ok"): 1}


async def test_a_prompt_that_is_larger_than_the_buffer_does_not_wait_for_those_before_it(
    lab: StartLab,
) -> None:
    pd = await lab(buffer=3)
    hold = pd.prefiller.on_generate = Hold()
    (before,) = await arrive(pd, 3)
    assert await text_of(pd, prompt(4), False) == RIGHT
    hold.go_on.set()
    assert await before == RIGHT


@pytest.mark.parametrize(
    "options", [{"reservation_queue": 0}, {"reservation_timeout": 0.1}], ids=["full", "timed out"]
)
async def test_who_finds_no_room_is_computed_by_a_decoder(lab: StartLab, options: dict[str, float]) -> None:
    pd = await lab(buffer=3, **options)
    hold = pd.prefiller.on_generate = Hold()
    (before,) = await arrive(pd, 3)
    assert await text_of(pd, prompt(1), False) == RIGHT
    hold.go_on.set()
    assert await before == RIGHT
    assert await pd.endpoint.outcomes() == {
        ("decode_only", "no_room", "ok"): 1,
        ("disaggregated", "threshold", "ok"): 1,
    }


async def test_short_prompts_are_not_held_up_behind_long_ones(lab: StartLab) -> None:
    pd = await lab(buffer=3)
    hold = pd.prefiller.on_generate = Hold()
    tasks = await arrive(pd, 3, 2, 1)
    assert len(pd.line) == 2
    assert await text_of(pd, SHORT, False) == RIGHT
    hold.go_on.set()
    assert await asyncio.gather(*tasks) == [RIGHT] * 3


async def test_of_two_decoders_the_one_with_room_is_taken(lab: StartLab) -> None:
    pd = await lab(decode=2, buffer=3)
    prefills = pd.prefiller.on_generate = Hold()
    await arrive_and_leave(pd, prefills)
    (full,) = {e.url for e, _ in pd.budgets.used}
    (other,) = [d for d in pd.decode if d.url != full]
    # The other has more to do, so it is the room that decides.
    busy = other.on_generate = Hold()
    with pd.of(other).busy():
        task = asyncio.create_task(text_of(pd, prompt(2, "b"), False))
        await prefills.holds(2)
    assert {e.url: n for (e, _), n in pd.budgets.used.items()} == {full: 3, other.url: 2}
    prefills.go_on.set()
    busy.go_on.set()
    assert await task == RIGHT
    assert order(other) == ["b"]


async def arrive_and_leave(pd: Lab, hold: Hold) -> None:
    """A prompt that fills a decoder's buffer, and whose client is gone."""
    (task,) = await arrive(pd, 3)
    await hold.holds()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_room_that_a_failed_hand_off_holds_is_waited_for(lab: StartLab) -> None:
    pd = await lab(buffer=3, first_token_timeout=0.5, seconds_per_1000_tokens=0)
    pd.decoder.on_generate = lambda engine, seen, responder: (
        len(engine.requests) == 1 and hang(engine, seen, responder)
    )
    tasks = await arrive(pd, 3, 3)
    assert await asyncio.gather(*tasks) == [RIGHT] * 2
    assert pd.decoder.most <= 3


# Canaries


async def test_a_canary_holds_room_until_it_was_read(lab: StartLab) -> None:
    pd = await lab(wait=False, buffer=1, before=lambda pd: setattr(pd.prefill[0], "silent_ranks", 1))
    await until(lambda: pd.prefiller.sent)
    assert pd.reserved == 1
    assert pd.pairs() == set()
    pd.prefiller.silent_ranks = 0
    pd.prefiller.notify(notification(*pd.prefiller.sent))
    await until(pd.pairs)
    assert pd.reserved == 0
    assert pd.decoder.buffer == {}


async def test_a_canary_whose_notification_is_lost_is_read_and_told(lab: StartLab) -> None:
    pd = await lab(
        wait=False,
        ranks=2,
        notification_timeout=0.3,
        before=lambda pd: setattr(pd.prefill[0], "silent_ranks", 1),
    )
    await until(lambda: len(pd.prefiller.sent) > 1)
    status = (await pd.endpoint.client.get("/ready")).json()
    assert status["ready"] is False
    assert "1 of 2 notifications did not come" in status["reason"]
    pd.prefiller.silent_ranks = 0
    await pd.endpoint.ready()
    assert pd.decoder.requests == [], "what is released for a canary is marked as one"
    assert await pd.endpoint.outcomes() == {}


@pytest.mark.slow
async def test_a_canary_waits_while_the_buffer_is_full_of_requests(lab: StartLab) -> None:
    def second_starts_later(pd: Lab) -> None:
        pd.prefill[1].refuses = lambda seen: True

    pd = await lab(prefill=2, buffer=1, notification_timeout=0.3, before=second_starts_later, wait=False)
    first, second = pd.prefill
    await until(lambda: pd.pairs() == {("p0", "d0")})
    hold = first.on_generate = Hold()
    (task,) = await arrive(pd, 1)
    await hold.holds()
    second.refuses = lambda seen: False
    canaries = len(second.seen)
    await visited(pd)
    assert len(second.seen) <= canaries + 1  # one may have been under way
    assert second.sent == set()
    hold.go_on.set()
    assert await task == RIGHT
    await pd.endpoint.ready()


async def visited(pd: Lab) -> None:
    """Until the second prefiller has been looked at a few times."""
    engine = pd.of(pd.prefill[1])
    for _ in range(3):
        engine.doubt()
        await until(lambda: not engine.alarm.is_set())


async def test_a_canarys_hand_off_is_never_sent_twice_over_a_connection_that_died(lab: StartLab) -> None:
    died: list[Seen] = []

    def dies_once(pd: Lab) -> None:
        (decoder,) = pd.decode
        answer = decoder.answer

        def answer_or_die(seen: Seen, responder: Responder) -> None:
            if tag_of(seen.body) is not None and not died:
                died.append(seen)
                responder.abort()
            else:
                answer(seen, responder)

        decoder.answer = answer_or_die

    pd = await lab(before=dies_once)
    tags = [tag_of(s.body) for s in pd.decoder.seen if not s.headers["x-request-id"].endswith("-release")]
    sent = [tag for tag in tags if tag is not None]
    assert len(sent) == len(set(sent)) == 2
