"""prefixaware and kvaware: cached prefixes against load, and what kvaware does without events."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterator
from itertools import count, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tandem.router.engines import Engine
from tandem.router.strategies import (
    KvAware,
    KvIndex,
    KvPrefixes,
    LeastLoaded,
    PrefixAware,
    Prompt,
    SentIndex,
    Strategy,
)
from tandem.router.strategies.load import RecentWork

from .helpers import fleet, prompt
from .simulation import Served, run


def hot(load: float, engines: int, requests: int, seed: int) -> Iterator[Served]:
    """80 % of the prompts share 8,000 tokens. `load`: of the engines' time, about."""
    rng = random.Random(seed)
    at, unique = 0.0, count(10**6)
    for _ in range(requests):
        at += rng.expovariate(load * engines / 0.46)
        if rng.random() < 0.8:
            ids = [*range(8000), *(next(unique) for _ in range(rng.randrange(200, 1000)))]
        else:
            ids = [next(unique) for _ in range(rng.randrange(1000, 7000))]
        yield Served(at, prompt(ids), decode=0.3)


@pytest.mark.parametrize("load", [0.05, 0.5, 0.9])
def test_a_hot_prefix_does_not_overload_one_engine(load: float) -> None:
    engines = fleet(8)
    strategy = PrefixAware(rng=random.Random(1))
    result = run(strategy, engines, hot(load, 8, 800, seed=5), cache_blocks=8000)
    assert result.imbalance <= 1.3
    assert result.hit_rate > 0.8  # of 0.86 that could be hit if all were in one cache


def conversations(engines: int, seed: int) -> Iterator[Served]:
    """40 at a time, each turn having all before it."""
    rng = random.Random(seed)
    unique, at = count(), 0.0
    turns: list[list[int]] = [[] for _ in range(40)]
    for _ in range(800):
        at += rng.expovariate(engines / 0.6)
        which = rng.randrange(len(turns))
        turns[which] += [next(unique) for _ in range(rng.randrange(300, 900))]
        yield Served(at, prompt(turns[which]), decode=0.1)
        if len(turns[which]) > 8000:
            turns[which] = []


def test_conversations_stay_where_their_cache_is() -> None:
    hit_rate = {}
    for strategy in (PrefixAware(rng=random.Random(1)), LeastLoaded(random.Random(1))):
        result = run(strategy, fleet(4), conversations(4, seed=2), cache_blocks=8000)
        hit_rate[type(strategy)] = result.hit_rate
        assert result.imbalance <= 1.15
    assert hit_rate[PrefixAware] > 0.75
    assert hit_rate[LeastLoaded] < 0.5


def stored(index: KvIndex, engine: Engine, ids: list[int], *, complete: bool = True) -> None:
    rank = index.follow(engine, complete=complete)
    blocks = len(ids) // 16
    index.store(rank, list(range(1, blocks + 1)), None, ids[: blocks * 16], 16)


def test_kvaware_goes_where_the_engine_says_the_prefix_is() -> None:
    engines, index = fleet(3), KvIndex()
    ids = list(range(1000))
    for e in engines:
        stored(index, e, ids[: 400 if e is engines[1] else 32])
    strategy = KvAware(KvPrefixes(index))
    # Sent elsewhere, but what was sent counts for nothing where events tell.
    strategy.sent(prompt(ids), engines[2])
    choice = strategy.choose(prompt(ids), engines)
    assert (choice.engine, choice.hit_tokens, choice.rank) == (engines[1], 400, 0)
    assert choice.scores.keys() == {e.url for e in engines}
    assert min(choice.scores, key=lambda url: choice.scores[url]) == choice.engine.url
    assert not strategy.fallbacks


def test_the_hosts_memory_counts_a_little_less() -> None:
    engines, index = fleet(2), KvIndex()
    for e, medium in zip(engines, ("CPU", "GPU"), strict=True):
        rank = index.follow(e, complete=True)
        index.store(rank, [1, 2], None, list(range(32)), 16, medium=medium)
    choice = KvAware(KvPrefixes(index)).choose(prompt(range(40)), engines)
    assert (choice.engine, choice.hit_tokens) == (engines[1], 32)
    choice = KvAware(KvPrefixes(index)).choose(prompt(range(40)), engines[:1])
    assert choice.hit_tokens == 32


