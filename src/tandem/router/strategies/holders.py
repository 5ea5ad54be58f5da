"""Which holders have which prefix: a table from block hash to a set of holders, as the bits of an int."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")

_SHARDS = 256  # a dict that grows is copied, which would stall the router for 0.1 s at a million entries
_SHARD = _SHARDS - 1
_SHARED = 4096

Run = tuple[int, int]
"""How many blocks from the first on, and the holders (bits) that hold so many and no more."""


class Holders:
    def __init__(self) -> None:
        self._shards: list[dict[int, int]] = [{} for _ in range(_SHARDS)]
        self._shared: dict[int, int] = {}

    def __len__(self) -> int:
        """Blocks that somebody holds."""
        return sum(map(len, self._shards))

    def hold(self, hashes: Iterable[int], bit: int) -> None:
        shards, shared = self._shards, self._shared
        if len(shared) > _SHARED:
            shared.clear()
        for at in hashes:
            shard = shards[at & _SHARD]
            old = shard.get(at)
            if old is None:
                shard[at] = bit
            else:
                # Equal sets are one object: less memory, and `walk` can tell them equal at a glance.
                new = old | bit
                shard[at] = shared.setdefault(new, new)

    def drop(self, hashes: Iterable[int], bit: int) -> None:
        """Undo `hold`; what was not held is ignored."""
        shards, shared = self._shards, self._shared
        for at in hashes:
            shard = shards[at & _SHARD]
            old = shard.get(at)
            if old is None:
                continue
            left = old & ~bit
            if left:
                shard[at] = shared.setdefault(left, left)
            else:
                del shard[at]

    def walk(self, hashes: Sequence[int], among: int) -> list[Run]:
        """How far each holder `among` those of interest holds a chain without a hole, longest first. Those
        that do not even hold its first block are left out."""
        if not among:
            return []
        shards = self._shards
        runs: list[Run] = []
        alive, seen, depth = among, -1, 0
        for depth, at in enumerate(hashes):
            found = shards[at & _SHARD].get(at, 0)
            if found is seen:
                continue
            seen = found
            still = found & alive
            if still != alive:
                if depth:
                    runs.append((depth, alive ^ still))
                if not still:
                    break
                alive = still
        else:
            if hashes:
                runs.append((depth + 1, alive))
        runs.reverse()
        return runs

    def walk_tiers(self, hashes: Sequence[int], among: int) -> list[Run]:
        """As `walk`, where each holder has two bits, and holding a block by the upper one counts as well.
        `among` has the lower ones."""
        shards = self._shards
        runs: list[Run] = []
        alive, depth = among, 0
        for depth, at in enumerate(hashes):
            found = shards[at & _SHARD].get(at, 0)
            still = (found | found >> 1) & alive
            if still != alive:
                if depth:
                    runs.append((depth, alive ^ still))
                if not still:
                    break
                alive = still
        else:
            if hashes and among:
                runs.append((depth + 1, alive))
        runs.reverse()
        return runs


def depth(runs: Sequence[Run], bit: int) -> int:
    """How many blocks a holder has, by what `walk` returned."""
    for blocks, holders in runs:
        if holders & bit:
            return blocks
    return 0


class Slots(Generic[T]):
    """Numbers for owners, each of `width` bits. The lowest free one is taken, so that sets stay small."""

    def __init__(self, width: int = 1) -> None:
        self._width = width
        self._owners: list[T | None] = []
        self._free: list[int] = []

    def take(self, owner: T) -> int:
        """The owner's lowest bit."""
        if self._free:
            slot = self._free.pop()
            self._owners[slot] = owner
        else:
            slot = len(self._owners)
            self._owners.append(owner)
        return 1 << slot * self._width

    def release(self, bit: int) -> None:
        slot = (bit.bit_length() - 1) // self._width
        self._owners[slot] = None
        self._free.append(slot)
        self._free.sort(reverse=True)

    def some(self, bits: int, most: int, start: int) -> list[T]:
        """Owners of a set's lowest bits, at most so many, beginning at any bit position and going round."""
        found: list[T] = []
        upper = bits >> start << start
        for part in (upper, bits ^ upper):
            while part and len(found) < most:
                low = part & -part
                owner = self._owners[(low.bit_length() - 1) // self._width]
                if owner is not None:
                    found.append(owner)
                part ^= low
        return found
