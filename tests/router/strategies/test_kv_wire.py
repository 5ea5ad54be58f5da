"""Decoding of batches, as vLLM's own classes encode them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.router.engines import Engine
from tandem.router.strategies import KvIndex
from tandem.router.strategies.kv_wire import (
    MOST_BLOCKS,
    MOST_BYTES,
    PIECE,
    PIECE_TOKENS,
    SMALL,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    decode,
    pieces,
)

from .helpers import engine, prompt


def stored(**more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [2**64 - 1, 2],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [["salt"], None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        **more,
    }


def batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])


def test_a_batch_is_read() -> None:
    events, unread = decode(
        batch(
            stored(),
            {"type": "BlockRemoved", "block_hashes": [b"x" * 32], "medium": "GPU", "group_idx": 1},
            {"type": "AllBlocksCleared"},
        )
    )
    one, two, three = events
    assert unread == 0
    assert isinstance(one, BlockStored)
    assert (one.block_hashes, one.token_ids, one.extra_keys) == (
        [2**64 - 1, 2],
        [1, 2, 3, 4],
        [["salt"], None],
    )
    assert isinstance(two, BlockRemoved)
    assert (two.block_hashes, two.group_idx) == ([b"x" * 32], 1)
    assert isinstance(three, AllBlocksCleared)


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_size": 0},
        {"block_size": -2},
        {"block_size": 2**40},
        {"group_idx": -1},
        {"group_idx": 2**40},
        {"block_hashes": [2**64 - 1, None]},
    ],
    ids=str,
)
def test_numbers_that_mean_nothing_are_not_read(wrong: dict[str, Any]) -> None:
    """A prompt's hashes are worked out for each block size that occurs: for one of 0 they cannot be."""
    events, unread = decode(batch(stored(**wrong), stored()))
    assert ([type(e) for e in events], unread) == ([BlockStored], 1)


def test_extra_keys_of_other_blocks_are_not_taken_for_these() -> None:
    index = KvIndex()
    rank = index.follow(engine("http://e:1"), complete=True)
    for event in decode(batch(stored(extra_keys=[["salt"]])))[0]:
        for work in event.pieces():
            work(index, rank)
    assert (index.count, dict(index.dropped)) == (0, {"unaligned": 2})


def test_what_cannot_be_read_costs_only_itself() -> None:
    events, unread = decode(batch({"type": "BlockSplit"}, stored(token_ids="?"), stored(), "text"))
    assert [type(e) for e in events] == [BlockStored]
    assert unread == 3


