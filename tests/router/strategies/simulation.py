"""Engines in plain Python, for how strategies balance: a queue each, and a KV cache of a bounded size."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from tandem.router.engines import Engine
from tandem.router.strategies import Prompt, Strategy

BLOCK = 16


@dataclass
class Served:
    """A request as it arrives, at a time in seconds."""

    at: float
    prompt: Prompt
    decode: float
    """Seconds that its decoding keeps the engine busy."""


@dataclass
class Result:
    busy: dict[Engine, float]
    hit_rate: float
    waits: list[float] = field(default_factory=list)

    @property
    def imbalance(self) -> float:
        """Busy time, the largest over the mean."""
        return max(self.busy.values()) * len(self.busy) / sum(self.busy.values())


def run(
    strategy: Strategy, engines: list[Engine], requests: Iterable[Served], *, cache_blocks: int
) -> Result:
    """Each engine computes 8,000 prompt tokens a second, one request after the other."""
    caches: dict[Engine, OrderedDict[int, None]] = {e: OrderedDict() for e in engines}
    result = Result(dict.fromkeys(engines, 0.0), 0.0)
    free = dict.fromkeys(engines, 0.0)
    later: list[tuple[float, int, Engine, int]] = []
    hits = total = 0
    for number, request in enumerate(requests):
        while later and later[0][0] <= request.at:
            _, _, engine, tokens = heapq.heappop(later)
            engine.pending_tokens -= tokens
            engine.pending_squares -= tokens * tokens
            engine.in_flight -= not tokens
        prompt = request.prompt
        choice = strategy.choose(prompt, engines)
        engine = choice.engine
        strategy.sent(prompt, engine)
        cache, blocks, tokens = caches[engine], prompt.chain(BLOCK), prompt.tokens or 0
        found = 0
        while found < min(len(blocks), (tokens - 1) // BLOCK) and blocks[found] in cache:
            found += 1
        for block in reversed(blocks):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > cache_blocks:
            cache.popitem(last=False)
        hits, total = hits + found * BLOCK, total + tokens
        begun = max(request.at, free[engine])
        first = begun + (tokens - found * BLOCK) / 8000
        free[engine] = first + request.decode
        result.busy[engine] += free[engine] - begun
        result.waits.append(first - request.at)
        expected = tokens - choice.hit_tokens
        engine.pending_tokens += expected
        engine.pending_squares += expected * expected
        engine.in_flight += 1
        heapq.heappush(later, (first, 2 * number, engine, expected))
        heapq.heappush(later, (free[engine], 2 * number + 1, engine, 0))
    result.hit_rate = hits / total
    return result
