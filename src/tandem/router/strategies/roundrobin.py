"""Engines in turn."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter

from tandem.router.engines import Engine
from tandem.router.strategies.base import Choice, Prompt

_URL = attrgetter("url")


class RoundRobin:
    """Takes engines in turn. The turn belongs to engines, not to positions, so that one which joins or
    leaves does not make another be skipped or taken twice."""

    reads_prompts = False

    def __init__(self) -> None:
        self._last = ""

    def choose(self, prompt: Prompt, candidates: Sequence[Engine]) -> Choice:
        return Choice(self.next(candidates), why="in turn")

    def next(self, candidates: Sequence[Engine]) -> Engine:
        after = bisect_right(candidates, self._last, key=_URL)
        return candidates[after] if after < len(candidates) else candidates[0]

    def sent(self, prompt: Prompt, engine: Engine) -> None:
        self._last = engine.url

    def gone(self, engine: Engine) -> None:
        pass
