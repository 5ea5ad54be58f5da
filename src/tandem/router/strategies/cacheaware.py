"""The score by which prefixaware and kvaware weigh cached prefixes against load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

from tandem.router.engines import Engine
from tandem.router.strategies.base import LEADERS, MANY, Choice, Prompt, draw
from tandem.router.strategies.load import REQUEST_TOKENS, RecentWork, computing, queued
from tandem.router.strategies.prefixes import MISS, Hit, Prefixes

HIT_WORTH = 12.0
"""What a token found in the cache is worth beside a queued one. More than 1, because it saves more than its
own computing: the next turns of a conversation find it there too, and no other cache has to make room for a
copy."""
HOST_COST = 0.1
"""The part of a token's worth that is lost where it has to be loaded from the host's memory."""
OVERLOAD = 500_000.0
"""Tokens that an engine counts as having queued when it was lately given twice the mean."""
SLACK = 0.05
"""How far above the mean it may be without that."""
HALF_LIFE_TOKENS = 200_000.0
HALF_LIFE_REQUESTS = 32.0
"""What an engine is given, on average, until half of what was given before is forgotten."""


class CacheAware:
    """Takes the engine with the lowest score, in prompt tokens:

        queued there
        + 500,000 × how far its recent work is above 1.05 of the mean
        - 12 × (tokens in its cache - 0.1 × those of them that lie in the host's memory)

    Recent work is the larger of two: tokens to compute, and requests. A hot prefix stays where it is until
    that engine was given more than the others; then another computes it once, and both have it. The figures
    come from replays of the Mooncake conversation trace and of hot prefixes over 8 engines: with less worth
    of a hit conversations wander, with a flatter overload a hot prefix overloads its engine.

    With many engines, those few that hold most of the prompt and a few drawn at random are compared.
    """

    reads_prompts = True

    def __init__(self, prefixes: Prefixes, *, rng: Random | None = None) -> None:
        self._prefixes = prefixes
        self._tokens = RecentWork(HALF_LIFE_TOKENS)
        self._requests = RecentWork(HALF_LIFE_REQUESTS)
        self._rng = rng or Random()
        self._chosen: tuple[Prompt, Engine, Hit] | None = None

    def choose(self, prompt: Prompt, candidates: Sequence[Engine]) -> Choice:
        match = self._prefixes.match(prompt, candidates, int(self._rng.random() * len(candidates)))
        if len(candidates) <= MANY:
            compared: Sequence[Engine] = candidates
        else:
            compared = list(dict.fromkeys((*match.leaders(LEADERS), *draw(candidates, self._rng))))
        scores: dict[str, float] = {}
        best, best_hit, lowest = compared[0], MISS, (math.inf, math.inf)
        for engine in compared:
            hit = match.hit(engine)
            excess = max(self._tokens.excess(engine), self._requests.excess(engine))
            worth = max(hit.tokens, hit.coming) - HOST_COST * hit.host
            score = queued(engine) + OVERLOAD * max(0.0, excess - SLACK) - HIT_WORTH * worth
            scores[engine.url] = score
            if (score, excess) < lowest:
                best, best_hit, lowest = engine, hit, (score, excess)
        self._chosen = prompt, best, best_hit
        why = "cached prefix and load" if best_hit.tokens or best_hit.coming else "load: no cached prefix"
        return Choice(best, best_hit.tokens, scores, why, best_hit.rank)

    def sent(self, prompt: Prompt, engine: Engine) -> None:
        chosen = self._chosen
        if chosen is not None and chosen[0] is prompt and chosen[1] is engine:
            hit = chosen[2]
        else:
            hit = self._prefixes.match(prompt, [engine], 0).hit(engine)
        work = computing(prompt.tokens or 0, max(hit.tokens, hit.coming))
        self._tokens.add(engine, work + REQUEST_TOKENS)
        self._requests.add(engine, 1)
        self._prefixes.sent(prompt, engine)

    def gone(self, engine: Engine) -> None:
        self._tokens.remove(engine)
        self._requests.remove(engine)
        self._prefixes.gone(engine)
        self._chosen = None
