"""How large a model's KV cache is, per token: from its config.json, else by its name, else an upper bound."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from tandem.api import Endpoint

KNOWN = {
    r"llama-?3[-.]?1-405b": (126, 8, 128),
    r"llama-?3([-.][013])?-70b": (80, 8, 128),
    r"llama-?3([-.][01])?-8b": (32, 8, 128),
    r"llama-?3[-.]?2-3b": (28, 8, 128),
    r"llama-?3[-.]?2-1b": (16, 8, 64),
    r"mixtral-8x22b": (56, 8, 128),
    r"mixtral-8x7b": (32, 8, 128),
    r"mistral-7b": (32, 8, 128),
    r"qwen-?2[-.]?5-72b": (80, 8, 128),
    r"qwen-?2[-.]?5-32b": (64, 8, 128),
    r"qwen3-32b": (64, 8, 128),
    r"qwen3-8b": (36, 8, 128),
}
"""What a model's name says of its config.json: (layers, KV heads, size of a head)."""

UPPER_BOUND = 1 << 20
"""Bytes per token, all ranks. Llama 3.1 405B has 516,096 and Llama 2 13B, whose heads share nothing, 819,200.
Too high only means that fewer hand-offs are under way at once; too low would overfill a decoder's buffer,
which then stands still for ever."""

FEWEST_HEADS = 8
"""KV heads of the large models; ranks beyond them hold copies."""

_ELEMENT_BYTES = {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1, "float32": 4, "float": 4}


class TokenSize(NamedTuple):
    """The KV cache of one token on one tensor-parallel rank."""

    bytes: int
    source: str
    """Where the figure comes from, in words."""


def token_size(
    config: Mapping[str, Any] | None, names: tuple[str, ...], *, tp: int, kv_cache_dtype: str | None
) -> TokenSize:
    """By the model's config.json where there is one, else by the first of its names that is known.

    `kv_cache_dtype`: the value of `--kv-cache-dtype`; None and what is not known count as two bytes.
    """
    element = _ELEMENT_BYTES.get(kv_cache_dtype or "auto", 2)
    found = kv_bytes_per_token(config, tp, element_bytes=element) if config is not None else None
    if found is not None:
        return TokenSize(found, "as config.json says")
    for name in names:
        for pattern, (layers, heads, size) in KNOWN.items():
            if re.search(rf"(?<![a-z0-9]){pattern}(?![a-z0-9])", name.lower().replace("_", "-")):
                shape = {"num_hidden_layers": layers, "num_key_value_heads": heads, "head_dim": size}
                known = kv_bytes_per_token(shape, tp, element_bytes=element)
                assert known is not None
                told = f"{layers} layers, {heads} KV heads of {size}, as the name {name} says"
                return TokenSize(known, told)
    bound = UPPER_BOUND * element // 2 // min(tp, FEWEST_HEADS)
    return TokenSize(bound, "an upper bound, as the model is not known: give its config.json")


def kv_bytes_per_token(config: Mapping[str, Any], ranks: int, *, element_bytes: int = 2) -> int | None:
    """Bytes of one token's KV on each of `ranks` tensor-parallel ranks; None where the config does not tell.

    Keys and values of every layer: 2 · layers · KV heads of the rank · head size · bytes of an element. With
    latent attention (MLA) each rank holds the whole latent vector instead. Layers with a sliding window count
    in full, as their blocks are handed over too.
    """
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        return None
    layers, heads = count(text, "num_hidden_layers"), count(text, "num_attention_heads")
    latent, rotary = count(text, "kv_lora_rank"), count(text, "qk_rope_head_dim")
    if layers is not None and latent is not None:
        return layers * (latent + (rotary or 0)) * element_bytes
    hidden = count(text, "hidden_size")
    size = count(text, "head_dim") or (hidden // heads if hidden and heads else None)
    kv_heads = count(text, "num_key_value_heads") or heads
    if layers is None or size is None or kv_heads is None:
        return None
    return 2 * layers * max(1, -(-kv_heads // ranks)) * size * element_bytes


def count(config: Mapping[str, Any], name: str) -> int | None:
    """A positive whole number of a config.json; None where there is none."""
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def model_names(endpoint: Endpoint) -> tuple[str, ...]:
    """What the resource calls the model, the most telling first."""
    source = endpoint.spec.model_source_config
    hub = source.hugging_face_model if isinstance(source.hugging_face_model, Mapping) else {}
    named = (hub.get("modelId"), source.model_location)
    return (*(name for name in named if name), endpoint.spec.model_name)
