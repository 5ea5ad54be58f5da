"""The same session goes to the same engine; few move when engines come and go."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.router.engines import Engine
from tandem.router.strategies import Prompt, Session

from .helpers import engine, fleet

SESSIONS = [f"s{i}" for i in range(4000)]


def homes(strategy: Session, engines: list[Engine]) -> dict[str, str]:
    return {s: strategy.choose(Prompt(session=s), engines).engine.url for s in SESSIONS}


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 24), st.integers(0, 1000))
def test_one_that_joins_or_leaves_moves_hardly_more_than_its_share(count: int, seed: int) -> None:
    """1.3 times 1/n, and what 4,000 sessions deviate from it by chance."""
    engines = [engine(f"http://10.{seed % 250}.{i}.7:{8000 + seed}") for i in range(count)]
    engines.sort(key=lambda e: e.url)
    strategy = Session()
    without = [e for i, e in enumerate(engines) if i != seed % count]
    newcomer = engines[seed % count].url
    before, after = homes(strategy, without), homes(strategy, engines)
    moved = [s for s in SESSIONS if before[s] != after[s]]
    assert all(after[s] == newcomer for s in moved)
    share = 1 / count
    chance = 3 * math.sqrt(share * (1 - share) / len(SESSIONS))
    assert len(moved) / len(SESSIONS) <= 1.3 * share + chance
    # It leaves again: everybody is where they were. Engines that are gone for good leave nothing behind.
    assert homes(strategy, without) == before
    strategy.gone(engines[seed % count])
    assert homes(strategy, list(without)) == before
    assert homes(Session(), engines) == after


def test_routers_agree_without_talking() -> None:
    assert homes(Session(), fleet(5)) == homes(Session(), fleet(5))


def test_no_engine_gets_more_than_its_bounded_share() -> None:
    """One session alone, sent again and again while nothing ends: it spreads."""
    engines, strategy = fleet(4), Session()
    for _ in range(400):
        strategy.choose(Prompt(session="hot"), engines).engine.in_flight += 1
    assert max(e.in_flight for e in engines) <= math.ceil(1.25 * 400 / 4)


def test_a_session_goes_past_an_engine_without_room_and_returns() -> None:
    engines, strategy = fleet(4), Session()
    prompt = Prompt(session="s")
    home = strategy.choose(prompt, engines).engine
    home.in_flight = 10
    second = strategy.choose(prompt, engines)
    assert second.engine is not home
    assert second.why == "session: 1 before it had no room"
    assert strategy.choose(prompt, engines).engine is second.engine
    home.in_flight = 0
    assert strategy.choose(prompt, engines).engine is home


def test_without_a_session_id_the_least_loaded_is_taken() -> None:
    engines = fleet(3)
    engines[0].in_flight = engines[2].in_flight = 1
    choice = Session().choose(Prompt(), engines)
    assert choice.engine is engines[1]
    assert choice.why.startswith("no session id")


def test_only_candidates_are_chosen() -> None:
    engines, strategy = fleet(30), Session()
    homes(strategy, engines)
    some = engines[3:6]
    assert set(homes(strategy, some).values()) == {e.url for e in some}


def test_with_many_engines_the_bound_holds_about_as_well() -> None:
    engines, strategy = fleet(64), Session()
    for i in range(6400):
        strategy.choose(Prompt(session=f"{i % 3}"), engines).engine.in_flight += 1
    loads = Counter({e.url: e.in_flight for e in engines})
    assert max(loads.values()) <= 1.35 * 100
