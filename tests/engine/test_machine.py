"""Cores and GPUs shared out among the engines of a machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine import Core, EngineError, Machine, share_cores, share_gpus

GIB = 1 << 30


def machine(*nodes: int, smt: int = 1, gpus: int = 0) -> Machine:
    """A machine with this many physical cores in each NUMA node; sibling CPUs are numbered as Linux does."""
    node_of_core = [node for node, cores in enumerate(nodes) for _ in range(cores)]
    total = len(node_of_core)
    return Machine(
        cores=tuple(
            Core(tuple(core + total * sibling for sibling in range(smt)), node)
            for core, node in enumerate(node_of_core)
        ),
        gpus=tuple(map(str, range(gpus))),
        memory_bytes=16 * GIB,
        accelerator="cuda" if gpus else "cpu",
        python="/opt/venv/bin/python",
    )


def test_each_engine_gets_the_same_number_of_neighbouring_cores_and_the_router_the_rest() -> None:
    shares = share_cores(machine(8), 3)
    assert [[core.cpus[0] for core in share] for share in shares.engines] == [[0, 1], [2, 3], [4, 5]]
    assert [core.cpus[0] for core in shares.rest] == [6, 7]
    assert shares.note is None


def test_hyperthreads_of_a_core_stay_together() -> None:
    shares = share_cores(machine(2, smt=2), 2)
    assert [share[0].cpus for share in shares.engines] == [(0, 2), (1, 3)]


@pytest.mark.parametrize(
    ("nodes", "engines", "node_of_engine"),
    [
        ((4, 4), 2, [{0}, {1}]),
        ((5, 5), 4, [{0}, {0}, {1}, {1}]),
        ((3, 5), 4, [{0}, {1}, {1}, {0, 1}]),  # shares of two fit four times only across the border
    ],
)
def test_an_engine_stays_in_one_numa_node_where_all_fit_that_way(
    nodes: tuple[int, ...], engines: int, node_of_engine: list[set[int]]
) -> None:
    shares = share_cores(machine(*nodes), engines)
    found = [{core.node for core in share} for share in shares.engines]
    assert sorted(found, key=sorted) == sorted(node_of_engine, key=sorted)


def test_fewer_cores_than_engines_are_shared_in_turn_and_a_note_says_so() -> None:
    shares = share_cores(machine(2), 3)
    assert [share[0].cpus for share in shares.engines] == [(0,), (1,), (0,)]
    assert shares.rest == ()
    assert shares.note is not None
    assert "3 engines share 2 cores" in shares.note


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 6))
def test_no_core_is_given_twice_and_none_is_lost(nodes: list[int], engines: int) -> None:
    box = machine(*nodes)
    shares = share_cores(box, engines)
    if len(box.cores) >= engines:
        given_out = [core for share in shares.engines for core in share]
        assert sorted([*given_out, *shares.rest]) == sorted(box.cores)
        assert {len(share) for share in shares.engines} == {len(box.cores) // engines}


def test_gpus_are_given_out_in_order() -> None:
    assert share_gpus(machine(8, gpus=4), [("prefill-0", 2), ("decode-0", 1)]) == (("0", "1"), ("2",))


def test_too_few_gpus_is_an_error_that_says_what_is_needed_and_what_is_there() -> None:
    with pytest.raises(EngineError) as error:
        share_gpus(machine(8, gpus=1), [("prefill-0", 8), ("decode-0", 8)])
    assert "needs 16 GPUs (prefill-0 8, decode-0 8" in str(error.value)
    assert "this machine has 1." in str(error.value)
    assert "--tensor-parallel-size" in str(error.value)
