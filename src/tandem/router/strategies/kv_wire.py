"""KV events as vLLM sends them (`vllm/distributed/kv_events.py`), decoded and cut into small pieces of
work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tandem.router.strategies.kv_index import KvIndex, Rank

PIECE = 128
"""Blocks that are entered into the index at once, in about 0.2 ms."""

_MOST_TOKENS = 65_536  # of a block: a prompt's hashes are worked out for each size that occurs
_Group = Annotated[int, Meta(ge=0, lt=1024)]

Work = Callable[[KvIndex, Rank], None]


class _Event(msgspec.Struct, tag_field="type", gc=False):
    """Fields not named here are passed over."""


class BlockStored(_Event, tag="BlockStored"):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: Annotated[int, Meta(ge=1, le=_MOST_TOKENS)]
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: _Group | None = None

    def pieces(self) -> Iterator[Work]:
        for first in range(0, len(self.block_hashes), PIECE):
            yield lambda index, rank, first=first: self._store(index, rank, first)  # type: ignore[misc]

    def _store(self, index: KvIndex, rank: Rank, first: int) -> None:
        until, size = first + PIECE, self.block_size
        whole = not first and until >= len(self.block_hashes)
        index.store(
            rank,
            self.block_hashes[first:until],
            self.block_hashes[first - 1] if first else self.parent_block_hash,
            self.token_ids if whole else self.token_ids[first * size : until * size],
            size,
            group=self.group_idx or 0,
            medium=self.medium,
            lora=self.lora_name,
            extra_keys=None if self.extra_keys is None else self.extra_keys[first:until],
        )


class BlockRemoved(_Event, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: _Group | None = None

    def pieces(self) -> Iterator[Work]:
        for first in range(0, len(self.block_hashes), PIECE):
            yield lambda index, rank, first=first: self._remove(index, rank, first)  # type: ignore[misc]

    def _remove(self, index: KvIndex, rank: Rank, first: int) -> None:
        hashes = self.block_hashes[first : first + PIECE]
        index.remove(rank, hashes, group=self.group_idx or 0, medium=self.medium)


class AllBlocksCleared(_Event, tag="AllBlocksCleared"):
    def pieces(self) -> Iterator[Work]:
        yield lambda index, rank: index.clear(rank)


Event = BlockStored | BlockRemoved | AllBlocksCleared


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[Event]


class _RawBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]


_BATCH = msgspec.msgpack.Decoder(_Batch)
_RAW = msgspec.msgpack.Decoder(_RawBatch)
_EVENT: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def decode(payload: bytes) -> tuple[list[Event], int]:
    """A batch's events, and how many more it has that cannot be read (another kind, or malformed).

    Raises msgspec.DecodeError for what is no batch at all."""
    try:
        return _BATCH.decode(payload).events, 0
    except msgspec.ValidationError:
        events, unread = [], 0
        for raw in _RAW.decode(payload).events:
            try:
                events.append(_EVENT.decode(raw))
            except msgspec.DecodeError:
                unread += 1
        return events, unread
