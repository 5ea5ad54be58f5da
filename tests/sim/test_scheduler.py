"""What a step computes: order, budget, chunks, preemption, hits, loading."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.sim.blocks import Block, BlockPool, KvSource
from tandem.sim.request import Output, Sampling, SimRequest
from tandem.sim.scheduler import Limits, Scheduler, Step

SIZE = 4


def ignore(request: SimRequest, output: Output) -> None:
    pass


def request(name: str, tokens: int, *, first: int = 0, arrival: float = 0.0, **more: Any) -> SimRequest:
    prompt = list(range(first, first + tokens))
    return SimRequest(name, prompt, Sampling(100), ignore, arrival, **more)


def limits(batched: int = 16, seqs: int = 8, **more: Any) -> Limits:
    return Limits(max_num_batched_tokens=batched, max_num_seqs=seqs, max_model_len=1000, **more)


def scheduler(
    *, blocks: int = 100, caching: bool = True, with_limits: Limits | None = None, **more: Any
) -> Scheduler:
    return Scheduler(with_limits or limits(), BlockPool(blocks, SIZE, caching=caching), **more)


def run(s: Scheduler) -> Step:
    """One step, after which whoever is due has another token."""
    step = s.schedule()
    for due in s.computed(step):
        due.tokens.append(1000 + len(due.tokens))
    return step


def work(step: Step) -> dict[str, int]:
    return {r.id: tokens for r, tokens in step.work}


def test_a_long_prompt_is_computed_in_chunks_beside_running_streams() -> None:
    s = scheduler()
    s.add(request("short", 3, first=500))
    assert work(run(s)) == {"short": 3}
    s.add(request("long", 40))
    assert work(run(s)) == {"short": 1, "long": 15}
    assert work(run(s)) == {"short": 1, "long": 15}
    assert work(run(s)) == {"short": 1, "long": 10}
    assert work(run(s)) == {"short": 1, "long": 1}


def test_chunks_and_streams_are_told_apart_for_the_cost() -> None:
    s = scheduler()
    s.add(request("short", 3, first=500))
    run(s)
    s.add(request("long", 40))
    step = s.schedule()
    assert (step.chunks(), step.contexts()) == ([(15, 0)], [3])


def test_requests_wait_for_a_place_in_the_order_they_came() -> None:
    s = scheduler(with_limits=limits(seqs=2))
    for i in range(4):
        s.add(request(f"r{i}", 3, first=10 * i))
    assert work(run(s)) == {"r0": 3, "r1": 3}
    s.remove(s.running[0])
    assert work(run(s)) == {"r1": 1, "r2": 3}


def test_by_priority_the_lowest_number_goes_first() -> None:
    s = scheduler(with_limits=limits(seqs=1, priority=True))
    s.add(request("low", 3, priority=5, arrival=0.0))
    s.add(request("high", 3, first=10, priority=1, arrival=1.0))
    assert work(run(s)) == {"high": 3}


def test_without_chunked_prefill_a_prompt_waits_until_it_fits_whole() -> None:
    s = scheduler(with_limits=limits(chunked_prefill=False))
    s.add(request("a", 10))
    s.add(request("b", 10, first=50))
    assert work(run(s)) == {"a": 10}
    assert work(run(s)) == {"a": 1, "b": 10}


def test_one_long_prompt_leaves_budget_to_others_when_told_to() -> None:
    s = scheduler(with_limits=limits(long_prefill_token_threshold=6))
    s.add(request("long", 40))
    s.add(request("short", 5, first=100))
    assert work(run(s)) == {"long": 6, "short": 5}


def test_a_cached_prefix_is_not_computed_again() -> None:
    s = scheduler()
    s.add(request("a", 10))
    run(s)
    b = request("b", 10)
    s.add(b)
    assert work(run(s)) == {"a": 1, "b": 2}
    assert b.local_hit == 8
    assert (s.counters.queries, s.counters.hits) == (20, 8)


def test_when_blocks_run_out_the_last_admitted_starts_over() -> None:
    s = scheduler(blocks=6, caching=False)  # five of four tokens
    a, b = request("a", 8), request("b", 8, first=100)
    s.add(a)
    s.add(b)
    assert work(run(s)) == {"a": 8, "b": 8}
    step = run(s)  # a takes the last block; b needs one, too
    assert [r.id for r in step.preempted] == ["b"]
    assert work(step) == {"a": 1}
    assert (b.preemptions, b.computed, b.blocks) == (1, 0, [])
    s.remove(a)
    s.pool.release(a.blocks)
    assert work(run(s)) == {"b": 9}, "what it had generated is computed again with its prompt"


def test_a_prompt_that_does_not_fit_waits_and_holds_nothing() -> None:
    s = scheduler(blocks=6)
    a, b = request("a", 12), request("b", 22)  # b begins as a does
    s.add(a)
    run(s)
    s.add(b)
    free = s.pool.free
    assert work(run(s)) == {"a": 1}
    assert (b.blocks, s.pool.free) == ([], free - 1)


def test_kv_from_another_engine_is_awaited_without_computing_and_only_the_last_token_is_left() -> None:
    loads: list[Sequence[Block]] = []
    s = scheduler(
        matched=lambda r, local: r.prompt_length - local, load=lambda r, b: loads.append(b), connector=True
    )
    r = request("r", 10)
    s.add(r)
    assert s.schedule().work == []
    assert [len(blocks) for blocks in loads] == [3]
    assert s.pool.free == s.pool.size - 1 - 3
    for i, block in enumerate(loads[0]):
        block.source, block.start, block.filled = KvSource(list(r.prompt)), 4 * i, min(4, 10 - 4 * i)
    s.loaded(r, ok=True)
    step = run(s)
    assert work(step) == {"r": 1}
    assert (r.external, r.kv.taint) == (10, b"")
    assert (s.counters.external_queries, s.counters.external_hits) == (10, 10)


def test_foreign_kv_is_noticed_and_spoils_what_is_computed_on_it() -> None:
    loads: list[Sequence[Block]] = []
    s = scheduler(matched=lambda r, local: r.prompt_length - local, load=lambda r, b: loads.append(b))
    r = request("r", 10)
    s.add(r)
    s.schedule()
    for i, block in enumerate(loads[0]):
        block.source, block.start, block.filled = KvSource([7] * 10), 4 * i, 4
    s.loaded(r, ok=True)
    run(s)
    assert r.kv.taint
    s.remove(r)
    s.pool.release(r.blocks)
    again = request("again", 10)
    s._matched = lambda request, local: 0
    s.add(again)
    run(s)
    assert again.local_hit == 8
    assert again.kv.taint, "the cache holds another prompt's KV under this prompt's name"


def test_a_failed_load_is_computed_here() -> None:
    s = scheduler(matched=lambda r, local: r.prompt_length - local)
    r = request("r", 10)
    s.add(r)
    s.schedule()
    s.loaded(r, ok=False)
    r.kv_unseen = False
    assert work(run(s)) == {"r": 10}


def test_a_load_does_not_take_the_blocks_that_running_prompts_still_need() -> None:
    s = scheduler(
        blocks=10,
        with_limits=limits(batched=8, reserve_full_isl=False),
        matched=lambda r, local: r.prompt_length if r.id == "remote" else 0,
    )
    s.add(request("long", 32))
    run(s)
    s.add(request("remote", 16, first=100))
    run(s)
    assert not s.loading


def test_while_it_must_wait_a_load_keeps_its_place() -> None:
    s = scheduler(matched=lambda r, local: None if r.id == "a" else 0)
    s.add(request("a", 5))
    s.add(request("b", 5, first=50))
    assert s.schedule().work == []
    assert [r.id for r in s.waiting] == ["a", "b"]


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(
        st.tuples(st.integers(1, 30), st.integers(0, 2), st.integers(1, 12)), min_size=1, max_size=12
    ),
    blocks=st.integers(12, 30),
    batched=st.integers(4, 40),
    caching=st.booleans(),
)
def test_every_request_ends_and_nothing_stays_held(
    prompts: list[tuple[int, int, int]], blocks: int, batched: int, caching: bool
) -> None:
    s = scheduler(blocks=blocks, caching=caching, with_limits=limits(batched=batched, seqs=4))
    left = {}
    for i, (tokens, family, answer) in enumerate(prompts):
        r = request(f"r{i}", tokens, first=100 * family)
        left[r.id] = answer
        s.add(r)
    for _ in range(2000):
        step = s.schedule()
        assert step.tokens <= batched
        assert len(s.running) <= 4
        for r in s.computed(step):
            r.tokens.append(0)
            if r.generated >= left[r.id]:
                s.remove(r)
                s.pool.release(r.blocks)
        if s.idle:
            break
    assert s.idle
    assert s.pool.free == s.pool.size - 1
