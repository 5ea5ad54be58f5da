"""Keys that wait to be worked on."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 60.0
"""Seconds before a key that failed is tried again; doubled each time, with jitter."""
CHANGED_PAUSE = 1.0
"""The longest pause of one that was added while it was worked on."""


class WorkQueue(Generic[K]):
    """Level-triggered: however often a key is added while it waits, it is taken once; added while it is
    worked on, it is taken once more afterwards. No key is worked on twice at the same time, so that one
    endpoint that fails or is slow holds up no other. Groups of keys, as those of a namespace, take turns, so
    that who has a thousand holds up nobody who has one."""

    def __init__(
        self,
        *,
        first_pause: float = FIRST_PAUSE,
        longest_pause: float = LONGEST_PAUSE,
        group: Callable[[K], Hashable] = lambda key: None,
    ) -> None:
        self._first, self._longest = first_pause, longest_pause
        self._group = group
        self._waiting: dict[Hashable, deque[K]] = {}
        """By group; the one whose turn it is first."""
        self._queued: set[K] = set()
        self._working: set[K] = set()
        self._again: set[K] = set()
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._failures: dict[K, int] = {}
        self._ready = asyncio.Event()

    def __len__(self) -> int:
        """Keys that could be taken now."""
        return len(self._queued)

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing is worked on; timers may still run."""
        return not self._waiting and not self._working

    def failures(self, key: K) -> int:
        """How often the key failed in a row."""
        return self._failures.get(key, 0)

    def add(self, key: K) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        if key in self._working:
            self._again.add(key)
        elif key not in self._queued:
            self._queued.add(key)
            self._waiting.setdefault(self._group(key), deque()).append(key)
            self._ready.set()

    def add_after(self, key: K, seconds: float) -> None:
        """At the latest then: of several times the earliest counts."""
        loop = asyncio.get_running_loop()
        before = self._timers.get(key)
        if before is not None:
            if before.when() <= loop.time() + seconds:
                return
            before.cancel()
        self._timers[key] = loop.call_later(seconds, self.add, key)

    async def get(self) -> K:
        while not self._waiting:
            self._ready.clear()
            await self._ready.wait()
        group = next(iter(self._waiting))
        keys = self._waiting.pop(group)
        key = keys.popleft()
        if keys:
            self._waiting[group] = keys
        self._queued.discard(key)
        self._working.add(key)
        return key

    def done(self, key: K) -> None:
        """It went well: earlier failures are forgotten."""
        self._failures.pop(key, None)
        self._release(key)

    def failed(self, key: K) -> float:
        """It is tried again after a pause, or earlier if it is added; returns the pause in seconds."""
        count = self._failures[key] = self._failures.get(key, 0) + 1
        pause: float = min(self._longest, self._first * 2.0 ** min(count - 1, 20)) * random.uniform(0.5, 1.0)
        if key in self._again:  # it has changed meanwhile, which may have mended it
            self._again.discard(key)
            pause = min(pause, CHANGED_PAUSE)
        self._release(key)
        self.add_after(key, pause)
        return pause

    def _release(self, key: K) -> None:
        self._working.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)
