"""The KV cache as blocks: who holds them, which prefix each one holds, which is evicted next.

Accounting follows vLLM V1: block 0 is never given out; a full block is found again by a hash chained over the
prefix, the cache salt and the LoRA name; a hit is capped so that at least one prompt token is computed;
free blocks without a hash are reused first (last freed first), cached ones in the order they were freed.

Besides, each block knows what its KV was computed from (`KvSource`), so that a request that reads another
prompt's KV gets another answer, as it would from a real engine.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

MEDIUM = "GPU"
"""What vLLM calls the device's own KV memory, also on a CPU."""


@dataclass(eq=False, slots=True)
class KvSource:
    """The tokens that KV was computed from; `taint` says that the KV beneath them was another prompt's."""

    tokens: list[int]
    taint: bytes = b""


@dataclass(eq=False, slots=True)
class Block:
    id: int
    references: int = 0
    hash: bytes | None = None
    source: KvSource | None = None
    """None: never written. Kept when the block is freed: the memory still holds it."""
    start: int = 0
    """Position of the block's first token in `source`."""
    filled: int = 0
    """Tokens of the block whose KV is there."""


@dataclass(frozen=True, slots=True)
class Stored:
    """vLLM's BlockStored: full blocks entered the prefix cache."""

    hashes: list[int]
    parent: int | None
    tokens: list[int]
    block_size: int
    lora: str | None
    extra_keys: list[list[str] | None]

    def as_event(self) -> dict[str, Any]:
        """The map that vLLM sends."""
        return {
            "type": "BlockStored",
            "block_hashes": self.hashes,
            "parent_block_hash": self.parent,
            "token_ids": self.tokens,
            "block_size": self.block_size,
            "lora_id": None if self.lora is None else 1,
            "medium": MEDIUM,
            "lora_name": self.lora,
            "extra_keys": self.extra_keys,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }


@dataclass(frozen=True, slots=True)
class Removed:
    """vLLM's BlockRemoved: one block left the prefix cache."""

    hash: int

    def as_event(self) -> dict[str, Any]:
        return {"type": "BlockRemoved", "block_hashes": [self.hash], "medium": MEDIUM, "group_idx": 0}


@dataclass(frozen=True, slots=True)
class Cleared:
    """vLLM's AllBlocksCleared."""

    def as_event(self) -> dict[str, Any]:
        return {"type": "AllBlocksCleared"}


Event = Stored | Removed | Cleared


