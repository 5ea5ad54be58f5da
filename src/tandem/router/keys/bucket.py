"""A token bucket: so much in the long run, and what was not used before at once."""

from __future__ import annotations

from collections.abc import Callable

# Of a float's rounding: who waits as long as told is let in.
_ROUNDING = 1e-6


class Bucket:
    """It is full at first, and may be overdrawn: then nothing can be had until it has filled up again."""

    __slots__ = ("_clock", "_level", "_per_second", "_seen", "_size")

    def __init__(self, per_second: float, size: float, clock: Callable[[], float]) -> None:
        self._per_second = per_second
        self._size = size
        self._clock = clock
        self._level = size
        self._seen = clock()

    def resize(self, per_second: float, size: float) -> None:
        """From now on. What is there stays there, as far as it holds that; what it holds more is full."""
        self._flow()
        self._level = min(size, self._level + max(0.0, size - self._size))
        self._per_second = per_second
        self._size = size

    def wait(self, amount: float) -> float:
        """Seconds until there is so much, or as much as it holds where that is less; 0: it is there."""
        self._flow()
        lacks = min(amount, self._size) - self._level
        return lacks / self._per_second if lacks > _ROUNDING else 0.0

    def take(self, amount: float) -> None:
        """Take out, also more than there is; a negative amount is put back."""
        self._flow()
        self._level = min(self._size, self._level - amount)

    def _flow(self) -> None:
        now = self._clock()
        self._level = min(self._size, self._level + self._per_second * (now - self._seen))
        self._seen = now
