"""How large KV is, and what a decoder's receive buffer holds of it."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.engine.kv_size import KNOWN, UPPER_BOUND, kv_bytes_per_token, token_size
from tandem.engine.pd_buffer import given_bytes, pd_buffer

GIB = 1 << 30

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


LLAMA_70B_CONFIG = {
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
}


@pytest.mark.parametrize(
    ("config", "ranks", "size"),
    [
        # Llama 3.3 70B: 327,680 bytes, 40,960 on each of 8 ranks
        (LLAMA_70B_CONFIG, 1, 327_680),
        (LLAMA_70B_CONFIG, 8, 40_960),
        (LLAMA_70B_CONFIG | {"head_dim": 128}, 16, 40_960),
        ({"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}, 1, 256),
        # DeepSeek V3: a latent vector of 576, whole on each rank
        (
            {
                "num_hidden_layers": 61,
                "num_attention_heads": 128,
                "kv_lora_rank": 512,
                "qk_rope_head_dim": 64,
            },
            8,
            70_272,
        ),
        ({"text_config": {"num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 8}}, 1, 32),
        ({}, 1, None),
        ({"text_config": 3}, 1, None),
        ({"num_hidden_layers": "80"}, 1, None),
    ],
)
def test_kv_bytes_are_those_of_the_models_config(
    config: dict[str, Any], ranks: int, size: int | None
) -> None:
    assert kv_bytes_per_token(config, ranks) == size


def test_config_json_counts_before_the_name() -> None:
    config = {"num_hidden_layers": 2, "num_key_value_heads": 4, "head_dim": 16}
    found = token_size(config, ("llama-3-8b",), tp=2, kv_cache_dtype="fp8")
    assert found.bytes == 2 * 2 * 2 * 16


@pytest.mark.parametrize(
    ("context", "size"), [(4096, 8), (16_384, 8), (65_536, 16), (131_072, 32), (1_000_000, 32)]
)
def test_a_buffer_holds_four_prompts_where_32_gib_do(context: int, size: int) -> None:
    buffer = pd_buffer(LLAMA_70B, longest=context, given=None)
    assert buffer.bytes == size * GIB
    assert buffer.chunks == size * GIB // (40_960 * 256)
    assert f"{buffer.bytes:,} bytes" in buffer.reason


def test_a_buffer_that_is_given_stays() -> None:
    buffer = pd_buffer(LLAMA_70B, longest=16_384, given=17_179_869_184)
    assert (buffer.bytes, buffer.chunks) == (17_179_869_184, 1638)


@pytest.mark.parametrize(("longest", "enough"), [(None, True), (1638 * 256, True), (1638 * 256 + 1, False)])
def test_a_buffer_is_complained_of_where_the_longest_prompt_does_not_fit(
    longest: int | None, enough: bool
) -> None:
    complaint = pd_buffer(LLAMA_70B, longest=longest, given=17_179_869_184).complaint(longest)
    assert (complaint is None) == enough
    assert enough or "holds 1,638 chunks of 256 tokens and the longest prompt takes 1,639" in str(complaint)


def test_a_buffer_that_holds_no_chunk_is_refused() -> None:
    chunk = 256 * LLAMA_70B.bytes
    assert pd_buffer(LLAMA_70B, longest=None, given=chunk).chunks == 1
    with pytest.raises(ValueError, match="do not hold one chunk of 256 tokens"):
        pd_buffer(LLAMA_70B, longest=None, given=chunk - 1)


@pytest.mark.parametrize(("text", "size"), [("8589934592", 8 * GIB), ("007", 7)])
def test_a_size_is_digits(text: str, size: int) -> None:
    assert given_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "0", "000", "-1", "+1", "8Gi", "1e9", "8_000", " 8", "$(A)", "٣", "9" * 19]
)
def test_nothing_else_is_a_size(text: str) -> None:
    with pytest.raises(ValueError, match="must be a number of bytes in digits"):
        given_bytes(text)


def test_a_config_that_does_not_tell_is_passed_over() -> None:
    configs: list[dict[str, Any]] = [{}, {"text_config": 1}, {"num_hidden_layers": "two"}]
    for config in configs:
        assert token_size(config, ("Llama-3.3-70B-Instruct",), tp=8, kv_cache_dtype=None) == LLAMA_70B
