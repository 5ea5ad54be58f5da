"""How much an engine has to do, in prompt tokens to compute: the unit in which a cache hit is worth its
length."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tandem.router.engines import Engine

REQUEST_TOKENS = 64
"""What a request in flight weighs beside its prompt: its part of each step while it decodes, and its
overhead."""

ATTENTION_TOKENS = 40_000
"""So many tokens before it make a token cost twice as much. A forward pass takes 2 x parameters operations
for a token, and 4 x layers x width for each token before it: 31,000 for Llama 3.1 8B, 54,000 for 70B."""


def queued(engine: Engine) -> float:
    """What a new request has to wait for, in tokens with nothing before them."""
    attention = engine.pending_squares / (2 * ATTENTION_TOKENS)
    return engine.pending_tokens + attention + REQUEST_TOKENS * engine.in_flight


def computing(tokens: int, cached: int) -> float:
    """What a prompt costs, of whose tokens some are cached, in tokens with nothing before them."""
    computed = max(0, tokens - cached)
    return computed * (1.0 + (cached + computed / 2) / ATTENTION_TOKENS)


@dataclass(slots=True)
class _Given:
    """What an engine was given and is not forgotten, in units that grow, so that nothing needs to be aged."""

    work: float
    requests: float


class RecentWork:
    """How much of the recent work each engine was given, beside the mean of all.

    The queue alone does not balance engines that keep up: one that holds a hot prefix would have no queue and
    get nearly everything. What was given is forgotten with what is given, not with time: half of it for each
    `half_life` requests to an engine on average. So a lull changes nothing, no clock is needed, and how long
    prompts are does not matter.
    """

    def __init__(self, half_life: float) -> None:
        self._half_life = half_life
        # What an engine was given and is not forgotten, in the long run.
        self._lasting = half_life / math.log(2)
        self._given: dict[Engine, _Given] = {}
        self._all = _Given(0.0, 0.0)
        self._unit = 1.0

    @property
    def mean(self) -> float:
        """What a request takes; 0 before the first."""
        return self._all.work / self._all.requests if self._all.requests else 0.0

    def add(self, engine: Engine, work: float) -> None:
        """A request that takes so much is given to an engine."""
        given = self._given.get(engine) or self._join(engine)
        self._unit *= 2.0 ** (1.0 / (self._half_life * len(self._given)))
        for each in (given, self._all):
            each.work += work * self._unit
            each.requests += self._unit
        if self._unit > 1e30:
            for each in (*self._given.values(), self._all):
                each.work /= self._unit
                each.requests /= self._unit
            self._unit = 1.0

    def excess(self, engine: Engine) -> float:
        """How much more than the mean an engine was given (less: negative), as a part of what the mean is in
        the long run: the larger of two, of work and of requests. A new engine begins with the mean."""
        given, count, mean = self._given.get(engine) or self._join(engine), len(self._given), self.mean
        if not mean:
            return 0.0
        requests = given.requests - self._all.requests / count
        work = (given.work - self._all.work / count) / mean
        return max(requests, work) / self._unit / self._lasting

    def _join(self, engine: Engine) -> _Given:
        """With nothing to begin with it would be given everything at first."""
        count = max(1, len(self._given))
        given = self._given[engine] = _Given(self._all.work / count, self._all.requests / count)
        self._all.work += given.work
        self._all.requests += given.requests
        return given

    def remove(self, engine: Engine) -> None:
        if self._given.pop(engine, None) is not None:
            left = self._given.values()
            self._all = _Given(sum(g.work for g in left), sum(g.requests for g in left))
