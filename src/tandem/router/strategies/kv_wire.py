"""KV events as vLLM sends them (`vllm/distributed/kv_events.py`), decoded and cut into small pieces of
work.

What is small is decoded at once. A large batch is split into its events, and of a large event the token ids
are cut into stretches without decoding them, so that no piece holds up the loop.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tandem.router.strategies.kv_index import KvIndex, Rank

PIECE = 128
"""Blocks that are entered into the index at once, in about 0.2 ms; fewer where they are long."""
PIECE_TOKENS = 8192
SMALL = 64 * 1024
"""Bytes that are decoded at once, in at most 2 ms."""
MOST_BYTES = 8 * 2**20
"""Bytes of a batch that is read: a step of vLLM that brings a million tokens has 5 MB."""
MOST_EVENTS = 32_768
"""Events of a large batch that is read. vLLM has one for each request and for each block that it evicts."""
MOST_BLOCKS = 131_072
"""Blocks of an event that is read."""

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
        step = _step(self.block_size)
        for first in range(0, len(self.block_hashes), step):
            yield lambda index, rank, first=first: self._store(index, rank, first, step)  # type: ignore[misc]

    def _store(self, index: KvIndex, rank: Rank, first: int, step: int) -> None:
        until, size = first + step, self.block_size
        whole = not first and until >= len(self.block_hashes)
        self.store(
            index, rank, self.token_ids if whole else self.token_ids[first * size : until * size], first, step
        )

    def store(self, index: KvIndex, rank: Rank, tokens: list[int], first: int, count: int) -> None:
        """Enter some of its blocks. `tokens`: theirs."""
        until = first + count
        index.store(
            rank,
            self.block_hashes[first:until],
            self.block_hashes[first - 1] if first else self.parent_block_hash,
            tokens,
            self.block_size,
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
_FIELDS = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_ENCODER = msgspec.msgpack.Encoder()


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


def pieces(payload: bytes) -> Iterator[Work | None]:
    """The work that a batch is, in small pieces. None: an event, or the batch, cannot be read (another kind,
    malformed, or too large)."""
    try:
        if len(payload) <= SMALL:
            events, unread = decode(payload)
            yield from [None] * unread
            for event in events:
                yield from event.pieces()
            return
        if len(payload) > MOST_BYTES or _events(payload) > MOST_EVENTS:
            yield None
            return
        raws = _RAW.decode(payload).events
    except (msgspec.DecodeError, RecursionError):
        yield None
        return
    for raw in raws:
        yield _pause
        try:
            if len(memoryview(raw)) <= SMALL:
                yield from _EVENT.decode(raw).pieces()
            else:
                yield from _large(raw)
        except (msgspec.DecodeError, RecursionError):
            yield None


def _large(raw: msgspec.Raw) -> Iterator[Work | None]:
    """An event by pieces. Raises msgspec.DecodeError for what is none."""
    fields = _FIELDS.decode(raw)
    yield _pause
    hashes, keys = fields.get("block_hashes", _EMPTY), fields.get("extra_keys", _EMPTY)
    if _length(memoryview(hashes))[0] > MOST_BLOCKS or len(memoryview(keys)) > SMALL + MOST_BLOCKS:
        yield None
        return
    tokens = memoryview(fields.get("token_ids", _EMPTY))
    event = _EVENT.decode(_ENCODER.encode({**fields, "token_ids": []}))
    count, at = _length(tokens)
    if not isinstance(event, BlockStored) or not count:
        yield from event.pieces()
        return
    blocks, size = len(event.block_hashes), event.block_size
    if count != blocks * size:
        yield None
        return
    yield _pause
    step = _step(size)
    for first in range(0, blocks, step):
        wanted = min(step, blocks - first) * size
        end = _skip(tokens, at, wanted)
        if end is None:
            yield None
            return
        ids = _INTS.decode(b"\xdd" + wanted.to_bytes(4, "big") + tokens[at:end])
        at = end
        yield lambda index, rank, ids=ids, first=first: event.store(  # type: ignore[misc]
            index, rank, ids, first, step
        )


def _pause(index: KvIndex, rank: Rank) -> None:
    """Let the loop turn."""


def _step(block_size: int) -> int:
    """Blocks of a piece."""
    return max(1, min(PIECE, PIECE_TOKENS // block_size))


# MessagePack

_EMPTY = msgspec.Raw(b"\x90")
_INTS = msgspec.msgpack.Decoder(list[int])
_SKIPPED = 2048  # ints that are skipped at once
_UINTS = re.compile(rb"(?s:[\x00-\x7f]|\xcd..|\xce.{4}|\xcc.|\xcf.{8}){%d}" % _SKIPPED)
_UINT = {0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9}


def _skip(data: memoryview, at: int, count: int) -> int | None:
    """Where so many unsigned ints end that begin at a place; None: there are other things among them."""
    while count >= _SKIPPED:
        found = _UINTS.match(data, at)
        if found is None:
            return None
        at, count = found.end(), count - _SKIPPED
    for _ in range(count):
        if at >= len(data):
            return None
        at += 1 if data[at] < 0x80 else _UINT.get(data[at], len(data) + 1)
    return at if at <= len(data) else None


def _length(data: memoryview) -> tuple[int, int]:
    """The length of an array, and where its first item begins. Raises msgspec.DecodeError."""
    first = data[0] if data else 0
    if first & 0xF0 == 0x90:
        return first & 0x0F, 1
    width = {0xDC: 2, 0xDD: 4}.get(first)
    if width is None:
        raise msgspec.DecodeError("not an array")
    return int.from_bytes(data[1 : 1 + width], "big"), 1 + width


def _events(payload: bytes) -> int:
    """How many events a batch has. Raises msgspec.DecodeError for what is none."""
    data = memoryview(payload)
    _, at = _length(data)
    if data[at] != 0xCB:  # the time stamp, a float
        raise msgspec.DecodeError("no time stamp")
    return _length(data[at + 9 :])[0]
