"""Decoding of batches, as vLLM's own classes encode them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tandem.router.strategies import KvIndex
from tandem.router.strategies.kv_wire import PIECE, AllBlocksCleared, BlockRemoved, BlockStored, decode

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
    pieces = list(event.pieces())
    assert len(pieces) == 3
    for piece in pieces:
        piece(index, rank)
    asked = prompt([*ids, 0], lora="l", salt="s")
    assert index.match(asked, [e]).hit(e).tokens == len(ids)
    assert index.match(prompt([*ids, 0]), [e]).hit(e).tokens == 0
    (event,), _ = decode(batch({"type": "BlockRemoved", "block_hashes": hashes}))
    for piece in event.pieces():
        piece(index, rank)
    assert index.count == 0
