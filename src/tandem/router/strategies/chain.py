"""A prompt as a chain of block hashes: each stands for a whole prefix, so equal hashes mean equal prefixes.

The hashes are the router's own. An engine's are not used: they depend on a root that is random at each start.

Python's hash of a tuple is used (64 bits by xxHash's rounds, in C). It costs a sixth of blake2b and no
dependency; it is not cryptographic, and need not be: a collision makes a router expect a cache hit that does
not come. 60 bits are kept, which Python stores in 32 bytes instead of 48; among 2 million blocks two are
equal with a probability of 2 in a million.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

MASK = (1 << 60) - 1


class Space(NamedTuple):
    """What keeps KV apart beside the tokens: equal prompts of two spaces share nothing."""

    lora: str | None = None
    salt: str | None = None


NO_SPACE = Space()


def root(space: Space, block_size: int) -> int:
    """What a chain begins with. Another in each process, since Python's hash of text is."""
    return hash((block_size, *space)) & MASK


def extend(parent: int, ids: Iterable[int], block_size: int) -> list[int]:
    """The hashes of all full blocks of `ids`, which follow what `parent` stands for."""
    # zip over one iterator yields the blocks as tuples, without slices.
    at = parent
    return [at := hash((at, block)) & MASK for block in zip(*[iter(ids)] * block_size, strict=False)]


def usable(tokens: int, block_size: int) -> int:
    """How many blocks of a prompt a cache hit can have: engines compute at least the last token."""
    return max(0, tokens - 1) // block_size
