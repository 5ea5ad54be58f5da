"""Time as an engine has it: the event loop's, perhaps faster or slower."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class Clock:
    """Engine seconds. With a scale of 10, ten of them pass in one second of the event loop.

    The loop's own clock counts, so that a loop with virtual time (`virtual`) makes everything virtual.
    """

    def __init__(self, scale: float = 1.0) -> None:
        if not scale > 0:
            raise ValueError(f"a time scale must be greater than 0; it is {scale}")
        self.scale = scale
        self._loop = asyncio.get_running_loop()
        # uvloop's own time is in whole milliseconds, and stands still while callbacks run.
        own = isinstance(self._loop, asyncio.BaseEventLoop)
        self._time: Callable[[], float] = self._loop.time if own else time.monotonic
        self._epoch = time.time() - self._time()

    def now(self) -> float:
        """Monotonic."""
        return self._time() * self.scale

    def wall(self) -> float:
        """Since 1970, as the loop's time goes (not scaled): for what clients read."""
        return self._epoch + self._time()

    def at(self, when: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        """Call back at an engine second."""
        if self._time == self._loop.time:
            return self._loop.call_at(when / self.scale, call)
        return self._loop.call_later(max(0.0, when / self.scale - self._time()), call)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self.scale)
