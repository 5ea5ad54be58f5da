"""Prompts as chains of block hashes."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tandem.router.strategies.chain import Space, extend, root, usable


def chain(ids: list[int], block_size: int, space: Space) -> list[int]:
    """The hashes of all full blocks of a prompt."""
    return extend(root(space, block_size), ids, block_size)


IDS = st.lists(st.integers(0, 3), max_size=40)


@given(IDS, IDS, st.integers(1, 5))
def test_hashes_are_equal_as_far_as_prefixes_are(one: list[int], other: list[int], size: int) -> None:
    common = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))
    a, b = chain(one, size, Space()), chain(other, size, Space())
    assert len(a) == len(one) // size
    assert a[: common // size] == b[: common // size]
    assert not set(a[common // size :]) & set(b[common // size :])


@given(IDS, st.integers(1, 5), st.integers(0, 8))
def test_a_chain_can_be_carried_on_from_any_block(ids: list[int], size: int, cut: int) -> None:
    whole = chain(ids, size, Space("a", "b"))
    cut = min(cut, len(whole))
    parent = whole[cut - 1] if cut else root(Space("a", "b"), size)
    assert extend(parent, ids[cut * size :], size) == whole[cut:]


def test_spaces_and_block_sizes_share_nothing() -> None:
    ids = list(range(64))
    spaces = [Space(), Space("x"), Space(None, "x"), Space("x", "x"), Space("xx")]
    chains = [chain(ids, size, space) for space in spaces for size in (16, 32)]
    hashes = [h for each in chains for h in each]
    assert len(set(hashes)) == len(hashes)


def test_hashes_of_structured_ids_do_not_collide() -> None:
    """Counting ids, repeated ids, ids that differ by one bit: what weak hashes fall for."""
    blocks = [tuple(range(i, i + 4)) for i in range(50_000)]
    blocks += [(i,) * 4 for i in range(50_000, 100_000)]
    blocks += [(1 << a, 1 << b, 1 << c, 7) for a in range(17) for b in range(17) for c in range(17)]
    hashes = {h for block in blocks for h in chain(block, 4, Space())}
    assert len(hashes) == len(set(blocks))
    assert max(hashes) < 2**60


def test_a_hit_leaves_at_least_one_token() -> None:
    assert [usable(n, 16) for n in (0, 1, 16, 17, 32, 33)] == [0, 0, 0, 1, 1, 2]
