"""The tie rule: when two greedy answers count as the same."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.bench.equality import TIE_GAP, Comparison, compare

SURE = {1: 0.0}
IDS = st.lists(st.integers(0, 3), max_size=6)


@given(IDS)
def test_equal_answers_are_equal_whatever_the_gaps(ids: list[int]) -> None:
    same = compare(ids, tuple(ids), [])
    assert same == Comparison(equal=True, first_difference=None, gap=None)
    assert same.acceptable
    assert str(same) == "equal, token for token"


@pytest.mark.parametrize(
    ("gap", "acceptable"), [(0.0, True), (TIE_GAP - 0.001, True), (TIE_GAP + 0.001, False)]
)
def test_a_difference_is_accepted_only_where_bfloat16_cannot_tell(gap: float, acceptable: bool) -> None:
    result = compare([1, 2, 3], [1, 9, 3], [SURE, {9: -1.0, 2: -1.0 - gap}, SURE])
    assert (result.equal, result.first_difference) == (False, 1)
    assert result.gap == pytest.approx(gap)
    assert result.acceptable is acceptable
    assert str(result).endswith("no tie") is not acceptable


@pytest.mark.parametrize("likeliest", [-0.0123, -0.5, -1.05, -3.3, -9.99])
def test_steps_of_bfloat16_are_a_tie_as_float32_tells_them(likeliest: float) -> None:
    def told(value: float) -> float:
        number: float = struct.unpack("f", struct.pack("f", value))[0]
        return number

    likely = [{9: told(likeliest), 2: told(likeliest - TIE_GAP)}]
    assert compare([2], [9], likely).acceptable


def test_another_token_than_the_tied_ones_is_no_tie() -> None:
    tied = [{9: -1.0, 2: -1.0}]
    assert compare([2], [9], tied).acceptable
    assert not compare([3], [9], tied).acceptable


def test_only_the_first_difference_is_judged() -> None:
    tie, sure = {3: -1.0, 2: -1.1}, {8: 0.0, 7: -9.0}
    assert compare([1, 2, 7, 7], [1, 3, 8, 8], [SURE, tie, sure, sure]).acceptable
    assert not compare([1, 2, 7], [1, 3, 8], [SURE, {3: 0.0, 2: -9.0}, sure]).acceptable


@pytest.mark.parametrize(("answer", "reference"), [([1], [1, 2]), ([1, 2], [1]), ([], [1])])
def test_an_answer_that_stops_early_is_another_one(answer: list[int], reference: list[int]) -> None:
    result = compare(answer, reference, [SURE, SURE])
    assert not result.acceptable
    assert "one answer is shorter" in str(result)


def test_without_the_probabilities_at_the_difference_there_is_no_tie() -> None:
    assert not compare([1, 2], [1, 3], [SURE]).acceptable


@given(IDS, IDS)
def test_the_first_difference_is_the_first(a: list[int], b: list[int]) -> None:
    at = compare(a, b, [SURE] * len(b)).first_difference
    if at is None:
        assert a == b
    else:
        assert a[:at] == b[:at]
        assert a[at : at + 1] != b[at : at + 1]
