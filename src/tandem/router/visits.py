"""When engines that do not answer are visited again, and how many at once: they must cost little, and keep
nobody from those that do answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from weakref import WeakKeyDictionary

from tandem.router.engines import Engine, State

LONGEST_PAUSE = 20.0
"""Seconds between two visits to an engine that does not answer."""

# It is found at most so much later, in parts of the time that it was silent.
_LATENESS = 0.1

# Engines that are not in use visited at once: those that were silent, and the others.
_SILENT_AT_ONCE, _AT_ONCE = 128, 256


class Visits:
    """Whom it is worth to visit. An engine in use is visited whatever the others do."""

    def __init__(self, shortest: float, clock: Callable[[], float]) -> None:
        """`shortest`: seconds between two visits to an engine that is not in use."""
        self._shortest = shortest
        self._clock = clock
        self._silent: WeakKeyDictionary[Engine, float] = WeakKeyDictionary()
        """Engines that gave no answer at their last visit, and since when."""
        self._stirred = float("-inf")
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._silent_places = asyncio.Semaphore(_SILENT_AT_ONCE)

    def place(self, engine: Engine) -> AbstractAsyncContextManager[None]:
        """To be held during a visit."""
        if engine.state is not State.WAITING:
            return nullcontext()
        return self._silent_places if engine in self._silent else self._places

    def silent(self, engine: Engine) -> None:
        """It gave no answer when it was asked how it is."""
        self._silent.setdefault(engine, self._clock())

    def answered(self, engine: Engine) -> None:
        """It did, be it that it is not well; or it has left."""
        self._silent.pop(engine, None)

    def is_silent(self, engine: Engine) -> bool:
        """Whether it is out of use and gave no answer: one in use may be deep in work."""
        return engine.state is State.WAITING and engine in self._silent

    def pause(self, engine: Engine) -> float:
        """Seconds until a silent engine is visited again."""
        silence = self._clock() - self._silent[engine]
        return max(self._shortest, min(_LATENESS * silence, LONGEST_PAUSE))

    def stir(self) -> None:
        """Engines come and go: something may be under way with the silent ones, too. They are visited at
        once, where that has not been done lately."""
        now = self._clock()
        if now - self._stirred >= LONGEST_PAUSE:
            self._stirred = now
            for engine in filter(self.is_silent, list(self._silent)):
                engine.alarm.set()
