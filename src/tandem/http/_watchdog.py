"""A deadline that is moved all the time and seldom met."""

import asyncio
from collections.abc import Callable


class Watchdog:
    """Calls `expired` once the deadline has passed.

    Moving the deadline costs one assignment, not a timer: an armed timer is left where it is and looks, when
    it goes off, whether it is still wanted. So a connection can move its deadline with every read.
    """

    __slots__ = ("_deadline", "_expired", "_loop", "_timer", "_timer_due")

    def __init__(self, loop: asyncio.AbstractEventLoop, expired: Callable[[], None]) -> None:
        self._loop = loop
        self._expired = expired
        self._deadline: float | None = None
        self._timer: asyncio.Handle | None = None
        self._timer_due = 0.0  # not the timer's own `when`, which uvloop's lack that are due at once

    def set(self, seconds: float) -> None:
        """Move the deadline to `seconds` from now."""
        deadline = self._deadline = self._loop.time() + seconds
        if self._timer is None:
            self._arm(deadline)
        elif deadline < self._timer_due:
            self._timer.cancel()
            self._arm(deadline)

    def clear(self) -> None:
        """No deadline for now."""
        self._deadline = None

    def close(self) -> None:
        """No deadline ever again; lets go of the owner."""
        self._deadline = None
        self._expired = _nothing
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, due: float) -> None:
        self._timer = self._loop.call_at(due, self._check)
        self._timer_due = due

    def _check(self) -> None:
        self._timer = None
        if self._deadline is None:
            return
        if self._loop.time() < self._deadline:
            self._arm(self._deadline)
            return
        self._deadline = None
        self._expired()


def _nothing() -> None:
    pass
