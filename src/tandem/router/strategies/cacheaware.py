"""The score by which prefixaware and kvaware weigh cached prefixes against load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

from tandem.router.engines import Engine
from tandem.router.strategies.base import LEADERS, MANY, Choice, Prompt, draw
from tandem.router.strategies.load import REQUEST_TOKENS, RecentWork, computing, queued
from tandem.router.strategies.prefixes import MISS, Hit, Prefixes

HIT_WORTH = 100.0
"""What a token found in the cache is worth beside a queued one, where it holds all of the prompt. Much more
than 1, because it saves more than its own computing: the next turns of a conversation find it there too, and
no other cache has to make room for a copy. Where it holds a part, this is less by the square root of that
part: what many prompts begin with and then differ, as with a system prompt, may have copies."""
PATIENCE, PATIENCE_TOKENS = 10.0, 12.0
"""For what its cache holds a request waits no longer than so many mean prompts take, and so many tokens for
each that it holds. To compute it again elsewhere takes less, and short requests would wait for long ones."""
HOST_COST = 0.1
"""The part of a token's worth that is lost where it has to be loaded from the host's memory."""
SLACK, STRAINED = 0.05, 0.35
"""How far above the mean an engine's recent work may be without any strain, and where the strain is full."""
STRAIN = 5.0
"""Mean prompts that an engine under full strain counts as having queued."""
HALF_LIFE = 32.0
"""Requests that an engine is given, on average, until half of what was given before is forgotten."""


class CacheAware:
    """Takes the engine with the lowest score, in prompt tokens to compute:

        what is queued there
        + 5 mean prompts × strain
        - the lesser of 100 × hit × √(hit ÷ prompt) × (1 - strain) and 12 × hit + 10 mean prompts

    The hit is what its cache holds of the prompt, less 0.1 of what lies in the host's memory. Strain goes
    from 0 to 1 while its recent work (the larger of two: tokens to compute, and requests) goes from 1.05 to
    1.35 of the mean. Mean prompts are the recent ones', as far as they were not cached; so nothing depends on
    how long prompts are.

    A conversation stays with its cache though others are less busy, but does not queue there without end. A
    hot prefix stays where it is until that engine was given more than the others; then another computes it
    once, and both have it. The figures come from replays of the Mooncake conversation trace and of hot
    prefixes over 8 engines, and are not sharp: with 90 to 120 for a hit, 8 to 12 mean prompts of patience and
    3 to 8 of strain it is much the same.

    With many engines, those few that hold most of the prompt and a few drawn at random are compared.
    """

    reads_prompts = True

    def __init__(self, prefixes: Prefixes, *, rng: Random | None = None) -> None:
        self._prefixes = prefixes
        self._recent = RecentWork(HALF_LIFE)
        self._rng = rng or Random()
        self._chosen: tuple[Prompt, Engine, Hit] | None = None

    def choose(self, prompt: Prompt, candidates: Sequence[Engine]) -> Choice:
        match = self._prefixes.match(prompt, candidates, int(self._rng.random() * len(candidates)))
        if len(candidates) <= MANY:
            compared: Sequence[Engine] = candidates
        else:
            compared = list(dict.fromkeys((*match.leaders(LEADERS), *draw(candidates, self._rng))))
        mean, tokens = self._recent.mean, prompt.tokens or 0
        scores: dict[str, float] = {}
        best, best_hit, lowest = compared[0], MISS, (math.inf, math.inf)
        for engine in compared:
            hit = match.hit(engine)
            excess = self._recent.excess(engine)
            strain = min(1.0, max(0.0, (excess - SLACK) / (STRAINED - SLACK)))
            score = queued(engine) + STRAIN * mean * strain
            if hit.tokens or hit.coming:
                found = max(hit.tokens, hit.coming) - HOST_COST * hit.host
                worth = HIT_WORTH * found * math.sqrt(found / max(found, tokens)) * (1.0 - strain)
                score -= min(worth, PATIENCE_TOKENS * found + PATIENCE * mean)
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
        self._recent.add(engine, work + REQUEST_TOKENS)
        self._prefixes.sent(prompt, engine)

    def gone(self, engine: Engine) -> None:
        self._recent.remove(engine)
        self._prefixes.gone(engine)
        self._chosen = None
