"""How many tokens an engine on CPU cores computes in one step, by role (`--max-num-batched-tokens`).

A prefiller takes a whole prompt in one step. A decoder prefills short prompts itself, between two tokens of
the streams that run, and each of them waits for the whole step: how long they may wait bounds its steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tandem.api import Role
from tandem.engine.args import switch
from tandem.engine.kv_size import count
from tandem.engine.roles import int_flag

MAX_PREFILL_STEP = 32_768
"""Tokens; above it a prompt is prefilled in several steps, because activations grow with the step."""

TARGET_ITL = 0.15
"""Seconds that a decoder's streams may wait for a token while it prefills a short prompt."""

DECODE_SHARE = 0.25
"""Of TARGET_ITL, what the streams' own tokens and the reading of the weights take."""

CORE_FLOPS = 1.1e11
"""Floating-point operations a second of one core in prefill: SmolLM2-135M in bfloat16 at 520 tokens/s, on a
core with AVX-512. Where a core is slower, streams wait longer by as much."""

FEWEST_SEQUENCES = 32
"""A step has room for a token of each of so many streams at least, whatever the target."""

_UNKNOWN_MODEL = 256
"""Tokens of a decoder's step where the model's size is not known."""


def step_tokens(args: Iterable[str], role: Role, *, config: Mapping[str, Any], cores: int) -> int | None:
    """`--max-num-batched-tokens` for a role with merged `args`; None leaves it to vLLM.

    `config`: of the model (`model_config`); `cores`: physical ones of the engine. vLLM asks for at least
    `--max-num-seqs`, and for the whole context where chunked prefill is off.
    """
    args = list(args)
    context = int_flag(args, "--max-model-len") or count(config, "max_position_embeddings")
    sequences = int_flag(args, "--max-num-seqs") or 0
    if switch(args, "--enable-chunked-prefill") is False:
        return None if context is None else max(context, sequences)
    if role is Role.DECODE:
        return max(_decode_tokens(config, cores), sequences)
    return None if context is None else max(min(context, MAX_PREFILL_STEP), sequences)


def _decode_tokens(config: Mapping[str, Any], cores: int) -> int:
    """What `cores` prefill in TARGET_ITL beside a step's decoding, in whole sixteens."""
    flops = flops_per_token(config)
    if flops is None:
        return _UNKNOWN_MODEL
    tokens = TARGET_ITL * (1 - DECODE_SHARE) * cores * CORE_FLOPS / flops
    return max(FEWEST_SEQUENCES, int(tokens) // 16 * 16)


def decode_note(step: int | None, config: Mapping[str, Any], cores: int) -> str | None:
    """What a person should know of a decoder's step, if it follows from the model and the cores."""
    flops = flops_per_token(config)
    if step is None or flops is None:
        return None
    seconds = step * flops / (cores * CORE_FLOPS) / (1 - DECODE_SHARE)
    return (
        f"--max-num-batched-tokens {step} for decode engines: so many tokens of short prompts keep their "
        f"streams waiting for about {seconds:.2g} s; spec.pdSpec.decodingSpec.args can set another"
    )


def flops_per_token(config: Mapping[str, Any]) -> float | None:
    """Floating-point operations for one token of a prompt; None where a config.json does not tell.

    Two for each weight that a token meets. Attention has 2 · hidden · heads · head size of them for queries
    and output, and as many for keys and values with their own heads; the feed-forward part 3 · hidden · its
    size, times the experts of a token. Left out: what attention does beside them, little for short prompts,
    and the last layer, which one token of a prompt meets.
    """
    layers, hidden = count(config, "num_hidden_layers"), count(config, "hidden_size")
    heads, inner = count(config, "num_attention_heads"), count(config, "intermediate_size")
    if layers is None or hidden is None or heads is None or inner is None:
        return None
    size = count(config, "head_dim") or hidden // heads
    kv_heads = count(config, "num_key_value_heads") or heads
    experts = count(config, "num_experts_per_tok") or 1
    inner = count(config, "moe_intermediate_size") or inner
    attention = 2 * hidden * size * (heads + kv_heads)
    return 2.0 * layers * (attention + 3 * hidden * inner * experts)
