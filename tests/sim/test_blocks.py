"""The block pool: nothing is lost, the right block is evicted, events tell a listener the truth."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.sim.blocks import (
    Block,
    BlockPool,
    Cleared,
    HashChain,
    KvSource,
    Removed,
    Stored,
    external,
    foreign_kv,
)

SIZE = 4


def hashes(tokens: list[int], salt: str | None = None, lora: str | None = None) -> list[bytes]:
    return HashChain(SIZE, salt, lora).extend(tokens)


def store(pool: BlockPool, tokens: list[int], salt: str | None = None) -> list[Block]:
    """Blocks of a finished prompt, cached and still held."""
    found = pool.hit(hashes(tokens, salt), len(tokens) + 1)
    pool.hold(found)
    blocks = found + pool.allocate(pool.needed(len(tokens), len(found)))
    full = len(tokens) // SIZE
    pool.cache(blocks, hashes(tokens, salt), len(found), full, tokens, salt=salt, lora=None)
    return blocks


def test_a_hit_leaves_at_least_one_token_to_compute() -> None:
    pool = BlockPool(10, SIZE)
    tokens = list(range(8))
    pool.release(store(pool, tokens))
    assert len(pool.hit(hashes(tokens), 8)) == 1
    assert len(pool.hit(hashes([*tokens, 9]), 9)) == 2


def test_hashes_chain_prefix_salt_and_lora() -> None:
    tokens = list(range(8))
    plain = hashes(tokens)
    assert hashes([99, *tokens[1:]])[1] != plain[1]
    assert hashes(tokens, salt="s")[1] != plain[1]
    assert hashes(tokens, lora="l")[1] != plain[1]
    assert hashes(tokens) == plain


def test_a_salted_prefix_is_found_only_with_its_salt() -> None:
    pool = BlockPool(10, SIZE)
    pool.release(store(pool, list(range(8)), salt="a"))
    assert not pool.hit(hashes(list(range(8)), "b"), 9)
    assert len(pool.hit(hashes(list(range(8)), "a"), 9)) == 2


def test_what_was_freed_longest_ago_is_evicted_first_and_a_prompts_tail_before_its_head() -> None:
    pool = BlockPool(6, SIZE)
    old, new = store(pool, list(range(8))), store(pool, list(range(50, 58)))
    pool.release(old)
    pool.release(new)
    pool.allocate(2)  # one never used, then old's tail
    assert len(pool.hit(hashes(list(range(8))), 9)) == 1
    assert len(pool.hit(hashes(list(range(50, 58))), 9)) == 2


def test_blocks_without_a_hash_are_reused_before_cached_ones() -> None:
    pool = BlockPool(4, SIZE)
    held = store(pool, list(range(6)))  # one full block, one partial
    pool.release(held)
    assert pool.allocate(1)[0] is held[1]


def test_a_shared_block_is_freed_by_its_last_holder() -> None:
    pool = BlockPool(10, SIZE)
    tokens = list(range(5))
    first, second = store(pool, tokens), store(pool, tokens)
    assert first[0] is second[0]
    pool.release(first)
    free = pool.free
    pool.release(second)
    assert pool.free == free + 2 == pool.size - 1


def test_events_tell_what_is_cached() -> None:
    pool = BlockPool(4, SIZE, events=True)
    tokens = list(range(8))
    blocks = store(pool, tokens, salt="s")
    (stored,) = pool.take_events()
    assert isinstance(stored, Stored)
    assert stored.as_event() == {
        "type": "BlockStored",
        "block_hashes": [external(h) for h in hashes(tokens, "s")],
        "parent_block_hash": None,
        "token_ids": tokens,
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [["s"], None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    pool.release(blocks)
    pool.allocate(2)
    (removed,) = pool.take_events()
    assert isinstance(removed, Removed)
    assert removed.as_event()["block_hashes"] == [external(hashes(tokens, "s")[1])]


def test_a_continued_prefix_names_its_parent() -> None:
    pool = BlockPool(10, SIZE, events=True)
    store(pool, list(range(4)))
    store(pool, list(range(8)))
    _, stored = pool.take_events()
    assert isinstance(stored, Stored)
    assert stored.parent == external(hashes(list(range(8)))[0])


def test_the_cache_is_cleared_only_when_nothing_is_held() -> None:
    pool = BlockPool(10, SIZE, events=True)
    blocks = store(pool, list(range(8)))
    pool.take_events()
    assert not pool.clear()
    pool.release(blocks)
    assert pool.clear()
    assert not pool.hit(hashes(list(range(8))), 9)
    assert [type(e) for e in pool.take_events()] == [Cleared]
    assert pool.free == pool.size - 1


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20), st.booleans()), max_size=40))
def test_nothing_is_lost_and_listeners_know_the_cache(work: list[tuple[int, int, bool]]) -> None:
    pool = BlockPool(12, SIZE, events=True)
    held: list[list[Block]] = []
    known: dict[int, int] = {}
    for family, length, release in work:
        tokens = [family * 100 + i for i in range(length)]
        hit = pool.hit(hashes(tokens), length + 1)
        if pool.needed(length, len(hit)) + pool.hit_costs(hit) <= pool.free:
            held.append(store(pool, tokens))
        if release and held:
            pool.release(held.pop(0))
        for event in pool.take_events():
            if isinstance(event, Stored):
                for h in event.hashes:
                    known[h] = known.get(h, 0) + 1
            elif isinstance(event, Removed):
                known[event.hash] -= 1
        used = {block.id for blocks in held for block in blocks}
        assert pool.free == pool.size - 1 - len(used)
        cached = [external(b.hash) for b in pool.blocks if b.hash is not None]
        assert sorted(cached) == sorted(h for h, count in known.items() for _ in range(count))


def test_kv_is_known_by_what_it_was_computed_from() -> None:
    mine, other = list(range(6)), [9, *range(1, 6)]

    def blocks(source: KvSource) -> list[Block]:
        return [Block(1, source=source, filled=4), Block(2, source=source, start=4, filled=2)]

    assert foreign_kv(blocks(KvSource(mine)), mine, 5, SIZE) == b""
    assert foreign_kv(blocks(KvSource([*mine, 7, 7])), mine, 6, SIZE) == b""
    wrong = foreign_kv(blocks(KvSource(other)), mine, 5, SIZE)
    assert wrong
    assert wrong == foreign_kv(blocks(KvSource(list(other))), mine, 5, SIZE)
    assert foreign_kv(blocks(KvSource(mine, taint=b"x")), mine, 5, SIZE)
    assert foreign_kv([Block(1)], mine, 3, SIZE)
