"""Which engine holds which KV blocks, by the engines' own KV events.

An event names blocks by the engine's hashes. These are only links here: the parent's hash leads to the hash
of our own chain for that prefix, and the event's token ids carry the chain on. What has no known parent
cannot be placed; it is dropped and counted as an orphan.

Each KV cache group of each data-parallel rank of each engine is a holder, with one bit for the device's
memory and one for the host's. A rank holds a prefix where all its groups do.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.router.engines import Engine
from tandem.router.strategies.base import Kept, Prompt
from tandem.router.strategies.chain import MASK, Space, extend, root, usable
from tandem.router.strategies.holders import Holders, Run, Slots, depth
from tandem.router.strategies.prefixes import MISS, Hit

_PARTS = 64
_PART = _PARTS - 1
_TIDIED = 512  # forgotten blocks cleared away with each event

SIZES = 8
"""Block sizes that are followed in all: each costs every prompt another chain of hashes. Engines of one
endpoint have one or two."""
SIZES_EACH = 4
"""Block sizes that are followed of one engine, lest it take all of them."""
GROUPS = 64
"""KV cache groups that are followed of one rank: each is two bits of every set of holders."""
_RECENT = 200  # events; when there are more, what was before counts half

DEVICE = "GPU"
"""What vLLM calls the device's own memory, also on a CPU. Whatever else it names is the host's here."""

BlockHash = int | bytes


class _Tier:
    """The blocks of one holder in one tier of memory: the engine's hash → our chain's.

    An engine may hold a block twice, and says so for each copy, and for each that it evicts.
    """

    __slots__ = ("bit", "copies", "parts")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.parts: list[dict[int, int]] = [{} for _ in range(_PARTS)]
        self.copies: dict[int, int] = {}

    def find(self, key: int) -> int | None:
        return self.parts[key & _PART].get(key)

    def __len__(self) -> int:
        return sum(map(len, self.parts))


class _Group:
    """One KV cache group of a rank."""

    __slots__ = ("block_size", "device", "host")

    def __init__(self, bit: int, block_size: int) -> None:
        self.block_size = block_size
        self.device = _Tier(bit)
        self.host = _Tier(bit << 1)

    def find(self, key: int) -> int | None:
        found = self.device.find(key)
        return self.host.find(key) if found is None else found


@dataclass(eq=False, slots=True)
class Rank:
    """What is known of one data-parallel rank of an engine. Changed through `KvIndex`."""

    engine: Engine
    number: int
    complete: bool = False
    """Whether its events were seen from its start on, without a hole."""
    blocks: int = 0
    """Blocks of the device's memory that are placed."""
    orphans: int = 0
    """Blocks that it holds, as far as is known, and that could not be placed."""
    groups: dict[int, _Group] = field(default_factory=dict)
    holders: tuple[tuple[int, int], ...] = ()
    """Block size and device bit of each group."""
    align: int = 1
    """Tokens that a hit is a multiple of."""
    partly: bool = False
    """Whether it has KV cache groups that are not followed (see `SIZES`, `GROUPS`): what it holds is not
    known."""
    heard: int = 0
    """Events that were read, ever."""
    read: float = 0.0
    """Of late."""
    unread: float = 0.0
    """Events that came of late, and that could not be read."""

    @property
    def coverage(self) -> float:
        """The part of its cache that is known, 0 to 1; what it held before its events were seen is not in it
        (see `complete`)."""
        if not self.orphans:
            return 1.0 if self.blocks else float(self.complete)
        return self.blocks / (self.blocks + self.orphans)

    def note(self, *, unread: bool = False) -> None:
        """An event has come."""
        if unread:
            self.unread += 1
        else:
            self.read += 1
            self.heard += 1
        if self.read + self.unread > _RECENT:
            self.read, self.unread = self.read / 2, self.unread / 2

    @property
    def unread_share(self) -> float:
        """The part of its events of late that could not be read, 0 to 1."""
        return self.unread / (self.read + self.unread) if self.unread else 0.0


