"""The table from block hashes to sets of holders."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.router.strategies.holders import Holders, Slots, depth

HASHES = st.integers(0, 2**60 - 1) | st.integers(0, 5)


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 7), st.lists(st.integers(0, 9), max_size=5))),
    st.lists(st.integers(0, 9), unique=True, max_size=8),
    st.sets(st.integers(0, 3)),
)
def test_holders_are_as_in_a_table_of_sets(
    changes: list[tuple[bool, int, list[int]]], chain: list[int], among: set[int]
) -> None:
    """Bits 0 and 1 belong to the first holder's two tiers, 2 and 3 to the second's, and so on."""
    table: dict[int, set[int]] = {}
    holders = Holders()
    for hold, bit, hashes in changes:
        (holders.hold if hold else holders.drop)(hashes, 1 << bit)
        for at in hashes:
            (set.add if hold else set.discard)(table.setdefault(at, set()), bit)
    assert len(holders) == sum(map(bool, table.values()))
    mask = sum(1 << 2 * holder for holder in among)
    lower, both = holders.walk(chain, mask), holders.walk_tiers(chain, mask)
    for holder in range(4):
        for runs, bits in ((lower, {2 * holder}), (both, {2 * holder, 2 * holder + 1})):
            expected = 0
            while expected < len(chain) and table.get(chain[expected], set()) & bits:
                expected += 1
            assert depth(runs, 1 << 2 * holder) == (expected if holder in among else 0)
    assert [run[0] for run in lower] == sorted({run[0] for run in lower}, reverse=True)


@given(st.sets(st.integers(0, 20)), st.integers(0, 5), st.integers(0, 30))
def test_some_owners_are_taken_from_any_position_on(owners: set[int], most: int, start: int) -> None:
    slots: Slots[int] = Slots()
    bits = [slots.take(i) for i in range(21)]
    some = slots.some(sum(bits[i] for i in owners), most, start)
    assert some == sorted(owners, key=lambda i: (i < start, i))[:most]


def test_a_slot_that_was_given_back_is_taken_again() -> None:
    slots: Slots[str] = Slots(width=2)
    a, b, c = (slots.take(name) for name in "abc")
    assert (a, b, c) == (1, 4, 16)
    slots.release(a)
    slots.release(b)
    assert slots.some(a | b | c, 3, 0) == ["c"]
    assert [slots.take(name) for name in "def"] == [1, 4, 64]
