"""The memory that engines take: what LMCache keeps beside vLLM's cache is part of it."""

from __future__ import annotations

import pytest

from tandem.local.memory import Need, l1_bytes, memory_problem

GIB = 1 << 30


@pytest.mark.parametrize(
    ("size", "read"), [("0.5", GIB // 2), ("2", 2 * GIB), ("nan", 0), ("1e999", 0), ("much", 0), ("-1", 0)]
)
def test_l1_takes_what_its_variable_says(size: str, read: int) -> None:
    given = {"LMCACHE_LOCAL_CPU": "true", "LMCACHE_MAX_LOCAL_CPU_SIZE": size}
    assert l1_bytes(given) == read
    assert l1_bytes(given | {"LMCACHE_LOCAL_CPU": "false"}) == 0


def test_where_memory_is_too_small_l1_is_named_with_the_rest() -> None:
    needed = [Need("prefill", GIB, 2 * GIB, 3 * GIB), Need("decode", GIB, 2 * GIB)]
    assert memory_problem(needed, sum(each.bytes for each in needed)) is None
    problem = memory_problem(needed, 10 * GIB)
    assert problem is not None
    assert "prefill 7.0 GiB (weights 1.0 GiB, KV cache 2.0 GiB, L1 3.0 GiB, its process 1.0 GiB)" in str(
        problem
    )
    assert "decode 4.0 GiB (weights 1.0 GiB, KV cache 2.0 GiB, its process 1.0 GiB)" in str(problem)
