"""How many requests are served at once, how many more may wait, and what the rest are told.

The resource's `spec.worker.requestLimits`, whose limits are for one model pod: with several engines that
answer in use there is room for as many times more.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tandem.config import RouterConfig
from tandem.router.errors import TooManyRequests
from tandem.router.fleet import Fleet
from tandem.router.waiting import Line, LineFull, WaitedTooLong


class Gate:
    def __init__(
        self, config: RouterConfig, fleet: Fleet, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._limit = config.max_concurrent_requests
        self._queue = config.max_queue_size
        self._timeout = config.queue_timeout
        self._status = config.overflow_status_code
        self._fleet = fleet
        self._clock = clock
        self._line = Line(longest=0)
        self._seconds = 1.0  # of a request, a moving average
        self.running = 0
        fleet.on_change(self._line.changed)

    @property
    def waiting(self) -> int:
        return len(self._line)

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """One request, inside the block. Raises TooManyRequests when there is no room for it."""
        if self._limit is not None:
            self._line.longest = self._queue * self._engines
            try:
                await self._line.turn(self._take, self._timeout)
            except (LineFull, WaitedTooLong):
                raise self._overflow() from None
        else:
            self.running += 1
        begun = self._clock()
        try:
            yield
        finally:
            self._seconds += (self._clock() - begun - self._seconds) / 8
            self.running -= 1
            self._line.changed()

    @property
    def _engines(self) -> int:
        return max(1, len(self._fleet.answering))

    def _take(self) -> bool | None:
        if self._limit is not None and self.running >= self._limit * self._engines:
            return None
        self.running += 1
        return True

    def _overflow(self) -> TooManyRequests:
        assert self._limit is not None
        limit = self._limit * self._engines
        wait = self._seconds * (self.waiting + 1) / limit
        return TooManyRequests(
            self._status,
            max_concurrent=limit,
            max_queue_size=self._queue * self._engines,
            current=self.running,
            retry_after_s=min(60, max(1, math.ceil(wait))),
        )
