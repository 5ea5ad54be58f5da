"""Which decoder takes a request, short or disaggregated: one score of four things.

The score is in tokens of KV, the lowest wins:

    tokens in flight there (prompts and expected outputs)
    + 1.0 × the prompt's tokens that it lacks, where it computes them
      0.1 × those, where they come from a prefiller
    + 32,768 × how far its KV use is past 85 % (0 at 85 %, 1 at 100 %)
    + 32,768 × how far its receive buffer is past half full (0 at half, 1 when full)

- Tokens in flight: a decode step reads the KV of all of them, so they are what slows its streams down.
- Lacking tokens: computing one keeps the engine from decoding for about as long as reading thousands does,
  but once instead of at each step; 1.0 keeps a cached prefix worth its length. A transfer takes network,
  hardly time.
- KV use: past 100 % the engine preempts requests and computes them again; 32,768 outweighs any usual
  difference in the rest before that. It includes what other routers sent.
- Receive buffer: full, it makes prefillers wait (LMCache), and through them all other decoders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

from tandem.router.engines import Engine
from tandem.router.strategies.base import LEADERS, MANY, Choice, Prompt, draw
from tandem.router.strategies.prefixes import Prefixes
from tandem.router.strategies.roundrobin import RoundRobin

COMPUTED = 1.0
RECEIVED = 0.1
PRESSURE = 32_768
KV_KNEE = 0.85
BUFFER_KNEE = 0.5


class DecoderLoad(NamedTuple):
    """A decoder's state, as far as is known."""

    tokens: int = 0
    """Prompts and expected outputs of the requests that this router has there."""
    kv_use: float = 0.0
    """0 to 1, by its metrics (`vllm:kv_cache_usage_perc`)."""
    buffer_use: float = 0.0
    """0 to 1, the reserved part of its receive buffer; 0 where it has none."""


class OutputEstimate:
    """How many tokens a request will generate: the mean of those before, or its own limit where that is
    less."""

    def __init__(self, first: float = 256.0, weight: float = 0.02) -> None:
        """`first`: the mean to begin with; `weight`: of each new output in it."""
        self._mean = first
        self._weight = weight

    def expect(self, max_tokens: int | None) -> int:
        return int(self._mean) if max_tokens is None else min(int(self._mean), max_tokens)

    def seen(self, tokens: int) -> None:
        self._mean += self._weight * (tokens - self._mean)


class DecoderScore:
    """The strategy for decoders. Of many, the few that hold most of the prompt and a few drawn are
    compared."""

    def __init__(
        self,
        load: Callable[[Engine], DecoderLoad],
        prefixes: Prefixes | None = None,
        *,
        rng: Random | None = None,
    ) -> None:
        """`prefixes`: what decoders hold; None: not known."""
        self._load = load
        self._turn = RoundRobin()
        self._prefixes = prefixes
        self._rng = rng or Random()

    def choose(self, prompt: Prompt, candidates: Sequence[Engine], *, computes: bool = True) -> Choice:
        """`computes`: whether the decoder computes the prompt itself."""
        match = None
        if self._prefixes is not None:
            match = self._prefixes.match(prompt, candidates, int(self._rng.random() * len(candidates)))
        compared = candidates
        if len(candidates) > MANY:
            leaders = match.leaders(LEADERS) if match else ()
            compared = list(dict.fromkeys((*leaders, *draw(candidates, self._rng))))
        elif len(candidates) > 1:  # equals in turn
            first = candidates.index(self._turn.next(candidates))
            compared = [*candidates[first:], *candidates[:first]]
        weight = COMPUTED if computes else RECEIVED
        scores = {}
        best, best_hit, best_rank, lowest = compared[0], 0, None, float("inf")
        for engine in compared:
            hit, rank = 0, None
            if match is not None:
                found = match.hit(engine)
                hit, rank = found.tokens, found.rank
            load = self._load(engine)
            score = (
                load.tokens
                + weight * ((prompt.tokens or 0) - hit)
                + PRESSURE * (_past(load.kv_use, KV_KNEE) + _past(load.buffer_use, BUFFER_KNEE))
            )
            scores[engine.url] = score
            if score < lowest:
                best, best_hit, best_rank, lowest = engine, hit, rank, score
        return Choice(best, best_hit, scores, "lowest score", best_rank)

    def sent(self, prompt: Prompt, engine: Engine) -> None:
        self._turn.sent(prompt, engine)

    def computed(self, prompt: Prompt, engine: Engine) -> None:
        """An engine has answered a request, so it has the prompt's KV. Not to be said before: a prompt that a
        decoder is believed to have may be sent there, past its prefillers."""
        if self._prefixes is not None:
            self._prefixes.sent(prompt, engine)

    def gone(self, engine: Engine) -> None:
        if self._prefixes is not None:
            self._prefixes.gone(engine)


def _past(use: float, knee: float) -> float:
    return max(0.0, use - knee) / (1.0 - knee)
