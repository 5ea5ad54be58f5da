"""Which engine probably holds which prefix, learnt from what was sent to it. No word from engines is needed.

Prompts are cut into spans of a few KV blocks. For each engine the spans sent to it are kept in the order of
their last use, and the oldest are forgotten first: what the engine's own cache does. A prompt's spans are
used from its end to its beginning, as engines free blocks, so that a prefix is never forgotten before what
follows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from tandem.router.engines import Engine
from tandem.router.strategies.base import Kept, Prompt
from tandem.router.strategies.chain import usable
from tandem.router.strategies.holders import Holders, Run, Slots, depth
from tandem.router.strategies.prefixes import MISS, Hit

_AT_ONCE = 64  # forgotten together: finding the oldest of a dict costs a walk over what was deleted before
_PIECE = 256  # spans learnt together, a fraction of a millisecond


class _Sent:
    """What was sent to one engine: span hash → number of the request that used it last."""

    __slots__ = ("bit", "requests", "spans")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.spans: dict[int, int] = {}
        self.requests = 0


def all_at_once(pieces: Iterator[None]) -> None:
    deque(pieces, maxlen=0)


class SentIndex:
    def __init__(
        self,
        block_size: int = 16,
        *,
        stride: int = 4,
        most: int = 500_000,
        cache_tokens: Callable[[Engine], int | None] = lambda engine: None,
        later: Callable[[Iterator[None]], None] = all_at_once,
    ) -> None:
        """`block_size`: tokens of the engines' KV blocks; `stride`: blocks of a span. `most`: spans kept in
        all (about 200 bytes each). `cache_tokens`: what an engine's KV cache holds, where known: no more is
        kept for it. An engine gets at most its even share of `most` times two. `later` does the pieces of
        learning a prompt, in their order; until the last one nothing of a long prompt is known."""
        self._block_size = block_size
        self._stride = stride
        self._most = most
        self._cache_tokens = cache_tokens
        self._later = later
        self._holders = Holders()
        self._slots: Slots[Engine] = Slots()
        self._engines: dict[Engine, _Sent] = {}
        self._leaving: list[_Sent] = []
        self._count = 0
        self._masks: Kept[int] = Kept(self._mask)

    def __len__(self) -> int:
        """Spans kept, the same one for each engine that has it."""
        return self._count

    def match(self, prompt: Prompt, candidates: Sequence[Engine], start: int = 0) -> SentMatch:
        spans = self._spans(prompt)
        runs = self._holders.walk(spans, self._masks.of(candidates)) if spans else []
        return SentMatch(self, prompt, spans, runs, start)

    def sent(self, prompt: Prompt, engine: Engine) -> bool:
        """Returns whether any of it is new there."""
        self._tidy()
        if engine.left:  # its last requests end after it has left, and nothing would forget them
            return False
        spans = self._spans(prompt, whole=True)
        if not spans:
            return False
        known = self._of(engine)
        known.requests += 1
        new = spans[-1] not in known.spans
        self._later(self._learn(spans, engine, known, known.requests))
        return new

    def _learn(self, spans: Sequence[int], engine: Engine, known: _Sent, now: int) -> Iterator[None]:
        used = known.spans
        for end in range(len(spans), 0, -_PIECE):
            if self._engines.get(engine) is not known:  # it has gone meanwhile
                return
            new = []
            for span in reversed(spans[max(0, end - _PIECE) : end]):
                last = used.pop(span, 0)
                if not last:
                    new.append(span)
                used[span] = max(last, now)
            self._holders.hold(new, known.bit)
            self._count += len(new)
            limit = self._limit(engine)
            if len(used) > limit:  # much where the limit has just fallen: then it is reached little by little
                self._forget(known, _AT_ONCE + 2 * len(new), at_least=limit)
            while self._count > self._most:
                self._forget(self._leaving[-1] if self._leaving else self._fullest(), _AT_ONCE)
            yield

    def gone(self, engine: Engine) -> None:
        """Forget an engine; its spans go little by little, so that nothing has to wait for it. It may come
        back, unless it has left."""
        known = self._engines.pop(engine, None)
        self._masks.clear()
        if known is not None:
            self._leaving.append(known)

    def coming(self, spans: Sequence[int], held: int, engine: Engine) -> int:
        """How many of the first `held` spans, which an engine was sent, belong to requests that it may not
        have computed yet: of as many as are in flight there, the last ones sent."""
        known = self._engines.get(engine)
        if known is None or not engine.in_flight:
            return 0
        done = known.requests - engine.in_flight
        # The nearer to the beginning, the later a span was used last.
        low, high = 0, held
        while low < high:
            middle = (low + high + 1) // 2
            if known.spans.get(spans[middle - 1], 0) > done:
                low = middle
            else:
                high = middle - 1
        return low

    def tokens(self, prompt: Prompt, spans: int) -> int:
        """Tokens of so many spans, as much of them as a hit can have."""
        most = usable(len(prompt.ids or ()), self._block_size)
        return min(spans * self._stride, most) * self._block_size

    def bit(self, engine: Engine) -> int:
        known = self._engines.get(engine)
        return 0 if known is None else known.bit

    def some(self, bits: int, most: int, start: int) -> list[Engine]:
        return self._slots.some(bits, most, start % (len(self._engines) + 1))

    def _of(self, engine: Engine) -> _Sent:
        known = self._engines.get(engine)
        if known is None:
            known = self._engines[engine] = _Sent(self._slots.take(engine))
        return known

    def _spans(self, prompt: Prompt, *, whole: bool = False) -> list[int]:
        if prompt.ids is None:
            return []
        hashes = prompt.chain(self._block_size)[self._stride - 1 :: self._stride]
        if whole:
            return hashes
        # The last span counts where all of it but its last block can be hit.
        return hashes[: -(-usable(len(prompt.ids), self._block_size) // self._stride)]

    def _mask(self, candidates: Sequence[Engine]) -> int:
        mask = 0
        for engine in candidates:
            if not engine.left:
                mask |= self._of(engine).bit
        return mask

    def _limit(self, engine: Engine) -> int:
        share = max(1, 2 * self._most // (len(self._engines) + 1))
        tokens = self._cache_tokens(engine)
        return share if tokens is None else min(share, tokens // (self._block_size * self._stride))

    def _fullest(self) -> _Sent:
        return max(self._engines.values(), key=lambda each: len(each.spans))

    def _forget(self, known: _Sent, count: int, at_least: int = 0) -> None:
        oldest = list(islice(known.spans, min(count, len(known.spans) - at_least)))
        for span in oldest:
            del known.spans[span]
        self._holders.drop(oldest, known.bit)
        self._count -= len(oldest)
        if not known.spans and known in self._leaving:
            self._leaving.remove(known)
            self._slots.release(known.bit)

    def _tidy(self) -> None:
        if self._leaving:
            self._forget(self._leaving[-1], 4 * _AT_ONCE)


class SentMatch:
    __slots__ = ("_index", "_prompt", "_runs", "_spans", "_start")

    def __init__(
        self, index: SentIndex, prompt: Prompt, spans: Sequence[int], runs: Sequence[Run], start: int
    ) -> None:
        self._index = index
        self._prompt = prompt
        self._spans = spans
        self._runs = runs
        self._start = start

    def hit(self, engine: Engine) -> Hit:
        held = self._held(engine)
        return Hit(self._index.tokens(self._prompt, held)) if held else MISS

    def coming(self, engine: Engine) -> int:
        """Tokens that it may still be computing for others."""
        held = self._held(engine) if engine.in_flight else 0
        return self._index.tokens(self._prompt, self._index.coming(self._spans, held, engine)) if held else 0

    def leaders(self, most: int) -> Sequence[Engine]:
        found: list[Engine] = []
        for _, holders in self._runs:
            found += self._index.some(holders, most - len(found), self._start)
            if len(found) >= most:
                break
        return found

    def _held(self, engine: Engine) -> int:
        return depth(self._runs, self._index.bit(engine)) if self._runs else 0