class KvIndex:
    """The index, and counts of what it dropped, by reason."""

    def __init__(self, most: int = 4_000_000) -> None:
        """`most`: blocks kept in all, about 170 bytes each; what comes then is dropped and counted."""
        self._most = most
        self._holders = Holders()
        self._slots: Slots[Engine] = Slots(width=2)
        self._ranks: dict[Engine, tuple[Rank, ...]] = {}
        self._sizes: Counter[int] = Counter()  # block size → groups that have it
        self._tiered = False
        self._retired: deque[_Tier] = deque()
        self._masks: Kept[dict[int, int]] = Kept(self._mask)
        self.count = 0
        """Blocks kept, the same one for each holder."""
        self.dropped: Counter[str] = Counter()

    def __len__(self) -> int:
        """Different blocks that somebody holds."""
        return len(self._holders)

    def follow(self, engine: Engine, rank: int = 0, *, complete: bool = False) -> Rank:
        """Begin, or begin again, with a rank of which nothing is known."""
        known = next((each for each in self.ranks(engine) if each.number == rank), None)
        if known is None:
            known = Rank(engine, rank)
            self._ranks[engine] = (*self.ranks(engine), known)
        self._retire(known)
        known.complete, known.orphans = complete, 0
        known.read = known.unread = 0.0
        return known

    def forget(self, engine: Engine) -> None:
        """An engine has left."""
        for rank in self._ranks.pop(engine, ()):
            self._retire(rank)

    def ranks(self, engine: Engine) -> tuple[Rank, ...]:
        """What is known of an engine, by rank; none: not followed."""
        return self._ranks.get(engine, ())

    def store(
        self,
        rank: Rank,
        hashes: Sequence[BlockHash],
        parent: BlockHash | None,
        tokens: Sequence[int],
        block_size: int,
        *,
        group: int = 0,
        medium: str | None = None,
        lora: str | None = None,
        extra_keys: Sequence[Sequence[Any] | None] | None = None,
    ) -> None:
        """Full blocks have entered a cache. `tokens`: those of all blocks; none where a block that is known
        moves to another tier. `extra_keys`: what is in a block's hash beside its tokens, for each block."""
        self.tidy(_TIDIED + 2 * len(hashes))
        rank.note()
        held = self._group(rank, group, block_size)
        if held is None:
            rank.partly = True
            return self._drop(rank, "not_followed", len(hashes))
        aligned = len(tokens) in (0, block_size * len(hashes)) and len(extra_keys or hashes) == len(hashes)
        if held.block_size != block_size or not aligned:
            return self._drop(rank, "unaligned", len(hashes))
        if self.count + len(hashes) > self._most:
            return self._drop(rank, "full", len(hashes))
        on_device = medium is None or medium == DEVICE
        tier = held.device if on_device else held.host
        if not on_device:
            self._tiered = True
        if tokens:
            if parent is None:
                at: int | None = root(Space(lora, _salt(extra_keys, lora)), block_size)
            else:
                at = held.find(_key(parent))
            if at is None:
                return self._drop(rank, "orphan", len(hashes))
            keys = _keys(hashes)
            placed = _chain(at, tokens, block_size, extra_keys)
        else:
            known = [(key, at) for key in map(_key, hashes) if (at := held.find(key)) is not None]
            if len(known) < len(hashes):
                self.dropped["unknown"] += len(hashes) - len(known)
            keys, placed = [key for key, _ in known], [at for _, at in known]
        new = []
        parts = tier.parts
        for key, at in zip(keys, placed, strict=True):
            part = parts[key & _PART]
            if key in part:
                tier.copies[key] = tier.copies.get(key, 0) + 1
            else:
                part[key] = at
                new.append(at)
        self._holders.hold(new, tier.bit)
        self.count += len(new)
        if on_device:
            rank.blocks += len(new)
        return None

    def remove(
        self, rank: Rank, hashes: Iterable[BlockHash], *, group: int = 0, medium: str | None = None
    ) -> None:
        """A copy of each of these blocks has left a cache."""
        self.tidy(_TIDIED)
        rank.note()
        held = rank.groups.get(group)
        on_device = medium is None or medium == DEVICE
        tier = None if held is None else held.device if on_device else held.host
        gone = []
        for key in map(_key, hashes):
            if tier is not None and key in tier.copies:
                tier.copies[key] -= 1
                if not tier.copies[key]:
                    del tier.copies[key]
                continue
            at = None if tier is None else tier.parts[key & _PART].pop(key, None)
            if at is not None:
                gone.append(at)
            elif on_device and rank.orphans:
                rank.orphans -= 1
        if tier is not None and gone:
            self._holders.drop(gone, tier.bit)
            self.count -= len(gone)
            if on_device:
                rank.blocks -= len(gone)

    def clear(self, rank: Rank) -> None:
        """A rank holds nothing any more: from here on all that it holds is known."""
        read, unread = rank.read, rank.unread
        self.follow(rank.engine, rank.number, complete=True)
        rank.read, rank.unread = read, unread
        rank.note()

    def tidy(self, most: int) -> bool:
        """Clear away so many blocks of what was forgotten, which counts no more. Whether anything is left."""
        while self._retired and most > 0:
            tier = self._retired[0]
            gone: list[int] = []
            while tier.parts and len(gone) < most:
                if tier.parts[-1]:
                    gone.append(tier.parts[-1].popitem()[1])
                else:
                    tier.parts.pop()
            self._holders.drop(gone, tier.bit)
            self.count -= len(gone)
            most -= len(gone) + 1
            if not tier.parts:
                self._retired.popleft()
                # The host's bit of a pair is cleared away second, and frees both.
                if tier.bit.bit_length() % 2 == 0:
                    self._slots.release(tier.bit >> 1)
        return bool(self._retired)

    def match(self, prompt: Prompt, candidates: Sequence[Engine], start: int = 0) -> KvMatch:
        """`start`: see `prefixes.Prefixes`."""
        runs: dict[int, list[Run]] = {}
        tiers: dict[int, list[Run]] = {}
        if prompt.ids is not None:
            for size, mask in self._masks.of(candidates).items():
                hashes = prompt.chain(size)
                # A full chain is one block too long only where the prompt ends with a block.
                most = usable(len(prompt.ids), size)
                hashes = hashes if len(hashes) == most else hashes[:most]
                runs[size] = self._holders.walk(hashes, mask)
                if self._tiered:
                    tiers[size] = self._holders.walk_tiers(hashes, mask)
        return KvMatch(self, runs, tiers or runs, start)

    def some(self, bits: int, most: int, start: int) -> list[Engine]:
        return self._slots.some(bits, most, start)

    def _group(self, rank: Rank, number: int, block_size: int) -> _Group | None:
        """None: it is one too many."""
        group = rank.groups.get(number)
        if group is None:
            if len(rank.groups) >= GROUPS or not self._may_follow(rank.engine, block_size):
                return None
            group = rank.groups[number] = _Group(self._slots.take(rank.engine), block_size)
            rank.holders = (*rank.holders, (block_size, group.device.bit))
            rank.align = math.lcm(rank.align, block_size)
            self._sizes[block_size] += 1
            self._masks.clear()
        return group

    def _may_follow(self, engine: Engine, block_size: int) -> bool:
        own = {size for rank in self.ranks(engine) for size, _ in rank.holders}
        return block_size in own or (
            len(own) < SIZES_EACH and (block_size in self._sizes or len(self._sizes) < SIZES)
        )

    def _retire(self, rank: Rank) -> None:
        for group in rank.groups.values():
            self._retired += (group.device, group.host)
            self._sizes[group.block_size] -= 1
        rank.groups, rank.holders, rank.blocks, rank.align, rank.partly = {}, (), 0, 1, False
        self._sizes += Counter()  # without those that are at 0
        self._masks.clear()

    def _mask(self, candidates: Sequence[Engine]) -> dict[int, int]:
        """Block size → the device bits of all holders that have it."""
        masks = dict.fromkeys(self._sizes, 0)
        for engine in candidates:
            for rank in self.ranks(engine):
                for size, bit in rank.holders:
                    masks[size] |= bit
        return masks

    def _drop(self, rank: Rank, reason: str, blocks: int) -> None:
        self.dropped[reason] += blocks
        rank.orphans += blocks


