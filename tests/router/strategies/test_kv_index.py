"""The index of KV events against a plain model of engines' caches, and what it does with odd events."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.router.engines import Engine
from tandem.router.strategies import KvIndex, KvPrefixes
from tandem.router.strategies.kv_index import GROUPS, SIZES, SIZES_EACH, Rank

from .helpers import engine, fleet, prompt

SIZE = 2
Prefix = tuple[Any, ...]
# Two prompts that part after four tokens, so that events and questions often meet.
IDS = st.builds(
    lambda tail, length: [0, 0, 0, 0, *[tail] * 8][:length], st.integers(0, 1), st.integers(1, 12)
)
SPACES = st.sampled_from(
    [(None, None)] * 4 + [("lora", None), (None, "salt"), ("lora", "salt"), (None, "lora")]
)


def hashed(prefix: Prefix) -> int:
    """An engine's hash of a block: 64 bits, not our own."""
    return hash(("engine", prefix)) & (2**64 - 1)


@dataclass
class Model:
    """What the index should know of one holder: prefix → copies, by tier."""

    tiers: dict[str, Counter[Prefix]] = field(default_factory=lambda: {"GPU": Counter(), "CPU": Counter()})

    def knows(self, prefix: Prefix) -> bool:
        return any(tier[prefix] for tier in self.tiers.values())


def prefixes(space: tuple[str | None, str | None], ids: list[int]) -> list[Prefix]:
    return [(space, *ids[: i + SIZE]) for i in range(0, len(ids) // SIZE * SIZE, SIZE)]


@st.composite
def changes(draw: st.DrawFn) -> tuple[Any, ...]:
    who = draw(st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 1)))  # engine, rank, group
    tier = draw(st.sampled_from(["GPU", "GPU", "CPU"]))
    kind = draw(st.sampled_from(["store"] * 10 + ["remove"] * 3 + ["clear", "lost", "gone"]))
    return kind, who, tier, draw(SPACES), draw(IDS), draw(st.integers(0, 2)), draw(st.integers(1, 6))


