"""Each endpoint is worked on once at a time, and again when it has changed."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.operator.control.queue import WorkQueue


async def test_many_changes_while_a_key_waits_are_one_piece_of_work() -> None:
    queue: WorkQueue[str] = WorkQueue()
    for _ in range(5):
        queue.add("a")
    assert await queue.get() == "a"
    assert len(queue) == 0


async def test_a_change_while_a_key_is_worked_on_brings_it_back_afterwards() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("a")
    await queue.get()
    queue.add("a")
    assert len(queue) == 0, "never twice at the same time"
    queue.done("a")
    assert await queue.get() == "a"
    queue.done("a")
    assert queue.idle


async def test_who_waits_for_work_is_woken() -> None:
    queue: WorkQueue[str] = WorkQueue()
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.add("a")
    assert await asyncio.wait_for(waiting, 1) == "a"


async def test_a_failure_is_tried_again_later_each_time() -> None:
    queue: WorkQueue[str] = WorkQueue(first_pause=0.001, longest_pause=0.004)
    pauses = []
    for _ in range(5):
        queue.add("a")
        await queue.get()
        pauses.append(queue.failed("a"))
        assert await asyncio.wait_for(queue.get(), 1) == "a"
        queue._working.discard("a")
    assert queue.failures("a") == 5
    assert all(0 < pause <= 0.004 for pause in pauses)
    assert pauses[4] > pauses[0] or pauses[4] >= 0.002


async def test_a_success_forgets_the_failures() -> None:
    queue: WorkQueue[str] = WorkQueue(first_pause=10)
    queue.add("a")
    await queue.get()
    queue.failed("a")
    queue.add("a")
    await queue.get()
    queue.done("a")
    assert queue.failures("a") == 0
    assert queue.idle


async def test_a_change_does_not_wait_for_the_end_of_a_pause() -> None:
    queue: WorkQueue[str] = WorkQueue(first_pause=1000)
    queue.add("a")
    await queue.get()
    queue.failed("a")
    queue.add("a")
    assert await asyncio.wait_for(queue.get(), 1) == "a"


async def test_one_that_fails_and_keeps_changing_is_not_tried_without_a_pause() -> None:
    queue: WorkQueue[str] = WorkQueue(first_pause=1000)
    queue.add("a")
    await queue.get()
    queue.add("a")
    assert 0 < queue.failed("a") <= 1.0
    assert len(queue) == 0


@pytest.mark.parametrize(("first", "second"), [(0.001, 1000), (1000, 0.001)])
async def test_of_two_times_the_earlier_counts(first: float, second: float) -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add_after("a", first)
    queue.add_after("a", second)
    assert await asyncio.wait_for(queue.get(), 1) == "a"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["add", "get", "done", "failed"]))))
def test_no_key_is_lost_and_none_is_worked_on_twice(steps: list[tuple[str, str]]) -> None:
    async def play() -> None:
        queue: WorkQueue[str] = WorkQueue(first_pause=0.0001, longest_pause=0.0001)
        working: set[str] = set()
        owed: set[str] = set()
        for key, step in steps:
            if step == "add":
                queue.add(key)
                owed.add(key)
            elif step == "get" and len(queue):
                got = await queue.get()
                assert got not in working
                working.add(got)
                owed.discard(got)
            elif key in working:
                working.discard(key)
                if step == "done":
                    queue.done(key)
                else:
                    queue.failed(key)
                    owed.add(key)
        for key in working:
            queue.done(key)
        while owed:
            owed.discard(await asyncio.wait_for(queue.get(), 1))

    asyncio.run(play())


async def test_groups_take_turns_however_many_keys_one_has() -> None:
    queue: WorkQueue[tuple[str, int]] = WorkQueue(group=lambda key: key[0])
    for number in range(100):
        queue.add(("many", number))
    queue.add(("few", 0))
    queue.add(("few", 1))
    first = [await queue.get() for _ in range(5)]
    assert first == [("many", 0), ("few", 0), ("many", 1), ("few", 1), ("many", 2)]
    assert len(queue) == 97
    queue.add(("few", 2))
    assert [await queue.get() for _ in range(2)] == [("many", 3), ("few", 2)]