class KvMatch:
    __slots__ = ("_index", "_runs", "_start", "_tiers")

    def __init__(
        self, index: KvIndex, runs: dict[int, list[Run]], tiers: dict[int, list[Run]], start: int
    ) -> None:
        """`runs`: by block size, what lies on the device; `tiers`: what lies in either tier."""
        self._index = index
        self._runs = runs
        self._tiers = tiers
        self._start = start

    def hit(self, engine: Engine) -> Hit:
        """The best of its ranks."""
        best = MISS
        for rank in self._index.ranks(engine):
            tokens = _tokens(rank, self._tiers)
            if tokens > best.tokens:
                host = tokens - _tokens(rank, self._runs) if self._tiers is not self._runs else 0
                best = Hit(tokens, host, rank.number)
        return best

    def leaders(self, most: int) -> Sequence[Engine]:
        found: dict[Engine, None] = {}
        for runs in self._tiers.values():
            for _, holders in runs:
                found.update(dict.fromkeys(self._index.some(holders, most, self._start)))
                if len(found) >= most:
                    break
        return list(found)


def _tokens(rank: Rank, runs: dict[int, list[Run]]) -> int:
    """What all of a rank's groups hold."""
    held = [size * depth(runs.get(size, ()), bit) for size, bit in rank.holders]
    if not held or rank.partly:
        return 0
    tokens = min(held)
    return tokens - tokens % rank.align


