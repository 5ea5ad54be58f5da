"""Sizes that the resource leaves open, and what is said of them."""

from __future__ import annotations

import pytest

from tandem.operator import sizes
from tandem.operator.model import KNOWN, UPPER_BOUND, token_size
from tandem.operator.sizes import GIB, MIB

from .endpoints import planned

LLAMA_70B = token_size(None, ("Llama-3.3-70B-Instruct",), tp=8, kv_cache_dtype=None)


def test_llama_70b_has_the_guides_kv_size() -> None:
    """Of 6,035 tokens, 24 chunks, the guide's log says 0.2344 GiB a rank."""
    assert LLAMA_70B.bytes == 40_960
    assert 24 * 256 * LLAMA_70B.bytes / GIB == pytest.approx(0.2344, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("meta-llama/Llama-3.3-70B-Instruct", 80),
        ("llama-3-3-70b", 80),
        ("Meta_Llama_3_1_405B", 126),
        ("llama-3-1-8b", 32),
        ("Llama-3.2-1B", 16),
        ("Qwen/Qwen2.5-72B-Instruct", 80),
        ("mistralai/Mixtral-8x7B-v0.1", 32),
    ],
)
def test_a_model_is_known_by_its_name(name: str, layers: int) -> None:
    size = 64 if name == "Llama-3.2-1B" else 128
    assert token_size(None, (name,), tp=1, kv_cache_dtype=None).bytes == 2 * layers * 8 * size * 2


@pytest.mark.parametrize("name", ["my-model", "codellama-34b", "llama-3-700b", "xllama-3-8b", "qwen3-8bx"])
def test_a_model_that_is_not_known_gets_an_upper_bound(name: str) -> None:
    found = token_size(None, (name,), tp=8, kv_cache_dtype=None)
    assert found.bytes == UPPER_BOUND // 8
    assert "upper bound" in found.source


def test_the_upper_bound_is_one() -> None:
    largest = max(2 * layers * heads * size * 2 for layers, heads, size in KNOWN.values())
    assert largest < UPPER_BOUND


def test_config_json_counts_before_the_name() -> None:
    config = {"num_hidden_layers": 2, "num_key_value_heads": 4, "head_dim": 16}
    found = token_size(config, ("llama-3-8b",), tp=2, kv_cache_dtype="fp8")
    assert found.bytes == 2 * 2 * 2 * 16


@pytest.mark.parametrize(
    ("context", "size"), [(4096, 8), (16_384, 8), (65_536, 16), (131_072, 32), (1_000_000, 32)]
)
def test_a_buffer_holds_four_prompts_where_32_gib_do(context: int, size: int) -> None:
    buffer = sizes.pd_buffer(LLAMA_70B, longest=context, given=None)
    assert buffer.bytes == size * GIB
    assert buffer.chunks == size * GIB // (40_960 * 256)
    assert f"{buffer.bytes:,} bytes" in buffer.reason


def test_a_buffer_that_is_given_stays() -> None:
    buffer = sizes.pd_buffer(LLAMA_70B, longest=16_384, given=17_179_869_184)
    assert (buffer.bytes, buffer.chunks) == (17_179_869_184, 1638)


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
    nixl = planned("dpd-huggingface")
    prefill, decode = nixl.pools
    assert nixl.grace(prefill).linger == 30
    assert nixl.grace(decode).linger == 0


@pytest.mark.parametrize(
    ("size", "text"), [(10 * GIB, "10Gi"), (5120 * MIB, "5Gi"), (3 * MIB, "3Mi"), (7, "7")]
)
def test_bytes_are_written_as_kubernetes_writes_them(size: int, text: str) -> None:
    assert sizes.quantity(size) == text
