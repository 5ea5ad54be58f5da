"""What is remembered of what was sent: bounded, and forgotten as engines forget."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.router.fleet import Fleet
from tandem.router.strategies import SentIndex

from .helpers import engine, fleet, prompt

IDS = st.lists(st.integers(0, 1), min_size=1, max_size=24)


def test_what_was_sent_is_expected_to_be_cached() -> None:
    index, (a, b) = SentIndex(16, stride=4), fleet(2)
    index.sent(prompt(range(1000)), a)
    match = index.match(prompt([*range(500), *range(100)]), [a, b])
    assert match.hit(a).tokens == 500 // 64 * 64
    assert match.hit(b).tokens == 0
    assert match.leaders(2) == [a]


def test_a_hit_is_of_whole_blocks_and_leaves_a_token() -> None:
    index, (a,) = SentIndex(16, stride=4), fleet(1)
    index.sent(prompt(range(128)), a)
    assert index.match(prompt(range(128)), [a]).hit(a).tokens == 112
    assert index.match(prompt(range(129)), [a]).hit(a).tokens == 128


def test_spaces_are_apart() -> None:
    index, (a,) = SentIndex(2, stride=1), fleet(1)
    index.sent(prompt(range(9), salt="x"), a)
    assert index.match(prompt(range(9), salt="x"), [a]).hit(a).tokens == 8
    for other in (prompt(range(9)), prompt(range(9), salt="y"), prompt(range(9), lora="x")):
        assert index.match(other, [a]).hit(a).tokens == 0


@settings(max_examples=200)
@given(st.lists(IDS, max_size=30), IDS, st.integers(1, 12))
def test_it_forgets_as_a_cache_of_that_size(sent: list[list[int]], asked: list[int], size: int) -> None:
    """Least recently used first; of one prompt, its end first. Up to the batch in which it forgets."""
    index, (a,) = SentIndex(1, stride=1, cache_tokens=lambda engine: size), fleet(1)
    cache: OrderedDict[tuple[int, ...], None] = OrderedDict()
    for ids in sent:
        index.sent(prompt(ids), a)
        for end in range(len(ids), 0, -1):
            cache[tuple(ids[:end])] = None
            cache.move_to_end(tuple(ids[:end]))
        while len(cache) > size:
            cache.popitem(last=False)
    expected = 0
    while expected < len(asked) - 1 and tuple(asked[: expected + 1]) in cache:
        expected += 1
    assert len(index) == len(cache)
    assert index.match(prompt(asked), [a]).hit(a).tokens == expected


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 50), st.booleans()), max_size=60))
def test_it_is_bounded_however_many_engines_come_and_go(steps: list[tuple[int, int, bool]]) -> None:
    index, engines = SentIndex(1, stride=1, most=200), fleet(5)
    for which, start, leaves in steps:
        if leaves:
            index.gone(engines[which])
            assert index.match(prompt(range(start, start + 20)), engines).hit(engines[which]).tokens == 0
        else:
            index.sent(prompt(range(start, start + 20)), engines[which])
        assert len(index) <= 200


def test_all_engines_together_are_bounded() -> None:
    """One alone may have more than its even share, all of them may not."""
    index, engines = SentIndex(1, stride=1, most=2000), fleet(5)
    for i in range(500):
        index.sent(prompt(range(i, i + 40)), engines[i % 5])
        assert len(index) <= 2000
    assert len(index) > 1800
    held = [index.match(prompt(range(499, 539)), engines).hit(e).tokens for e in engines]
    assert held == [0, 0, 0, 0, 39]


def test_what_an_engine_may_still_compute_is_that_of_the_last_requests_in_flight() -> None:
    index, (a,) = SentIndex(1, stride=1), fleet(1)
    index.sent(prompt([1, 2, 3, 4]), a)
    index.sent(prompt([1, 2, 9, 9]), a)
    match = index.match(prompt([1, 2, 3, 4, 5]), [a])
    for in_flight, coming in ((2, 4), (1, 2), (0, 0)):
        a.in_flight = in_flight
        assert match.coming(a) == coming


LONG = 1000  # spans of a prompt that is learnt in pieces


class Pieces:
    """What is to be learnt, one piece of any prompt at a time."""

    def __init__(self) -> None:
        self.left: list[Iterator[None]] = []

    def do(self, which: int) -> None:
        at = which % len(self.left)
        if next(self.left[at], "end") == "end":
            del self.left[at]


@settings(max_examples=50)
@given(st.lists(st.integers(1, LONG), min_size=1, max_size=6), st.lists(st.integers(0, 99)))
def test_long_prompts_that_are_learnt_in_pieces_are_known_in_the_end(
    shared: list[int], order: list[int]
) -> None:
    """Whichever pieces come first. Each prompt has a part of the first one, and a tail of its own."""
    pieces, (a,) = Pieces(), fleet(1)
    index = SentIndex(1, stride=1, later=pieces.left.append)
    prompts = [prompt([*range(n), *range(5000 * i, 5000 * i + LONG)]) for i, n in enumerate(shared, 1)]
    assert all(index.sent(each, a) for each in prompts)
    for which in order:
        if pieces.left:
            pieces.do(which)
    while pieces.left:
        pieces.do(0)
    a.in_flight = 1
    for each, n in zip(prompts, shared, strict=True):
        match = index.match(each, [a])
        assert match.hit(a).tokens == n + LONG - 1
        assert match.coming(a) == (n + LONG - 1 if each is prompts[-1] else min(n, shared[-1]))
    assert not any(index.sent(each, a) for each in prompts)


def test_nothing_more_is_learnt_of_an_engine_that_has_gone() -> None:
    pieces, (a, b) = Pieces(), fleet(2)
    index = SentIndex(1, stride=1, later=pieces.left.append)
    index.sent(prompt(range(LONG)), a)
    pieces.do(0)
    index.gone(a)
    while pieces.left:
        pieces.do(0)
    for _ in range(LONG):  # what was known goes little by little
        index.sent(prompt([1]), b)
    while pieces.left:
        pieces.do(0)
    assert len(index) == 1
    assert index.match(prompt(range(LONG)), [a]).hit(a).tokens == 0


def test_prompts_without_ids_are_passed_over() -> None:
    from tandem.router.strategies import Prompt

    index, (a,) = SentIndex(), fleet(1)
    index.sent(Prompt(1000), a)
    assert len(index) == 0
    assert index.match(Prompt(1000), [a]).hit(a).tokens == 0


@pytest.mark.parametrize("ends", ["before", "after"])
def test_nothing_is_kept_of_an_engine_that_has_left_also_when_its_requests_end_later(ends: str) -> None:
    """What a decoder has computed is told when it has answered, which may be after it left."""
    known = Fleet()
    index, other = SentIndex(1, stride=1), engine("http://other:1")
    known.on_loss(index.gone)
    for number in range(3):
        leaving = engine(f"http://e{number}:1")
        known.add(leaving)
        index.sent(prompt(range(50)), leaving)
        if ends == "before":
            index.sent(prompt(range(100)), leaving)
        known.remove(leaving)
        if ends == "after":
            index.sent(prompt(range(100)), leaving)
            assert index.match(prompt(range(50)), [leaving]).hit(leaving).tokens == 0
        left = weakref.ref(leaving)
        del leaving
        index.sent(prompt([1]), other)  # what was known goes little by little
        index.gone(other)  # and with it which lists were asked about
        index.sent(prompt([1]), other)
        gc.collect()
        assert left() is None
    assert len(index) == 1


def test_an_engine_that_was_lost_and_comes_back_is_learnt_again() -> None:
    known, index, one = Fleet(), SentIndex(1, stride=1), engine("http://e:1")
    known.on_loss(index.gone)
    known.add(one)
    known.prove(one, [])
    index.sent(prompt(range(50)), one)
    known.lost(one, "gone")
    assert index.match(prompt(range(50)), [one]).hit(one).tokens == 0
    index.sent(prompt(range(30)), one)
    assert index.match(prompt(range(50)), [one]).hit(one).tokens == 30