def test_what_is_being_computed_counts_where_it_is() -> None:
    """A second request with the same prefix comes before the first one's blocks are announced."""
    engines, index = fleet(2), KvIndex()
    for e in engines:
        index.follow(e, complete=True)
    strategy, ids = KvAware(KvPrefixes(index)), list(range(1000))
    first = strategy.choose(prompt(ids), engines)
    strategy.sent(prompt(ids), first.engine)
    first.engine.in_flight, first.engine.pending_tokens = 1, 1000
    second = strategy.choose(prompt(ids), engines)
    assert (second.engine, second.hit_tokens) == (first.engine, 0)
    first.engine.in_flight, first.engine.pending_tokens = 0, 1
    assert strategy.choose(prompt(ids), engines).engine is not first.engine


@pytest.mark.parametrize("reason", ["not_followed", "joined_late", "uncovered"])
def test_where_events_do_not_tell_prefixaware_fills_in(reason: str, caplog: pytest.LogCaptureFixture) -> None:
    engines, index = fleet(2), KvIndex()
    ids = list(range(1000))
    for e in engines:
        if reason != "not_followed":
            rank = index.follow(e, complete=reason == "uncovered")
            index.store(rank, [7], 99, [1] * 16, 16)
    strategy = KvAware(KvPrefixes(index))
    with caplog.at_level(logging.WARNING, logger="tandem.router"):
        strategy.sent(prompt(ids), engines[1])
        for _ in range(3):
            choice = strategy.choose(prompt(ids), engines)
            assert (choice.engine, choice.hit_tokens) == (engines[1], 960)
            assert choice.why.endswith(f"(fallback: {reason})")
            strategy.sent(prompt(ids), choice.engine)
    assert strategy.fallbacks == {reason: 4}
    assert len(caplog.records) == 1


def test_without_ids_it_goes_by_load() -> None:
    engines = fleet(2)
    engines[0].pending_tokens = 100
    strategies: list[Strategy] = [PrefixAware(), KvAware(KvPrefixes(KvIndex()))]
    for strategy in strategies:
        choice = strategy.choose(Prompt(500), engines)
        strategy.sent(Prompt(500), choice.engine)
        assert (choice.engine, choice.hit_tokens) == (engines[1], 0)
    assert "no_ids" in choice.why


def test_an_engine_that_left_is_forgotten() -> None:
    engines, index = fleet(2), KvIndex()
    ids = list(range(1000))
    stored(index, engines[1], ids)
    strategy = KvAware(KvPrefixes(index))
    assert strategy.choose(prompt(ids), engines).engine is engines[1]
    strategy.gone(engines[1])
    index.forget(engines[1])
    assert strategy.choose(prompt(ids), engines[:1]).engine is engines[0]
    assert strategy.choose(prompt(ids), list(engines)).hit_tokens == 0


def test_a_lora_and_a_salt_have_caches_of_their_own() -> None:
    engines = fleet(2)
    strategy = PrefixAware(SentIndex())
    strategy.sent(prompt(range(1000), salt="a"), engines[1])
    assert strategy.choose(prompt(range(1000), salt="a"), engines).hit_tokens == 960
    assert strategy.choose(prompt(range(1000), salt="b"), engines).hit_tokens == 0


def test_with_many_engines_those_that_hold_the_prefix_are_found() -> None:
    engines = fleet(100)
    strategy = PrefixAware(rng=random.Random(3))
    strategy.sent(prompt(range(5000)), engines[77])
    for _ in range(20):
        choice = strategy.choose(prompt(range(5000)), engines)
        assert choice.engine is engines[77]
        assert len(choice.scores) <= 5


