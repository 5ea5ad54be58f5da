"""How large a model's KV cache is, per token: from its config.json, else by its name, else an upper bound."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from tandem.engine.kv_size import kv_bytes_per_token

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
