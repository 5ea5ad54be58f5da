"""How much an engine has to do, in prompt tokens to compute: the unit in which a cache hit is worth its
length."""

from __future__ import annotations

import math

from tandem.router.engines import Engine

REQUEST_TOKENS = 64
"""What a request in flight weighs beside its prompt: its part of each step while it decodes, and its
overhead."""

ATTENTION_TOKENS = 40_000
"""So many tokens before it make a token cost twice as much. A forward pass takes 2 x parameters operations
for a token, and 4 x layers x width for each token before it: 31,000 for Llama 3.1 8B, 54,000 for 70B."""


def queued(engine: Engine) -> int:
    """What a new request has to wait for."""
    return engine.pending_tokens + REQUEST_TOKENS * engine.in_flight


def computing(tokens: int, cached: int) -> float:
    """What a prompt costs, of whose tokens some are cached, in tokens with nothing before them."""
    computed = max(0, tokens - cached)
    return computed * (1.0 + (cached + computed / 2) / ATTENTION_TOKENS)


_MOST_HALVINGS = 64.0  # at once: after so many nothing is left of what was


class RecentWork:
    """How much of the recent work each engine was given, beside the mean of all.

    The queue alone does not balance engines that keep up: one that holds a hot prefix would have no queue and
    get nearly everything. Work is forgotten by work, not by time: half of it for each `half_life` given to an
    engine on average. So a lull changes nothing, and no clock is needed.
    """

    def __init__(self, half_life: float) -> None:
        self._half_life = half_life
        # Of what an engine was given and is not forgotten, in the long run.
        self._mean = half_life / math.log(2)
        self._given: dict[Engine, float] = {}  # in units that grow, so that nothing needs to be aged
        self._unit = 1.0
        self._total = 0.0

    def add(self, engine: Engine, work: float) -> None:
        given = self._given
        if engine not in given:
            self._join(engine)
        self._unit *= 2.0 ** min(_MOST_HALVINGS, work / (self._half_life * len(given)))
        given[engine] += work * self._unit
        self._total += work * self._unit
        if self._unit > 1e30:
            for each in given:
                given[each] /= self._unit
            self._total /= self._unit
            self._unit = 1.0

    def excess(self, engine: Engine) -> float:
        """How much more than the mean an engine was given (less: negative), as a part of what the mean is in
        the long run. A new engine begins with the mean."""
        given = self._given.get(engine)
        if given is None:
            given = self._join(engine)
        return (given - self._total / len(self._given)) / self._unit / self._mean

    def _join(self, engine: Engine) -> float:
        """With nothing to begin with it would be given everything at first."""
        mean = self._given[engine] = self._total / len(self._given) if self._given else 0.0
        self._total += mean
        return mean

    def remove(self, engine: Engine) -> None:
        self._total -= self._given.pop(engine, 0.0)
        if not self._given:
            self._total = 0.0
