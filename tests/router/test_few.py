"""A message names the first few of many things and counts the others."""

from __future__ import annotations

import pytest

from tandem.router.few import few


@pytest.mark.parametrize(
    ("most", "said"),
    [(5, ["a", "b", "c"]), (3, ["a", "b", "c"]), (2, ["a", "b", "and 1 more"]), (0, ["and 3 more"])],
)
def test_so_many_are_named_and_the_others_counted(most: int, said: list[str]) -> None:
    assert few(["a", "b", "c"], most) == said


def test_nothing_is_said_of_what_is_not_named() -> None:
    asked: list[int] = []

    def say(number: int) -> str:
        asked.append(number)
        return f"n{number}"

    assert few(range(20_000), 2, say) == ["n0", "n1", "and 19,998 more"]
    assert asked == [0, 1]