def test_a_new_engine_is_not_flooded() -> None:
    """It has had nothing of the recent work; it is still one among equals."""
    engines = fleet(4)
    strategy = PrefixAware(rng=random.Random(4))
    for i in range(100):
        p = prompt(range(i * 1000, i * 1000 + 500))
        strategy.sent(p, strategy.choose(p, engines[:3]).engine)
    given = dict.fromkeys(engines, 0)
    for i in range(100, 200):
        p = prompt(range(i * 1000, i * 1000 + 500))
        chosen = strategy.choose(p, engines).engine
        strategy.sent(p, chosen)
        given[chosen] += 1
    assert max(given.values()) <= 40


def after(requests: int, prompt_tokens: int, engines: list[Engine]) -> PrefixAware:
    """One that has sent so many prompts of that length, all different, in turn to each engine."""
    strategy, unique = PrefixAware(), count(10**6)
    for i in range(requests):
        ids = [next(unique) for _ in range(prompt_tokens)]
        strategy.sent(prompt(ids), engines[i % len(engines)])
    return strategy


def wait_for(engine: Engine, tokens: int, prompts: int = 1) -> None:
    """That many tokens are queued there, in so many prompts."""
    engine.pending_tokens = tokens
    engine.pending_squares = prompts * (tokens // prompts) ** 2


def choice_with_queue(
    strategy: Strategy, turn: Prompt, holder: Engine, engines: list[Engine], q: int
) -> bool:
    """Whether it goes where its cache is, when so much is queued there."""
    wait_for(holder, q, prompts=max(1, q // 1000))
    return strategy.choose(turn, engines).engine is holder


@pytest.mark.parametrize("scale", [1, 4])
def test_the_next_turn_waits_for_its_cache_but_not_without_end(scale: int) -> None:
    """How long depends on how long prompts are at present, not on a number of tokens."""
    engines = fleet(4)
    strategy, history = after(80, 500 * scale, engines), list(range(320 * scale))
    strategy.sent(prompt(history), engines[1])
    turn = prompt([*history, *range(10**7, 10**7 + 32 * scale)])
    assert choice_with_queue(strategy, turn, engines[1], engines, 3_000 * scale)
    assert choice_with_queue(strategy, turn, engines[1], engines, 6_000 * scale)
    assert not choice_with_queue(strategy, turn, engines[1], engines, 14_000 * scale)


def test_what_a_long_prompt_begins_with_is_not_worth_the_wait_that_a_whole_one_is() -> None:
    """A system prompt may have copies; the history of a conversation stays where it is."""
    engines = fleet(4)
    strategy, shared = after(80, 1000, engines), list(range(128))
    strategy.sent(prompt(shared), engines[1])
    follow_up = prompt([*shared, *range(10**7, 10**7 + 16)])
    another = prompt([*shared, *range(10**7, 10**7 + 8000)])
    assert choice_with_queue(strategy, follow_up, engines[1], engines, 4_000)
    assert not choice_with_queue(strategy, another, engines[1], engines, 4_000)


def test_one_long_prompt_is_a_longer_wait_than_many_short_ones_of_as_many_tokens() -> None:
    engines = fleet(2)
    wait_for(engines[0], 60_000)
    wait_for(engines[1], 60_000, prompts=60)
    assert PrefixAware().choose(prompt(range(100)), engines).engine is engines[1]


def test_who_was_given_much_more_than_others_is_left_alone_for_a_while() -> None:
    """Though its queue is the shorter one: requests that are answered at once fill a cache, too."""
    engines = fleet(2)
    strategy = after(20, 1000, engines)
    wait_for(engines[1], 1000)
    assert strategy.choose(prompt(range(10**7, 10**7 + 1000)), engines).engine is engines[0]
    for i in range(20):
        strategy.sent(prompt(range(10**8 + i * 1000, 10**8 + (i + 1) * 1000)), engines[0])
    assert strategy.choose(prompt(range(10**7, 10**7 + 1000)), engines).engine is engines[1]
    wait_for(engines[1], 8000, prompts=8)
    assert strategy.choose(prompt(range(10**7, 10**7 + 1000)), engines).engine is engines[0]


def test_who_was_given_much_more_than_others_loses_what_its_cache_is_worth() -> None:
    """A prefix that everybody begins with is then computed by another."""
    engines = fleet(2)
    strategy, ids = after(20, 100, engines), list(range(640))
    chosen = []
    for _ in range(120):
        choice = strategy.choose(prompt(ids), engines)
        strategy.sent(prompt(ids), choice.engine)
        chosen.append(choice.engine)
    assert chosen[:5] == [chosen[0]] * 5
    assert 20 <= chosen[60:].count(chosen[0]) <= 40
    assert strategy.choose(prompt(ids), engines).hit_tokens > 600


ENGINES = fleet(4)


def all_known(engines: list[Engine]) -> RecentWork:
    recent = RecentWork(32.0)
    for engine in engines:
        recent.excess(engine)
    return recent


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1e15)), min_size=1, max_size=60))
@example([(0, 1e12)])
@example([(0, 1e15)] * 60)
@example([(0, 0.0)])
@example([(0, 5e-324)])
def test_recent_work_is_finite_whatever_was_given(given_to: list[tuple[int, float]]) -> None:
    recent = all_known(ENGINES)
    for which, work in given_to:
        recent.add(ENGINES[which], work)
        excess = [recent.excess(engine) for engine in ENGINES]
        assert all(map(math.isfinite, [*excess, recent.mean]))
        assert sum(excess) >= -1e-9, "none is more below the mean than others are above it"


