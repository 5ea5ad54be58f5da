"""Lists in messages: the first few are named, the others counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def few(things: Sequence[T], most: int, say: Callable[[T], str] = str) -> list[str]:
    """What is to be said of at most so many, and where there are others how many those are."""
    left = len(things) - most
    return [*map(say, things[:most]), *([f"and {left:,} more"] if left > 0 else [])]
