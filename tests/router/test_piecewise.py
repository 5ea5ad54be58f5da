"""Work in pieces leaves the event loop to others between them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from tandem.router.piecewise import piecewise


async def test_the_first_piece_is_done_at_once_and_others_have_their_turn_between_the_rest() -> None:
    seen: list[str] = []

    def work(name: str) -> Iterator[None]:
        for number in range(3):
            seen.append(f"{name}{number}")
            yield

    piecewise(work("a"))
    assert seen == ["a0"]
    piecewise(work("b"))
    while len(seen) < 6 + 3:
        await asyncio.sleep(0)
        seen.append("-")
    assert [each for each in seen if each != "-"] == ["a0", "b0", "a1", "b1", "a2", "b2"], "none overtakes"
    assert "-" in seen[seen.index("b0") : seen.index("b2")]


async def test_what_has_no_pieces_is_done() -> None:
    piecewise(iter(()))
