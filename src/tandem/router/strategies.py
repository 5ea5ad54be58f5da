"""Strategies choose one engine among candidates. Small classes without I/O; their memory is bounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.router.engines import Engine


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a strategy may know of a request. None: not counted, or counted without ids."""

    tokens: int | None = None
    ids: Sequence[int] | None = None


class Strategy(Protocol):
    def choose(self, prompt: Prompt, candidates: Sequence[Engine]) -> Engine:
        """Pick one of at least one candidate; candidates come sorted by URL."""
        ...


class RoundRobin:
    """Takes engines in turn. The turn belongs to engines, not to positions, so that one which joins or
    leaves does not make another be skipped or taken twice."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, prompt: Prompt, candidates: Sequence[Engine]) -> Engine:
        chosen = next((e for e in candidates if e.url > self._last), candidates[0])
        self._last = chosen.url
        return chosen


class LeastLoaded:
    """Takes the engine with the fewest requests in flight; among equals, in turn."""

    def __init__(self) -> None:
        self._turn = RoundRobin()

    def choose(self, prompt: Prompt, candidates: Sequence[Engine]) -> Engine:
        least = min(e.in_flight for e in candidates)
        return self._turn.choose(prompt, [e for e in candidates if e.in_flight == least])


STRATEGIES: dict[str, type[Strategy]] = {"roundrobin": RoundRobin}
