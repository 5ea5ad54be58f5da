"""Waiting one's turn: first come first served, nobody for longer than need be, and nobody for nothing."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.router.waiting import Line, LineFull, WaitedTooLong
from tandem.sim import virtual

from ..sim.helpers import in_virtual_time

ROOM = 4


@dataclass
class Store:
    """Something of which there is so much, and the line of those who want some."""

    line: Line
    free: int = ROOM
    served: list[int] = field(default_factory=list)

    def take(self, who: int, amount: int) -> int | None:
        if amount > self.free:
            return None
        self.free -= amount
        self.served.append(who)
        return amount

    def give_back(self, amount: int) -> None:
        self.free += amount
        self.line.changed()

    def come(self, who: int, amount: int = 1, timeout: float = 3600.0) -> asyncio.Task[int]:
        return asyncio.create_task(self.line.turn(lambda: self.take(who, amount), timeout))


async def settled() -> None:
    """Until every task that can go on has done so."""
    for _ in range(20):
        await asyncio.sleep(0)


@in_virtual_time
async def test_who_finds_it_free_does_not_wait() -> None:
    store = Store(Line(longest=0))
    assert await store.line.turn(lambda: store.take(0, ROOM), 0.0) == ROOM
    with pytest.raises(LineFull):
        await store.line.turn(lambda: store.take(1, 1), 60.0)
    assert store.served == [0]


@in_virtual_time
async def test_a_small_claim_does_not_overtake_a_large_one() -> None:
    store = Store(Line(longest=10), free=1)
    large, small = store.come(0, amount=3), store.come(1, amount=1)
    await settled()
    assert (store.free, len(store.line)) == (1, 2), "there is room for the small one, and it is not its turn"
    store.give_back(1)
    await settled()
    assert store.served == []
    store.give_back(2)
    assert (await large, await small) == (3, 1)
    assert store.served == [0, 1]


@in_virtual_time
async def test_one_who_comes_when_the_first_is_being_called_goes_behind() -> None:
    store = Store(Line(longest=10), free=0)
    first = store.come(0)
    await settled()
    store.give_back(1)
    late = store.come(1)
    assert await first == 1
    await settled()
    assert not late.done()
    store.give_back(1)
    assert await late == 1


@in_virtual_time
async def test_what_is_given_back_at_once_serves_as_many_as_it_is_enough_for() -> None:
    store = Store(Line(longest=10), free=0)
    tasks = [store.come(who) for who in range(5)]
    await settled()
    store.give_back(3)
    await settled()
    assert [t.done() for t in tasks] == [True, True, True, False, False]
    store.give_back(2)
    await asyncio.gather(*tasks)
    assert store.served == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("who", [0, 1, 2])
@pytest.mark.parametrize("called", [False, True])
def test_one_who_leaves_costs_the_others_nothing(who: int, called: bool) -> None:
    """Also when it leaves just as it was called."""

    async def leaves() -> None:
        store = Store(Line(longest=3), free=0)
        tasks = [store.come(n) for n in range(3)]
        await settled()
        if called:
            store.give_back(1)
        tasks[who].cancel()
        await settled()
        if not called:
            assert len(store.line) == 2
            store.give_back(1)
        left = [n for n in range(3) if n != who]
        await tasks[left[0]]
        assert store.served == left[:1]
        store.give_back(1)
        await tasks[left[1]]
        assert store.served == left
        assert len(store.line) == 0

    virtual.run(leaves())


@in_virtual_time
async def test_a_turn_that_does_not_come_in_time_is_told_and_the_next_is_called() -> None:
    store = Store(Line(longest=10), free=1)
    now = asyncio.get_running_loop().time
    hasty, patient = store.come(0, amount=2, timeout=5.0), store.come(1, amount=1, timeout=60.0)
    with pytest.raises(WaitedTooLong):
        await hasty
    assert now() == pytest.approx(5.0)
    assert await patient == 1, "its turn has come, and there was room for it all the time"
    assert now() == pytest.approx(5.0)


@in_virtual_time
async def test_being_called_in_vain_does_not_give_more_time() -> None:
    store = Store(Line(longest=1), free=0)
    waiting = store.come(0, timeout=5.0)
    for _ in range(4):
        await asyncio.sleep(1.0)
        store.line.changed()
    with pytest.raises(WaitedTooLong):
        await waiting
    assert asyncio.get_running_loop().time() == pytest.approx(5.0)


@in_virtual_time
async def test_without_patience_one_is_turned_away_at_once() -> None:
    store = Store(Line(longest=1), free=0)
    with pytest.raises(WaitedTooLong):
        await store.come(0, timeout=0.0)
    assert asyncio.get_running_loop().time() == 0.0
    assert len(store.line) == 0


@in_virtual_time
async def test_one_who_cannot_be_served_any_more_leaves_and_the_next_is_called() -> None:
    store = Store(Line(longest=10), free=0)
    hopeless = False

    def take() -> int | None:
        if hopeless:
            raise ValueError("gone")
        return None

    first = asyncio.create_task(store.line.turn(take, 60.0))
    await settled()
    second = store.come(1)
    await settled()
    hopeless = True
    store.give_back(1)
    with pytest.raises(ValueError, match="gone"):
        await first
    assert await second == 1
    with pytest.raises(ValueError, match="gone"):  # at once, too
        await store.line.turn(take, 60.0)
    assert len(store.line) == 0


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.integers(1, ROOM), st.integers(0, 9)),
        st.tuples(st.just("give back"), st.integers(0, 9), st.none()),
        st.tuples(st.just("leave"), st.integers(0, 9), st.booleans()),
        st.tuples(st.just("wait"), st.integers(0, 5), st.none()),
        st.tuples(st.just("cheer"), st.none(), st.none()),
    ),
    max_size=40,
)


@given(st.integers(0, 5), STEPS)
def test_whatever_happens_the_line_is_in_order_bounded_and_wastes_nothing(
    longest: int, steps: list[tuple[str, Any, Any]]
) -> None:
    async def happens() -> None:
        store, loop = Store(Line(longest)), asyncio.get_running_loop()
        wanted: dict[int, int] = {}
        patient_until: dict[int, float] = {}
        tasks: dict[int, asyncio.Task[int]] = {}
        held: list[int] = []
        waiting: list[int] = []
        gone: set[int] = set()
        at = 0
        for step, first, second in steps:
            if step == "come":
                who = len(tasks)
                wanted[who], patient_until[who] = first, loop.time() + second + 0.5
                full = len(waiting) >= longest and (bool(waiting) or store.free < first)
                tasks[who] = store.come(who, first, second + 0.5)
                waiting.append(who)
                await settled()
                assert full is (tasks[who].done() and isinstance(tasks[who].exception(), LineFull))
            elif step == "give back" and held:
                store.give_back(wanted[held.pop(first % len(held))])
            elif step == "leave" and waiting:
                if second:  # just as somebody is called
                    store.line.changed()
                leaving = waiting[first % len(waiting)]
                tasks[leaving].cancel()
                gone.add(leaving)
            elif step == "wait":
                await asyncio.sleep(first)
            elif step == "cheer":
                store.line.changed()
            await settled()

            arrived = list(waiting)
            waiting = [who for who in waiting if not tasks[who].done()]
            served, at = store.served[at:], len(store.served)
            held += served
            assert served == [who for who in arrived if who in served], "in order of arrival"
            for who in set(arrived) - set(waiting) - set(served) - gone:
                kind = LineFull if step == "come" and who == arrived[-1] else WaitedTooLong
                assert isinstance(tasks[who].exception(), kind)
                assert kind is LineFull or patient_until[who] <= loop.time()
            assert len(store.line) == len(waiting) <= longest
            assert all(loop.time() < patient_until[who] for who in waiting)
            assert not waiting or wanted[waiting[0]] > store.free, "the first waits for nothing"
            assert store.free + sum(wanted[who] for who in held) == ROOM
        for who in waiting:
            tasks[who].cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        assert len(store.line) == 0

    virtual.run(happens())
