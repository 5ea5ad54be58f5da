"""The engine with the fewest requests."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from tandem.router.engines import Engine
from tandem.router.strategies.base import MANY, Choice, Prompt, draw
from tandem.router.strategies.roundrobin import RoundRobin


class LeastLoaded:
    """Takes the engine with the fewest requests in flight; among equals, in turn. Of many engines it looks
    at a few drawn at random, which keeps the fullest within a request or two of the rest."""

    reads_prompts = False

    def __init__(self, rng: Random | None = None) -> None:
        self._turn = RoundRobin()
        self._rng = rng or Random()

    def choose(self, prompt: Prompt, candidates: Sequence[Engine]) -> Choice:
        drawn = draw(candidates, self._rng)
        least = min(e.in_flight for e in drawn)
        equals = [e for e in drawn if e.in_flight == least]
        # Those drawn are in no order, and one of them at random is a turn as fair.
        engine = self._turn.next(equals) if len(candidates) <= MANY else equals[0]
        return Choice(engine, scores={e.url: e.in_flight for e in drawn}, why="fewest requests in flight")

    def sent(self, prompt: Prompt, engine: Engine) -> None:
        self._turn.sent(prompt, engine)

    def gone(self, engine: Engine) -> None:
        pass