@settings(max_examples=300, deadline=None)
@given(st.lists(changes(), max_size=25), st.lists(st.tuples(SPACES, IDS), min_size=5, max_size=10))
def test_hits_are_those_of_a_plain_model(history: list[tuple[Any, ...]], asked: list[Any]) -> None:
    engines = fleet(2)
    index = KvIndex()
    models: dict[tuple[int, int], dict[int, Model]] = {}
    ranks: dict[tuple[int, int], Rank] = {}
    for kind, (e, r, g), tier, space, ids, first, count in history:
        if (e, r) not in ranks:
            ranks[e, r], models[e, r] = index.follow(engines[e], r), {}
        rank, known = ranks[e, r], models[e, r]
        blocks = prefixes(space, ids)
        chosen = blocks[first : first + count]
        if kind == "store" and chosen:
            lora, salt = space
            extra: list[Any] = [
                [x for x in (lora, salt if i == 0 else None) if x] for i in range(len(blocks))
            ]
            index.store(
                rank,
                [hashed(p) for p in chosen],
                hashed(blocks[first - 1]) if first else None,
                ids[first * SIZE : (first + len(chosen)) * SIZE],
                SIZE,
                group=g,
                medium=tier,
                lora=lora,
                extra_keys=[keys or None for keys in extra[first : first + count]],
            )
            model = known.setdefault(g, Model())
            if not first or model.knows(blocks[first - 1]):
                model.tiers[tier].update(chosen)
        elif kind == "remove":
            index.remove(rank, [hashed(p) for p in chosen], group=g, medium=tier)
            if g in known:
                known[g].tiers[tier] -= Counter(chosen)
        elif kind == "clear":
            index.clear(rank)
            known.clear()
        elif kind == "lost":
            index.follow(engines[e], r)
            known.clear()
        elif kind == "gone":
            index.forget(engines[e])
            for which in [w for w in ranks if w[0] == e]:
                del ranks[which], models[which]
        blocks_kept = sum(
            len(+t) for m in models.values() for each in m.values() for t in each.tiers.values()
        )
        assert index.count >= blocks_kept
        while index.tidy(3):
            pass
        assert index.count == blocks_kept
    for space, ids in asked:
        match = index.match(prompt(ids, lora=space[0], salt=space[1]), engines)
        usable = prefixes(space, ids)[: (len(ids) - 1) // SIZE]
        for e, each in enumerate(engines):
            hits = {r: hit(usable, models[e, r]) for r in (0, 1) if (e, r) in models}
            best = max((tokens for tokens, _ in hits.values()), default=0)
            got = match.hit(each)
            assert got.tokens == best
            if best:
                assert got.rank is not None
                assert hits[got.rank] == (got.tokens, got.host)


def hit(usable: list[Prefix], groups: dict[int, Model]) -> tuple[int, int]:
    """Tokens in any tier, and those of them that are not on the device."""
    if not groups:
        return 0, 0
    depths = []
    for tiers in (("GPU", "CPU"), ("GPU",)):
        depth = 0
        while depth < len(usable) and all(
            any(m.tiers[t][usable[depth]] for t in tiers) for m in groups.values()
        ):
            depth += 1
        depths.append(depth * SIZE)
    return depths[0], depths[0] - depths[1]


def followed(**more: Any) -> tuple[KvIndex, Rank, Engine]:
    index, e = KvIndex(**more), engine("http://e:1")
    return index, index.follow(e, complete=True), e


def tokens(index: KvIndex, e: Engine, ids: list[int], **space: Any) -> int:
    return index.match(prompt(ids, **space), [e]).hit(e).tokens


def test_blocks_whose_parent_is_unknown_are_dropped_and_counted() -> None:
    index, rank, e = followed()
    index.store(rank, [8, 9], 7, [5, 6, 7, 8], 2)
    assert index.dropped == {"orphan": 2}
    assert (rank.blocks, rank.orphans, rank.coverage) == (0, 2, 0.0)
    index.store(rank, [1, 2], None, [1, 2, 3, 4], 2)
    assert rank.coverage == 0.5
    index.remove(rank, [8, 9])
    assert rank.coverage == 1.0
    assert tokens(index, e, [1, 2, 3, 4, 5]) == 4


def test_a_block_held_twice_is_held_until_both_copies_are_gone() -> None:
    """An engine that computes the last block of a repeated prompt again holds it twice."""
    index, rank, e = followed()
    index.store(rank, [1], None, [1, 2], 2)
    index.store(rank, [1], None, [1, 2], 2)
    index.remove(rank, [1])
    assert tokens(index, e, [1, 2, 3]) == 2
    index.remove(rank, [1])
    assert tokens(index, e, [1, 2, 3]) == 0
    assert (index.count, len(index)) == (0, 0)


def test_multimodal_blocks_match_no_plain_prompt() -> None:
    index, rank, e = followed()
    index.store(rank, [1, 2, 3], None, [1, 2, 3, 4, 5, 6], 2, extra_keys=[None, [["image", 0]], None])
    assert tokens(index, e, [1, 2, 3, 4, 5, 6, 7]) == 2
    index.store(rank, [4], None, [8, 8], 2, extra_keys=[[b"digest"]])
    assert tokens(index, e, [8, 8, 8]) == 0


def test_a_group_with_larger_blocks_rounds_hits_down() -> None:
    index, rank, e = followed()
    index.store(rank, [1, 2, 3], None, [1, 2, 3, 4, 5, 6], 2, group=0)
    assert tokens(index, e, [1, 2, 3, 4, 5, 6, 7]) == 6
    index.store(rank, [9], None, [1, 2, 3, 4], 4, group=1)
    assert tokens(index, e, [1, 2, 3, 4, 5, 6, 7]) == 4


def test_only_what_all_groups_hold_counts() -> None:
    index, rank, e = followed()
    for group, held in ((0, 3), (1, 2)):
        index.store(rank, [1, 2, 3][:held], None, [1, 2, 3, 4, 5, 6][: 2 * held], 2, group=group)
    assert tokens(index, e, [1, 2, 3, 4, 5, 6, 7]) == 4
    index.remove(rank, [1], group=0)
    assert tokens(index, e, [1, 2, 3, 4, 5, 6, 7]) == 0


def test_a_chain_is_carried_on_from_the_host() -> None:
    """The parent has been evicted from the device; the host still has it."""
    index, rank, e = followed()
    index.store(rank, [1], None, [1, 2], 2, medium="CPU")
    index.store(rank, [2], 1, [3, 4], 2)
    hit = index.match(prompt([1, 2, 3, 4, 5]), [e]).hit(e)
    assert (hit.tokens, hit.host) == (4, 4)


def test_what_was_forgotten_is_cleared_away_as_events_come() -> None:
    index, rank, _ = followed()
    index.store(rank, list(range(3000)), None, [1] * 6000, 2)
    index.clear(rank)
    for i in range(10):
        index.store(rank, [i], None, [i, i], 2)
    assert (index.count, len(index)) == (10, 10)


def test_hashes_may_come_in_full() -> None:
    index, rank, e = followed()
    long = [bytes([i]) * 32 for i in range(3)]
    index.store(rank, long[:1], None, [1, 2], 2)
    index.store(rank, long[1:], long[0], [3, 4, 5, 6], 2)
    assert tokens(index, e, [1, 2, 3, 4, 5, 6, 7]) == 6
    index.remove(rank, long[1:2])
    assert tokens(index, e, [1, 2, 3, 4, 5, 6, 7]) == 2


def test_a_block_that_moves_to_the_host_needs_no_tokens() -> None:
    index, rank, e = followed()
    index.store(rank, [1, 2], None, [1, 2, 3, 4], 2)
    index.store(rank, [1, 2, 77], None, [], 0 + 2, medium="CPU")
    assert index.dropped == {"unknown": 1}
    index.remove(rank, [2], medium="GPU")
    hit = index.match(prompt([1, 2, 3, 4, 5]), [e]).hit(e)
    assert (hit.tokens, hit.host) == (4, 2)


def test_events_that_do_not_fit_are_dropped_and_counted() -> None:
    index, rank, e = followed()
    index.store(rank, [1, 2], None, [1, 2, 3], 2)
    index.store(rank, [1], None, [1, 2], 2)
    index.store(rank, [2], 1, [3, 4, 5, 6], 4)
    assert index.dropped == {"unaligned": 3}
    assert tokens(index, e, [1, 2, 3]) == 2


def test_the_index_is_bounded() -> None:
    index, rank, e = followed(most=3)
    index.store(rank, [1, 2], None, [1, 2, 3, 4], 2)
    index.store(rank, [3, 4], 2, [5, 6, 7, 8], 2)
    assert index.dropped == {"full": 2}
    index.remove(rank, [2])
    index.store(rank, [2], 1, [3, 4], 2)
    assert (index.count, tokens(index, e, [1, 2, 3, 4, 5])) == (2, 4)


def test_forgetting_takes_no_time_and_is_done_little_by_little() -> None:
    index, rank, e = followed()
    index.store(rank, list(range(10_000)), None, [1] * 20_000, 2)
    index.clear(rank)
    assert tokens(index, e, [1, 1, 1]) == 0
    assert index.count == 10_000
    while index.tidy(100):
        pass
    assert (index.count, len(index)) == (0, 0)
    index.store(rank, [5], None, [1, 1], 2)
    assert tokens(index, e, [1, 1, 1]) == 2


def test_of_many_holders_some_of_the_best_are_named() -> None:
    index, engines = KvIndex(), fleet(40)
    for i, each in enumerate(engines):
        rank = index.follow(each)
        if i % 2:
            index.store(rank, [1], None, [1, 2], 2)
        if i % 10 == 9:
            index.store(rank, [2], 1, [3, 4], 2)
    best = {e.url for e in engines[9::10]}
    for start in range(0, 80, 7):
        leaders = index.match(prompt([1, 2, 3, 4, 5]), engines, start).leaders(6)
        assert best <= {e.url for e in leaders}
        assert len(leaders) >= 6
        assert all(index.match(prompt([1, 2, 3]), engines).hit(e).tokens for e in leaders)
    assert index.match(prompt([1, 2, 3, 4, 5]), engines[:9]).hit(engines[9]).tokens == 0


def stored_of(index: KvIndex, rank: Rank, size: int, group: int = 0) -> None:
    """A block of a size, in a group."""
    index.store(rank, [size * 1000 + group], None, list(range(size)), size, group=group)


def test_of_one_engine_only_a_few_block_sizes_are_followed() -> None:
    """A prompt's hashes are worked out for each size: one publisher must not make every request slow."""
    index, (odd, good) = KvIndex(), fleet(2)
    rank = index.follow(odd, complete=True)
    for size in range(1, 100):
        stored_of(index, rank, size, group=size)
    other = index.follow(good, complete=True)
    stored_of(index, other, 256)
    asked = prompt(range(300))
    assert index.match(asked, [odd, good]).hit(good).tokens == 256
    assert len(asked._chains) == SIZES_EACH + 1
    assert index.dropped == {"not_followed": 99 - SIZES_EACH}
    assert KvPrefixes(index).doubt(odd) == "block_sizes"
    assert index.match(asked, [odd]).hit(odd).tokens == 0, "what its other groups hold is not known"
    index.clear(rank)
    assert KvPrefixes(index).doubt(odd) is None


def test_of_all_engines_together_too_and_what_one_gives_up_another_may_have() -> None:
    index, engines = KvIndex(), fleet(20)
    for i, each in enumerate(engines):
        stored_of(index, index.follow(each, complete=True), i + 1)
    asked = prompt(range(300))
    index.match(asked, engines)
    assert len(asked._chains) == SIZES
    followed = [e for e in engines if KvPrefixes(index).doubt(e) is None]
    assert len(followed) == SIZES
    index.forget(followed[0])
    late = index.follow(engines[-1], complete=True)
    stored_of(index, late, 20)
    assert KvPrefixes(index).doubt(engines[-1]) is None


def test_groups_of_a_rank_are_bounded() -> None:
    index, (one,) = KvIndex(), fleet(1)
    rank = index.follow(one, complete=True)
    for group in range(1000):
        stored_of(index, rank, 16, group)
    assert len(rank.groups) == GROUPS
    assert index.dropped == {"not_followed": 1000 - GROUPS}
    assert KvPrefixes(index).doubt(one) == "block_sizes"
