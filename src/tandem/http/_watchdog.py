"""A deadline that is moved all the time and seldom met."""

import asyncio
from collections.abc import Callable


class Watchdog:
    """Calls `expired` once the deadline has passed.

    Moving the deadline costs one assignment, not a timer: an armed timer is left where it is and looks, when
    it goes off, whether it is still wanted. So a connection can move its deadline with every read.
    """

    __slots__ = ("_deadline", "_expired", "_handle", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, expired: Callable[[], None]) -> None:
        self._loop = loop
        self._expired = expired
        self._deadline: float | None = None
        self._handle: asyncio.TimerHandle | None = None

    def set(self, seconds: float) -> None:
        """Move the deadline to `seconds` from now."""
        deadline = self._deadline = self._loop.time() + seconds
        if self._handle is None:
            self._handle = self._loop.call_at(deadline, self._check)
        elif deadline < self._handle.when():
            self._handle.cancel()
            self._handle = self._loop.call_at(deadline, self._check)

    def clear(self) -> None:
        """No deadline for now."""
        self._deadline = None

    def close(self) -> None:
        """No deadline ever again; lets go of the owner."""
        self._deadline = None
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _check(self) -> None:
        self._handle = None
        if self._deadline is None:
            return
        if self._loop.time() < self._deadline:
            self._handle = self._loop.call_at(self._deadline, self._check)
            return
        self._deadline = None
        self._expired()