class BlockPool:
    """All KV blocks of one engine. `events` collects what changed in the cache until it is taken."""

    def __init__(self, blocks: int, block_size: int, *, caching: bool = True, events: bool = False) -> None:
        if blocks < 2:
            raise ValueError(f"an engine needs at least 2 KV blocks, one of them unused; it has {blocks}")
        self.block_size = block_size
        self.caching = caching
        self.size = blocks
        self.blocks = [Block(i) for i in range(blocks)]
        self.events: list[Event] = []
        self._record = events
        self._unhashed = list(range(blocks - 1, 0, -1))  # a stack: next is the last
        self._evictable: dict[int, None] = {}  # cached and free, least recently freed first
        self._cached: dict[bytes, dict[int, None]] = {}

    @property
    def free(self) -> int:
        return len(self._unhashed) + len(self._evictable)

    @property
    def usage(self) -> float:
        """0 to 1, as vLLM's kv_cache_usage_perc: cached blocks that nobody holds count as free."""
        return 1.0 - self.free / (self.size - 1)

    def needed(self, tokens: int, held: int) -> int:
        """Blocks still to allocate for `tokens` tokens, `held` being there."""
        return max(0, -(-tokens // self.block_size) - held)

    def hit(self, hashes: Sequence[bytes], tokens: int) -> list[Block]:
        """Cached blocks of the longest prefix, short of the last of `tokens` tokens; not held yet."""
        found: list[Block] = []
        if self.caching:
            for block_hash in hashes[: (tokens - 1) // self.block_size]:
                ids = self._cached.get(block_hash)
                if not ids:
                    break
                found.append(self.blocks[next(iter(ids))])
        return found

    def hit_costs(self, hit: Iterable[Block]) -> int:
        """How many free blocks holding this hit takes."""
        return sum(block.references == 0 for block in hit)

    def hold(self, hit: Iterable[Block]) -> None:
        for block in hit:
            if block.references == 0:
                self._evictable.pop(block.id, None)
            block.references += 1

    def allocate(self, count: int) -> list[Block]:
        """New blocks; cached ones are evicted where no others are left. The caller has checked `free`."""
        taken = []
        for _ in range(count):
            if self._unhashed:
                block = self.blocks[self._unhashed.pop()]
            else:
                oldest = next(iter(self._evictable))
                del self._evictable[oldest]
                block = self.blocks[oldest]
                self._evict(block)
            block.references = 1
            taken.append(block)
        return taken

    def release(self, blocks: Iterable[Block]) -> None:
        """Let go of a request's blocks, given in the order of its tokens; the tail is evicted first."""
        unhashed: list[int] = []
        for block in reversed(list(blocks)):
            block.references -= 1
            if block.references == 0:
                if block.hash is None:
                    unhashed.append(block.id)
                else:
                    self._evictable[block.id] = None
        self._unhashed.extend(reversed(unhashed))

    def cache(
        self,
        blocks: Sequence[Block],
        hashes: Sequence[bytes],
        first: int,
        until: int,
        tokens: Sequence[int],
        *,
        salt: str | None,
        lora: str | None,
    ) -> None:
        """Enter blocks `first` to `until` of a request into the prefix cache; hashes and tokens are its."""
        if not self.caching or first >= until:
            return
        for block, block_hash in zip(blocks[first:until], hashes[first:until], strict=True):
            block.hash = block_hash
            self._cached.setdefault(block_hash, {})[block.id] = None
        if self._record:
            size = self.block_size
            extra = [
                [*([lora] if lora else ()), *([salt] if salt and i == 0 else ())] for i in range(first, until)
            ]
            self.events.append(
                Stored(
                    hashes=[external(h) for h in hashes[first:until]],
                    parent=external(hashes[first - 1]) if first else None,
                    tokens=list(tokens[first * size : until * size]),
                    block_size=size,
                    lora=lora,
                    extra_keys=[keys or None for keys in extra],
                )
            )

    def clear(self) -> bool:
        """Forget all cached prefixes; False, and nothing done, while any block is held."""
        if self.free != self.size - 1:
            return False
        self._unhashed.extend(self._evictable)
        self._evictable.clear()
        self._cached.clear()
        for block in self.blocks:
            block.hash = None
        if self._record:
            self.events.append(Cleared())
        return True

    def take_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def _evict(self, block: Block) -> None:
        if block.hash is None:
            return
        ids = self._cached[block.hash]
        ids.pop(block.id, None)
        if not ids:
            del self._cached[block.hash]
        if self._record:
            self.events.append(Removed(external(block.hash)))
        block.hash = None


def external(block_hash: bytes) -> int:
    """A block's hash as events carry it: 64 bits."""
    return int.from_bytes(block_hash[-8:], "big")


@dataclass(slots=True)
class HashChain:
    """Block hashes of one request, extended as its tokens grow. Salt and LoRA are part of the chain."""

    block_size: int
    salt: str | None = None
    lora: str | None = None
    hashes: list[bytes] = field(default_factory=list)

    def extend(self, tokens: Sequence[int]) -> list[bytes]:
        """Hashes of all full blocks of `tokens`, which begin with those seen before."""
        size = self.block_size
        for i in range(len(self.hashes), len(tokens) // size):
            parent = self.hashes[-1] if self.hashes else b""
            extra = f"{self.lora or ''}\0{(self.salt or '') if i == 0 else ''}".encode()
            chunk = array("I", tokens[i * size : (i + 1) * size]).tobytes()
            self.hashes.append(blake2b(parent + extra + chunk, digest_size=16).digest())
        return self.hashes


def foreign_kv(blocks: Sequence[Block], tokens: list[int], count: int, block_size: int) -> bytes:
    """Whether the KV in `blocks` is that of the first `count` of `tokens`: b"" if so, else a digest of it."""
    right: dict[int, int] = {}  # source → how many of its leading tokens are the request's own
    for i, block in enumerate(blocks):
        held = min(block_size, count - i * block_size)
        if held <= 0:
            break
        source = block.source
        if source is None or source.taint or block.start != i * block_size or block.filled < held:
            return _digest(blocks, block_size)
        end = block.start + held
        known = right.get(id(source), 0)
        if known < end:
            if source.tokens is not tokens and source.tokens[known:end] != tokens[known:end]:
                return _digest(blocks, block_size)
            right[id(source)] = end
    return b""


def _digest(blocks: Sequence[Block], block_size: int) -> bytes:
    digest = blake2b(digest_size=16)
    for block in blocks:
        source = block.source
        if source is None:
            digest.update(b"\0")
        else:
            held = source.tokens[block.start : block.start + block.filled]
            digest.update(source.taint + block.start.to_bytes(8, "big") + array("I", held).tobytes())
    return digest.digest()
