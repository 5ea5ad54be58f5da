"""Which engine is chosen among candidates."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.config import STRATEGIES as CONFIGURABLE
from tandem.config import RouterConfig
from tandem.http import Origin
from tandem.router.engines import Engine, EngineRole
from tandem.router.strategies import LeastLoaded, Prompt, RoundRobin, Strategy, make


def engines(*names: str) -> list[Engine]:
    urls = [f"http://{name}:1" for name in names]
    return [Engine(url, EngineRole.PREFILL, Origin.parse(url)) for url in urls]


def turns(strategy: Strategy, candidates: list[Engine], count: int) -> str:
    taken = ""
    for _ in range(count):
        engine = strategy.choose(Prompt(), candidates).engine
        strategy.sent(Prompt(), engine)
        taken += engine.origin.authority[0]
    return taken


@pytest.mark.parametrize("name", CONFIGURABLE)
def test_every_strategy_that_can_be_configured_is_there(name: str) -> None:
    made = make(RouterConfig(decode=("http://d:1",), routing_strategy=name))
    assert type(made.strategy).__name__.lower() == name
    assert made.strategy.reads_prompts == (made.prefixes is not None)
    assert (made.index is not None) == (name == "kvaware")


@pytest.mark.parametrize("name", CONFIGURABLE)
def test_what_would_be_chosen_can_be_asked_without_taking_a_turn(name: str) -> None:
    strategy = make(RouterConfig(decode=("http://d:1",), routing_strategy=name)).strategy
    candidates = engines("a", "b", "c")
    asked = [strategy.choose(Prompt(session="s"), candidates).engine for _ in range(5)]
    assert strategy.choose(Prompt(session="s"), candidates).engine in asked
    if name in ("roundrobin", "session"):
        assert len(set(asked)) == 1


def test_round_robin_takes_engines_in_turn() -> None:
    strategy = RoundRobin()
    assert turns(strategy, engines("a", "b", "c"), 4) == "abca"


def test_one_that_joins_or_leaves_makes_none_be_skipped_or_taken_twice() -> None:
    strategy = RoundRobin()
    assert turns(strategy, engines("a", "b", "d"), 2) == "ab"
    assert turns(strategy, engines("a", "b", "c", "d"), 1) == "c"
    assert turns(strategy, engines("a", "d"), 2) == "da"
    assert turns(strategy, engines("b"), 2) == "bb"


@given(st.sets(st.sampled_from("abcdefgh"), min_size=1), st.integers(1, 5))
def test_round_robin_is_fair(names: set[str], rounds: int) -> None:
    taken = Counter(turns(RoundRobin(), engines(*sorted(names)), rounds * len(names)))
    assert set(taken.values()) == {rounds}
    assert taken.keys() == names


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(0, 5))
def test_least_loaded_never_takes_one_that_has_more_to_do(loads: list[int], before: int) -> None:
    candidates = engines(*"abcdef"[: len(loads)])
    strategy = LeastLoaded()
    turns(strategy, candidates, before)
    for engine, load in zip(candidates, loads, strict=True):
        engine.in_flight = load
    assert strategy.choose(Prompt(), candidates).engine.in_flight == min(loads)


def test_least_loaded_takes_equals_in_turn() -> None:
    a, b, c = candidates = engines("a", "b", "c")
    strategy = LeastLoaded()
    assert turns(strategy, candidates, 4) == "abca"
    b.in_flight = 1
    assert turns(strategy, candidates, 3) == "cac"
    a.in_flight = c.in_flight = 2
    assert turns(strategy, candidates, 2) == "bb"


@pytest.mark.parametrize("strategy", [RoundRobin(), LeastLoaded()])
def test_an_only_engine_is_always_taken(strategy: Strategy) -> None:
    assert turns(strategy, engines("a"), 3) == "aaa"