@pytest.mark.parametrize("payload", [b"", b"\xc1", batch()[:3], msgspec.msgpack.encode({"a": 1})])
def test_what_is_no_batch_is_an_error(payload: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(payload)


def test_long_events_are_entered_piece_by_piece() -> None:
    blocks = 2 * PIECE + 3
    ids = [i % 7 for i in range(2 * blocks)]
    keys: list[Any] = [["l", "s"], *[["l"]] * (blocks - 1)]
    hashes = list(range(1, blocks + 1))
    (event,), _ = decode(batch(stored(block_hashes=hashes, token_ids=ids, extra_keys=keys, lora_name="l")))
    index, e = KvIndex(), engine("http://e:1")
    rank = index.follow(e)
    parts = list(event.pieces())
    assert len(parts) == 3
    for piece in parts:
        piece(index, rank)
    asked = prompt([*ids, 0], lora="l", salt="s")
    assert index.match(asked, [e]).hit(e).tokens == len(ids)
    assert index.match(prompt([*ids, 0]), [e]).hit(e).tokens == 0
    (event,), _ = decode(batch({"type": "BlockRemoved", "block_hashes": hashes}))
    for piece in event.pieces():
        piece(index, rank)
    assert index.count == 0


class Tallied(KvIndex):
    """Notes how many tokens are entered at once."""

    def __init__(self) -> None:
        super().__init__()
        self.entered: list[int] = []

    def store(self, rank: Any, hashes: Any, parent: Any, tokens: Any, *args: Any, **more: Any) -> None:
        self.entered.append(len(tokens))
        super().store(rank, hashes, parent, tokens, *args, **more)


def entered(payload: bytes) -> tuple[Tallied, Engine, int]:
    """The index after a batch, and how much of this could not be read."""
    index, e, unread = Tallied(), engine("http://e:1"), 0
    rank = index.follow(e, complete=True)
    for work in pieces(payload):
        if work is None:
            unread += 1
        else:
            work(index, rank)
    return index, e, unread


@pytest.mark.parametrize("size", [1, 16, 2000, 65_536])
@pytest.mark.parametrize("first_id", [0, 100, 250, 65_000, 100_000, 2**32 - 100])
def test_what_is_large_is_entered_piece_by_piece_and_as_what_is_small(size: int, first_id: int) -> None:
    """Whatever the width in which MessagePack writes an id."""
    count = max(3, 100_000 // size)
    ids = [first_id + i % 777 for i in range(count * size)]
    keys: list[Any] = [["salt"], *[None] * (count - 1)]
    event = stored(block_hashes=list(range(1, count + 1)), token_ids=ids, block_size=size, extra_keys=keys)
    payload = batch(event, {"type": "BlockRemoved", "block_hashes": [count]})
    assert len(payload) > SMALL
    index, e, unread = entered(payload)
    assert (unread, dict(index.dropped), index.count) == (0, {}, count - 1)
    assert max(index.entered) <= max(PIECE_TOKENS, size)
    asked = prompt([*ids, 1], salt="salt")
    assert index.match(asked, [e]).hit(e).tokens == (count - 1) * size


@pytest.mark.parametrize(
    "wrong",
    [
        {"token_ids": [-1] * 100_000},
        {"token_ids": [1, "2"] * 50_000},
        {"token_ids": "x" * 100_000},
        {"token_ids": [1] * 99_999},
        {"token_ids": None},
        {"block_hashes": [None] * 50_000},
        {"block_hashes": "y" * 100_000},
        {"block_size": 0},
        {"extra_keys": [["k"] * 20] * 50_000},
        {"type": "BlockSplit"},
        {"block_hashes": list(range(MOST_BLOCKS + 1)), "token_ids": [1] * (MOST_BLOCKS + 1), "block_size": 1},
    ],
    ids=lambda wrong: " ".join(wrong),
)
def test_of_what_is_large_too_only_that_is_lost_that_cannot_be_read(wrong: dict[str, Any]) -> None:
    large = {"block_hashes": [7] * 50_000, "token_ids": [1] * 100_000, "extra_keys": None}
    index, e, unread = entered(batch(stored(**{**large, **wrong}), stored(extra_keys=None)))
    assert unread == 1
    assert index.match(prompt([1, 2, 3, 4, 5]), [e]).hit(e).tokens == 4


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"a": "x" * SMALL}),
        msgspec.msgpack.encode(["x" * SMALL, []]),
        msgspec.msgpack.encode([1.0, "x" * SMALL]),
        msgspec.msgpack.encode([1.0, [0] * SMALL]),
        batch(stored(token_ids=[1] * 100_000))[:-9],
        batch(stored(token_ids=[1] * MOST_BYTES)),
        b"[" * 200_000,
    ],
    ids=range(9),
)
def test_what_is_no_batch_or_too_large_is_counted_once(payload: bytes) -> None:
    index, _, unread = entered(payload)
    assert (unread, index.count) == (1, 0)


@given(st.binary(max_size=300), st.integers(0, 3))
def test_no_bytes_do_harm(data: bytes, filled: int) -> None:
    entered(data)
    entered(msgspec.msgpack.encode([1.0, [msgspec.Raw(b"\xc0")] * filled]) + data)
    entered(batch(stored(token_ids=[1] * (SMALL * (filled > 1))))[: -1 - filled] + data)
