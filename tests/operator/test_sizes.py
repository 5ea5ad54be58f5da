"""Sizes that the resource leaves open, and what is said of them."""

from __future__ import annotations

import pytest

from tandem.operator import sizes
from tandem.operator.sizes import GIB, MIB

from .endpoints import planned


@pytest.mark.parametrize(
    ("instance", "gpus", "interfaces"),
    [
        ("ml.p5.48xlarge", 8, 32),
        ("ml.p5.48xlarge", 4, 16),
        ("ml.p5.48xlarge", 1, 4),
        ("ml.p5en.48xlarge", 8, 16),
        ("ml.p6-b200.48xlarge", 8, 8),
        ("ml.p6-b200.48xlarge", 1, 1),
        ("ml.p6-b300.48xlarge", 8, 16),
    ],
)
def test_a_pod_gets_its_part_of_the_nodes_interfaces(instance: str, gpus: int, interfaces: int) -> None:
    efa = sizes.efa([instance], gpus)
    assert efa is not None
    assert efa.interfaces == interfaces
    assert efa.hugepages % (2 * MIB) == 0
    assert efa.hugepages == 5120 * MIB * gpus // 8


@pytest.mark.parametrize(
    "types", [[], ["ml.g5.24xlarge"], ["ml.p5.48xlarge", "ml.p5en.48xlarge"], ["ml.p5.48xlarge", "ml.x"]]
)
def test_without_a_known_type_there_are_no_interfaces(types: list[str]) -> None:
    assert sizes.efa(types, 8) is None


def test_shared_memory_grows_with_the_ranks() -> None:
    assert sizes.shared_memory(1)[0] == 3 * GIB
    assert sizes.shared_memory(8)[0] == 10 * GIB


def test_a_pod_may_stay_as_long_as_its_longest_stream() -> None:
    times = sizes.times(16_384)
    grace = sizes.grace(times, 30, "until KV is fetched")
    assert grace.total > grace.leave + times.longest_stream + 30
    assert times.longest_stream >= times.longest_prefill
    assert times.longest_silence > times.longest_prefill
    assert "30 s until KV is fetched" in grace.reason


def test_grace_has_an_end() -> None:
    assert sizes.times(10_000_000).longest_stream == sizes.LONGEST_GRACE


def test_prefillers_stay_until_their_kv_is_fetched_or_its_lease_ends() -> None:
    nixl = planned("dpd-nixl")
    prefill, decode = nixl.pools
    assert nixl.grace(prefill).linger == 30
    assert nixl.grace(decode).linger == 0


@pytest.mark.parametrize(
    ("size", "text"), [(10 * GIB, "10Gi"), (5120 * MIB, "5Gi"), (3 * MIB, "3Mi"), (7, "7")]
)
def test_bytes_are_written_as_kubernetes_writes_them(size: int, text: str) -> None:
    assert sizes.quantity(size) == text
