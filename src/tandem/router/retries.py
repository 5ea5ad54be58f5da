"""The budget for retries: failures must not multiply the load that may have caused them."""

from __future__ import annotations

from collections.abc import Callable


class RetryBudget:
    """A bucket of retries. Every request puts a share of one in, every retry takes one out; it also fills
    slowly by itself, so that a quiet endpoint can retry.

    As Finagle's and linkerd's retry budgets, with a bucket in place of a window.
    """

    SIZE = 50.0
    PER_SECOND = 1.0

    def __init__(self, ratio: float, clock: Callable[[], float]) -> None:
        """`ratio`: retries for each request in the long run."""
        self._ratio = ratio
        self._clock = clock
        self._level = self.SIZE
        self._seen = clock()

    def request(self) -> None:
        """A request has come."""
        self._add(self._ratio)

    def retry(self) -> bool:
        """Take one retry. False: there is none left."""
        self._add(0.0)
        if self._level < 1.0:
            return False
        self._level -= 1.0
        return True

    def _add(self, amount: float) -> None:
        now = self._clock()
        self._level = min(self.SIZE, self._level + amount + self.PER_SECOND * (now - self._seen))
        self._seen = now
