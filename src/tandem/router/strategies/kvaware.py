"""kvaware: engines by what they say they hold, and by load.

What an engine is believed to hold is, in this order:
1. What its KV events say, where they were seen from its start on and nearly all of them could be placed.
2. Else the more of that and of what was sent to it, as prefixaware has it. So it is for an engine
   - that is not followed (`not_followed`: no events are configured, or none has come yet),
   - whose events were not seen from its start on (`joined_late`: this router began later, or missed some),
   - of whose events many cannot be read (`unread`),
   - that has more KV cache groups, or block sizes, than are followed (`block_sizes`),
   - of whose blocks many could not be placed (`uncovered`),
   - that tells nothing, though it has computed prompts that it did not have (`silent`).
3. Without token ids (`no_ids`), nothing: it goes by load alone.
Each request that has to fall back is counted by reason, and the first of each reason is logged.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from random import Random

from tandem.router.engines import Engine
from tandem.router.strategies.base import Choice, Prompt
from tandem.router.strategies.cacheaware import CacheAware
from tandem.router.strategies.kv_index import KvIndex, KvMatch, Rank
from tandem.router.strategies.prefixes import Hit, Match
from tandem.router.strategies.sent_index import SentIndex, SentMatch

logger = logging.getLogger("tandem.router")

COVERED = 0.9
"""The part of an engine's blocks that must be placed, and of its events that must be read, for these to be
believed alone."""

SILENT = 8
"""Requests with something new that an engine may have answered since its last event. Events come with the
step that computes; answers may be seen before them, and requests that fail bring none."""


class KvPrefixes:
    """What is known from events, filled in from what was sent."""

    def __init__(self, index: KvIndex, sent: SentIndex | None = None) -> None:
        self._index = index
        self._sent = SentIndex() if sent is None else sent
        self._awaited: dict[Engine, tuple[int, int]] = {}
        """Events heard of an engine, and the requests with something new that it was sent since the last."""

    def match(self, prompt: Prompt, candidates: Sequence[Engine], start: int = 0) -> Match:
        kv = self._index.match(prompt, candidates, start)
        return _KvMatch(self, kv, self._sent.match(prompt, candidates, start))

    def sent(self, prompt: Prompt, engine: Engine) -> None:
        new = self._sent.sent(prompt, engine)
        if new and engine.cache_tokens != 0 and (ranks := self._index.ranks(engine)):
            heard, before = self._heard(ranks), self._awaited.get(engine, (0, 0))
            self._awaited[engine] = heard, 1 + (before[1] if before[0] == heard else 0)

    def gone(self, engine: Engine) -> None:
        """What its events told stays: they go on where they were, or tell that it begins anew."""
        self._sent.gone(engine)
        self._awaited.pop(engine, None)

    def doubt(self, engine: Engine) -> str | None:
        """Why an engine's events are not believed alone; None: they are."""
        ranks = self._index.ranks(engine)
        if not ranks:
            return "not_followed"
        for rank in ranks:
            if not rank.complete:
                return "joined_late"
            if rank.unread_share > 1 - COVERED:
                return "unread"
            if rank.partly:
                return "block_sizes"
            if rank.orphans and rank.coverage < COVERED:
                return "uncovered"
        heard, requests = self._awaited.get(engine, (0, 0))
        if requests - engine.in_flight >= SILENT and heard == self._heard(ranks):
            return "silent"
        return None

    @staticmethod
    def _heard(ranks: Sequence[Rank]) -> int:
        return sum(rank.heard for rank in ranks)


class _KvMatch:
    __slots__ = ("_kv", "_prefixes", "_sent")

    def __init__(self, prefixes: KvPrefixes, kv: KvMatch, sent: SentMatch) -> None:
        self._prefixes = prefixes
        self._kv = kv
        self._sent = sent

    def hit(self, engine: Engine) -> Hit:
        known = self._kv.hit(engine)
        if self._prefixes.doubt(engine) is None:
            coming = self._sent.coming(engine)
            return known._replace(coming=coming) if coming > known.tokens else known
        sent = self._sent.hit(engine)
        return sent if sent.tokens > known.tokens else known

    def leaders(self, most: int) -> Sequence[Engine]:
        found = dict.fromkeys(self._kv.leaders(most))
        if len(found) < most:
            found.update(dict.fromkeys(self._sent.leaders(most - len(found))))
        return list(found)


class KvAware(CacheAware):
    """The index of `prefixes` is fed by `tandem.router.kv_events`."""

    def __init__(self, prefixes: KvPrefixes, *, rng: Random | None = None) -> None:
        self._known = prefixes
        super().__init__(prefixes, rng=rng)
        self.fallbacks: Counter[str] = Counter()
        """Requests that were not decided by events alone, by reason."""

    def choose(self, prompt: Prompt, candidates: Sequence[Engine]) -> Choice:
        choice = super().choose(prompt, candidates)
        reason = self._fallback(prompt, choice.engine)
        return choice if reason is None else choice._replace(why=f"{choice.why} (fallback: {reason})")

    def sent(self, prompt: Prompt, engine: Engine) -> None:
        super().sent(prompt, engine)
        reason = self._fallback(prompt, engine)
        if reason is None:
            return
        if reason not in self.fallbacks:
            logger.warning("kvaware falls back (%s), for %s first; this is logged once", reason, engine.url)
        self.fallbacks[reason] += 1

    def _fallback(self, prompt: Prompt, engine: Engine) -> str | None:
        return "no_ids" if prompt.ids is None else self._known.doubt(engine)
