"""Numbers that engines report of themselves and of requests: believed only where they can be true."""

from __future__ import annotations

from typing import NamedTuple

MOST_TOKENS = 100_000_000
"""Of one prompt, answer or context: ten times the longest context known."""

MOST_CACHED = 1 << 40
"""Tokens of a KV cache."""

MOST_REQUESTS = 1_000_000_000
"""Of an engine at a time."""


def count(told: object, most: int = MOST_TOKENS, *, least: int = 0) -> int | None:
    """A whole number between two bounds; None for everything else: text, a part, NaN, less, more."""
    if isinstance(told, bool) or not isinstance(told, int | float):
        return None
    # A NaN is in no range, and an infinity in no such one.
    return int(told) if least <= told <= most and told == int(told) else None


class Usage(NamedTuple):
    """Tokens of one request. None: not told, or not in earnest."""

    prompt: int | None = None
    generated: int | None = None

    @classmethod
    def of(cls, told: object) -> Usage:
        """An answer's `usage`."""
        if not isinstance(told, dict):
            return cls()
        return cls(count(told.get("prompt_tokens")), count(told.get("completion_tokens")))


NO_USAGE = Usage()


def measure(told: float | None, most: float) -> float | None:
    """A number from 0 to a bound; None for everything else."""
    return told if told is not None and 0 <= told <= most else None