def test_after_the_longest_of_prompts_there_are_still_scores() -> None:
    engines = fleet(3)
    strategy = PrefixAware()
    for tokens in (10**12, 100, 10**12, 10**12):
        choice = strategy.choose(Prompt(tokens), engines)
        assert all(map(math.isfinite, choice.scores.values()))
        strategy.sent(Prompt(tokens), choice.engine)


def given(recent: RecentWork, works: list[tuple[Engine, float]]) -> RecentWork:
    for engine, work in works:
        recent.add(engine, work)
    return recent


def test_how_long_prompts_are_does_not_matter_to_recent_work() -> None:
    engines, rng = fleet(3), random.Random(5)
    works = [(rng.choice(engines), rng.uniform(1, 9)) for _ in range(200)]
    short, long = given(RecentWork(32.0), works), given(RecentWork(32.0), [(e, 1000 * w) for e, w in works])
    assert [short.excess(e) for e in engines] == pytest.approx([long.excess(e) for e in engines])
    assert long.mean == pytest.approx(1000 * short.mean)
    assert 1 < short.mean < 9


def test_either_much_work_or_many_requests_are_an_excess() -> None:
    engines = one, many, other = fleet(3)
    recent = given(all_known(engines), [(one, 1000.0), *[(many, 1.0)] * 20, (other, 1.0)])
    assert recent.excess(one) > 0.1
    assert recent.excess(many) > 0.1
    assert recent.excess(other) < 0


@pytest.mark.parametrize("much", [1000.0, 1e9, 1e15])
def test_half_of_what_was_given_is_forgotten_with_each_half_life(much: float) -> None:
    """Even one enormous prompt does not count for ever."""
    engines = fleet(4)
    in_turn = [(engine, 1.0) for engine in engines] * 32
    recent = given(all_known(engines), in_turn * 12)
    recent.add(engines[0], much)
    excess, above = recent.excess(engines[0]), []
    assert excess > 0.05
    for _ in range(60):
        given(recent, in_turn)
        above.append(recent.mean - 1.0)
    for before, after_one in pairwise(above[:8]):
        assert after_one == pytest.approx(before / 2, rel=0.01)
    assert recent.excess(engines[0]) < excess / 1000


def test_who_leaves_takes_its_work_along() -> None:
    engines = fleet(3)
    recent = given(all_known(engines), [(engines[0], 1e15), *[(e, 10.0) for e in engines[1:]] * 10])
    recent.remove(engines[0])
    assert recent.mean == pytest.approx(10.0)
    assert [recent.excess(e) for e in engines[1:]] == pytest.approx([0, 0], abs=0.02)