def _key(block_hash: BlockHash) -> int:
    """vLLM sends 64 bits of its hashes, or, if told so, all of them."""
    if isinstance(block_hash, bytes):
        return int.from_bytes(block_hash[-8:], "big") & MASK
    return block_hash & MASK


def _keys(hashes: Sequence[BlockHash]) -> list[int]:
    """`_key` of many, without a call for each where they are numbers."""
    try:
        return [each & MASK for each in hashes]  # type: ignore[operator]
    except TypeError:
        return list(map(_key, hashes))


def _salt(extra_keys: Sequence[Sequence[Any] | None] | None, lora: str | None) -> str | None:
    """The cache salt, which is in the first block's keys: the text that is not the LoRA's name."""
    texts = [key for key in (extra_keys[0] if extra_keys else None) or () if isinstance(key, str)]
    if lora is not None and texts[:1] == [lora]:
        del texts[0]
    return texts[0] if texts else None


def _chain(
    at: int,
    tokens: Sequence[int],
    block_size: int,
    extra_keys: Sequence[Sequence[Any] | None] | None,
) -> list[int]:
    """Our hashes of an event's blocks. Other keys than LoRA and salt (multimodal content, embeddings) make
    hashes that no prompt of plain tokens has."""
    if not extra_keys or not any(_foreign(keys) for keys in extra_keys if keys):
        return extend(at, tokens, block_size)
    placed = []
    for i, keys in enumerate(extra_keys):
        if keys and _foreign(keys):
            at = hash((at, repr(keys))) & MASK
        [at] = extend(at, tokens[i * block_size : (i + 1) * block_size], block_size)
        placed.append(at)
    return placed


def _foreign(keys: Sequence[Any]) -> bool:
    return not all(isinstance(key, str) for key in keys)
