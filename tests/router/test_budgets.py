"""What is reserved: all of it or nothing, never more than there is, and given back once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.http import Origin
from tandem.router.budgets import Budgets, Reservation, possible
from tandem.router.connectors import Claim
from tandem.router.engines import Engine, EngineRole

# Of each resource an engine has so much.
CAPACITY = {"chunks": 5, "blocks": 3}
ENGINES = [Engine(f"http://d{i}:1", EngineRole.DECODE, Origin("d", 1)) for i in range(2)]


def claim(engine: int, resource: str, amount: int) -> Claim:
    return Claim(ENGINES[engine], resource, amount, CAPACITY[resource])


CLAIMS = st.lists(
    st.builds(claim, st.integers(0, 1), st.sampled_from(sorted(CAPACITY)), st.integers(0, 6)), max_size=4
)
STEPS = st.lists(st.tuples(st.just("take"), CLAIMS) | st.tuples(st.just("release"), st.integers(0, 99)))


@given(STEPS)
def test_never_more_is_held_than_there_is_and_all_comes_back_once(
    steps: list[tuple[str, list[Claim] | int]],
) -> None:
    freed = 0

    def on_free() -> None:
        nonlocal freed
        freed += 1

    budgets = Budgets(on_free)
    made: list[tuple[Reservation, list[Claim]]] = []
    released: set[int] = set()

    def held(extra: list[Claim]) -> dict[tuple[Engine, str], int]:
        """Worked out from the facts."""
        total: dict[tuple[Engine, str], int] = {}
        for claims in [c for i, (_, c) in enumerate(made) if i not in released] + [extra]:
            for c in claims:
                total[c.engine, c.resource] = total.get((c.engine, c.resource), 0) + c.amount
        return {key: amount for key, amount in total.items() if amount}

    for _, what in steps:
        if isinstance(what, list):
            fits = all(amount <= CAPACITY[resource] for (_, resource), amount in held(what).items())
            assert budgets.fit(what) is fits
            if fits:
                made.append((budgets.take(what), what))
            else:
                with pytest.raises(ValueError, match="do not fit"):
                    budgets.take(what)
        elif made:
            number = what % len(made)
            reservation, claims = made[number]
            before = freed
            reservation.release()
            assert freed - before == (number not in released and bool(claims)), "those who wait are told"
            released.add(number)
        assert budgets.used == held([])
        for engine in ENGINES:
            shares = [n / CAPACITY[resource] for (e, resource), n in held([]).items() if e is engine]
            assert budgets.share(engine) == max(shares, default=0.0)
            assert 0 <= budgets.share(engine) <= 1
    for reservation, _ in reversed(made):
        reservation.release()
    assert budgets.used == {}
    assert [budgets.share(engine) for engine in ENGINES] == [0.0, 0.0]
    assert budgets._shares == {}, "engines that left are not remembered"


@given(CLAIMS)
def test_what_is_possible_is_what_fits_when_nothing_else_is_held(claims: list[Claim]) -> None:
    assert possible(claims) is Budgets().fit(claims)


def test_one_thing_is_not_held_while_another_is_not_to_be_had() -> None:
    budgets = Budgets()
    first = budgets.take([claim(0, "chunks", 5)])
    both = [claim(1, "chunks", 1), claim(0, "chunks", 1)]
    assert not budgets.fit(both)
    with pytest.raises(ValueError, match="do not fit"):
        budgets.take(both)
    assert budgets.used == {(ENGINES[0], "chunks"): 5}
    first.release()
    assert budgets.fit(both)


def test_claims_on_the_same_thing_count_together() -> None:
    twice = [claim(0, "blocks", 2), claim(0, "blocks", 2)]
    assert not possible(twice)
    assert not Budgets().fit(twice)
    assert possible(twice[:1])


def test_an_engine_is_as_full_as_its_fullest_resource() -> None:
    budgets = Budgets()
    first = budgets.take([claim(0, "chunks", 1), claim(0, "blocks", 2)])
    assert budgets.share(ENGINES[0]) == 2 / 3
    assert budgets.share(ENGINES[1]) == 0.0
    second = budgets.take([claim(0, "chunks", 4), claim(1, "blocks", 3)])
    assert [budgets.share(e) for e in ENGINES] == [1.0, 1.0]
    second.release()
    assert [budgets.share(e) for e in ENGINES] == [2 / 3, 0.0]
    first.release()
    assert budgets.share(ENGINES[0]) == 0.0
