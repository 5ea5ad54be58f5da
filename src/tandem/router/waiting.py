"""Waiting one's turn: a line in order of arrival, bounded in length and time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class LineFull(Exception):
    """As many wait as may."""


class WaitedTooLong(Exception):
    """The turn did not come in time."""


class Line:
    """Those who want something that is not free now, first come first served.

    Strictly in order: a large claim at the head is not overtaken for ever by small ones behind it.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self._waiting: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    async def turn(self, take: Callable[[], T | None], timeout: float) -> T:
        """The first result of `take` that is not None, tried at once and after every `changed`.

        `timeout` in seconds. Raises LineFull or WaitedTooLong, and whatever `take` raises.
        """
        if not self._waiting and (taken := take()) is not None:
            return taken
        if len(self._waiting) >= self.longest:
            raise LineFull
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        mine: asyncio.Future[None] = loop.create_future()
        self._waiting.append(mine)
        try:
            while True:
                try:
                    async with asyncio.timeout_at(deadline):
                        await mine
                except TimeoutError:
                    raise WaitedTooLong from None
                if (taken := take()) is not None:
                    return taken
                mine = self._waiting[0] = loop.create_future()
        finally:
            self._waiting.remove(mine)
            self.changed()

    def changed(self) -> None:
        """Something may be free now: whoever is first tries again."""
        if self._waiting and not self._waiting[0].done():
            self._waiting[0].set_result(None)
