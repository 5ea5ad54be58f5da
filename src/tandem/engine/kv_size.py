"""How large a model's KV cache is, from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def kv_bytes_per_token(config: Mapping[str, Any], ranks: int, *, element_bytes: int = 2) -> int | None:
    """Bytes of one token's KV on each of `ranks` tensor-parallel ranks; None where the config does not tell.

    Keys and values of every layer: 2 · layers · KV heads of the rank · head size · bytes of an element. With
    latent attention (MLA) each rank holds the whole latent vector instead. Layers with a sliding window count
    in full, as their blocks are handed over too.
    """
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        return None
    layers, heads = _count(text, "num_hidden_layers"), _count(text, "num_attention_heads")
    latent, rotary = _count(text, "kv_lora_rank"), _count(text, "qk_rope_head_dim")
    if layers is not None and latent is not None:
        return layers * (latent + (rotary or 0)) * element_bytes
    hidden = _count(text, "hidden_size")
    size = _count(text, "head_dim") or (hidden // heads if hidden and heads else None)
    kv_heads = _count(text, "num_key_value_heads") or heads
    if layers is None or size is None or kv_heads is None:
        return None
    return 2 * layers * max(1, -(-kv_heads // ranks)) * size * element_bytes


def _count(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
