"""A decoder's receive buffer: chunks of KV under their keys, from allocation to retrieval.

Nothing else frees a chunk. It can be read from the allocation on, whatever it holds: what was written before,
for another key, or nothing.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from tandem.sim.blocks import Block, KvSource
from tandem.sim.lmcache.keys import Key


@dataclass(eq=False, slots=True)
class Chunk:
    """Room for `chunk_size` tokens. `start` and `filled` as in `blocks.Block`."""

    number: int
    references: int = 0
    source: KvSource | None = None
    start: int = 0
    filled: int = 0


@dataclass(eq=False, slots=True)
class Allocation:
    """What one sender asked for, as far as it got. `already` and `chunks` are its answer when `done`."""

    keys: list[Key]
    next: int = 0
    already: list[int] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.next == len(self.keys)


class ReceiveBuffer:
    def __init__(self, chunks: int) -> None:
        self.chunks = [Chunk(i) for i in range(chunks)]
        self._free = deque(self.chunks)
        self._held: dict[Key, Chunk] = {}

    @property
    def total(self) -> int:
        return len(self.chunks)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.total - self.free

    def __contains__(self, key: Key) -> bool:
        return key in self._held

    def allocate(self, allocation: Allocation, *, full: bool = False) -> bool:
        """Go on with it as far as there is room (`full`: there is none). A key that is there already gets no
        new chunk, but a reference more."""
        while not allocation.done:
            key = allocation.keys[allocation.next]
            if (chunk := self._held.get(key)) is not None:
                chunk.references += 1
                allocation.already.append(allocation.next)
            elif self._free and not full:
                chunk = self._held[key] = self._free.popleft()
                chunk.references = 1
                allocation.chunks.append(chunk.number)
            else:
                return False
            allocation.next += 1
        return True

    def write(self, numbers: Iterable[int], spans: Iterable[tuple[int, int]], source: KvSource) -> None:
        """KV of `source` into these chunks. A span: where a chunk's tokens begin, and how many they are."""
        for number, (start, filled) in zip(numbers, spans, strict=True):
            chunk = self.chunks[number]
            chunk.source, chunk.start, chunk.filled = source, start, filled

    def prefix(self, keys: Sequence[Key]) -> int:
        """How many of the first keys are there."""
        return next((i for i, key in enumerate(keys) if key not in self._held), len(keys))

    def retrieve(self, keys: Iterable[Key]) -> list[Chunk]:
        """Take these chunks out, each as it was, in the keys' order. A chunk that more than one sender was
        told of stays until it was retrieved as often. Raises KeyError for a key that is not there."""
        taken = []
        for key in keys:
            chunk = self._held[key]
            taken.append(Chunk(chunk.number, 0, chunk.source, chunk.start, chunk.filled))
            if chunk.references == 1:
                del self._held[key]
                self._free.append(chunk)
            chunk.references -= 1
        return taken


def fill(
    blocks: Iterable[Block], start: int, until: int, block_size: int, chunks: Sequence[Chunk], chunk_size: int
) -> None:
    """Copy chunks into KV blocks. `start`: position of the first block's first token, a multiple of the block
    size; `until`: the end of the chunks' last token. The first chunk is the one that `start` lies in."""
    first = start // chunk_size
    for block in blocks:
        end = min(start + block_size, until)
        if end <= start:
            break
        low, high = start // chunk_size, (end - 1) // chunk_size
        parts = chunks[low - first : high - first + 1]
        if low == high:
            offset = start - low * chunk_size
            block.source, block.start = parts[0].source, parts[0].start + offset
            block.filled = max(0, min(parts[0].filled - offset, end - start))
        else:
            bounds = [(i * chunk_size, min((i + 1) * chunk_size, end)) for i in range(low, high + 1)]
            block.source, block.start, block.filled = _joined(parts, bounds), start, end - start
        start += block_size


def _joined(parts: Sequence[Chunk], bounds: Sequence[tuple[int, int]]) -> KvSource:
    """The source of a block made of several chunks: theirs, if all hold one prompt's KV where it belongs."""
    last = parts[-1].source
    if last is not None and all(_holds(p, *b, last) for p, b in zip(parts, bounds, strict=True)):
        return last
    digest = blake2b(digest_size=16)
    for part in parts:
        tokens = part.source.tokens[part.start : part.start + part.filled] if part.source else ()
        digest.update(array("I", tokens).tobytes() + (part.source.taint if part.source else b"\0"))
    return KvSource([], digest.digest())


def _holds(chunk: Chunk, start: int, end: int, like: KvSource) -> bool:
    source = chunk.source
    return (
        source is not None
        and chunk.start == start
        and start + chunk.filled >= end
        and source.taint == like.taint
        and (source is like or source.tokens[:end] == like.tokens[:end])
    )
