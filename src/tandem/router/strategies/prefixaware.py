"""prefixaware: engines by the prefixes that were sent to them before, and by load."""

from __future__ import annotations

from random import Random

from tandem.router.strategies.cacheaware import CacheAware
from tandem.router.strategies.sent_index import SentIndex


class PrefixAware(CacheAware):
    """Needs nothing of engines and works from the first request on. What it believes to be cached may have
    been evicted, or computed for another router's requests. Without token ids it goes by load."""

    def __init__(self, index: SentIndex | None = None, *, rng: Random | None = None) -> None:
        super().__init__(SentIndex() if index is None else index, rng=rng)
