"""How many tokens an engine on CPU cores computes in one step: what a decoder's streams may wait for."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tandem.api import Role
from tandem.engine.step_size import CORE_FLOPS, TARGET_ITL, decode_note, flops_per_token, step_tokens

SMOLLM2: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}
LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
MIXTRAL = LLAMA_8B | {"num_local_experts": 8, "num_experts_per_tok": 2}


def decoder(config: dict[str, Any], cores: int, *args: str) -> int | None:
    return step_tokens(args, Role.DECODE, config=config, cores=cores)


@pytest.mark.parametrize(
    ("config", "billions"),
    # All weights less those of the first and the last layer: 134.5 - 28.3 million, 8.03 - 1.05 billion.
    [(SMOLLM2, 0.106), (LLAMA_8B, 6.98), (MIXTRAL, 12.6)],
)
def test_a_token_costs_two_operations_for_each_weight_it_meets(
    config: dict[str, Any], billions: float
) -> None:
    assert flops_per_token(config) == pytest.approx(2e9 * billions, rel=0.01)


@pytest.mark.parametrize(("cores", "tokens"), [(1, 48), (2, 112), (8, 464)])
def test_a_decoders_step_takes_less_than_its_streams_may_wait(cores: int, tokens: int) -> None:
    assert decoder(SMOLLM2, cores) == tokens
    flops = flops_per_token(SMOLLM2)
    assert flops is not None
    assert tokens * flops / (cores * CORE_FLOPS) < TARGET_ITL


@pytest.mark.parametrize(
    ("config", "cores", "told"),
    [(SMOLLM2, 1, "48 for decode .* about 0.12 s"), (LLAMA_8B, 1, "32 .* about 5.4 s")],
)
def test_a_note_tells_how_long_streams_may_wait(config: dict[str, Any], cores: int, told: str) -> None:
    note = decode_note(decoder(config, cores), config, cores)
    assert note is not None
    assert re.search(f"^--max-num-batched-tokens {told}", note)
    assert decode_note(256, {}, cores) is None


def test_a_large_model_on_few_cores_has_room_for_its_streams_still() -> None:
    assert decoder(LLAMA_8B, 4) == 32
    assert decoder(LLAMA_8B, 4, "--max-num-seqs", "100") == 100


@pytest.mark.parametrize("missing", ["hidden_size", "num_hidden_layers", "num_attention_heads"])
def test_of_an_unknown_model_a_step_is_two_blocks(missing: str) -> None:
    config = {name: value for name, value in SMOLLM2.items() if name != missing}
    assert decoder(config, 1) == 256
    assert decoder(SMOLLM2 | {missing: "?"}, 1) == 256
