"""How long an engine's step takes, and how long KV takes from one engine to another.

One step computes a mix: chunks of prompts and one token of each running stream. They share the step, so a
long chunk delays every stream in it: the interference that disaggregation removes.

    seconds = step + Σ chunks (prefill_token·n + prefill_attention·n·(context + n/2))
                   + Σ streams (decode_sequence + decode_context·context)

n is a chunk's tokens, context the tokens before it. The quadratic term is attention: token i of a chunk looks
at context + i tokens. The formula is linear in its five coefficients, which is how `tandem calibrate` finds
them: by least squares. Before a request's first step lie `request` seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec


class ProfileError(ValueError):
    """A cost profile cannot be used; the message names file and field."""


@dataclass(frozen=True, kw_only=True)
class CostProfile:
    """What one kind of engine costs. Times in seconds, memory in bytes.

    The defaults are SmolLM2-135M (bf16) on one CPU core with vLLM 0.32: prefill of 302 tokens 0.47 s, of 1500
    2.9 s, of 2047 4.6 s; decode 26 tokens/s a stream, four streams hardly slower than one; NIXL over shared
    memory 38 MB in 16 ms.
    """

    name: str = "smollm2-135m, one CPU core"
    request: float = 0.0
    """Of every request, before the scheduler sees it: HTTP, parsing, tokenizing. Takes no step's time."""
    step: float = 0.036
    """Of every step, whatever is in it: reading the weights, launching, scheduling."""
    prefill_token: float = 1.32e-3
    prefill_attention: float = 8.5e-7
    """For each pair of a prompt token and a token that it looks at."""
    decode_sequence: float = 6e-4
    decode_context: float = 2e-6
    """For each token of a stream's context, in each step."""
    kv_bytes_per_token: int = 23_040
    """K and V of all layers: 2 · layers · KV heads · head size · bytes of an element, over all ranks."""
    kv_bandwidth: float = 2.4e9
    """Bytes a second between two engines."""
    kv_latency: float = 2e-3
    """Of every transfer."""
    kv_handshake: float = 0.02
    """At the first transfer between two engines."""
    block_size: int = 128
    """Tokens of a KV block where `--block-size` says nothing."""
    kv_cache_bytes: int = 1 << 30
    """KV memory where no flag says how much."""
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if not isinstance(value, str) and not value >= 0:
                raise ProfileError(f"{f.name}: is {value!r}; it must not be negative")
        if min(self.block_size, self.kv_bytes_per_token, self.max_num_batched_tokens, self.max_num_seqs) < 1:
            raise ProfileError("block_size, kv_bytes_per_token and the two limits must be at least 1")
        if not self.kv_bandwidth > 0:
            raise ProfileError("kv_bandwidth: must be greater than 0")

    def step_seconds(self, chunks: Iterable[tuple[int, int]], contexts: Iterable[float]) -> float:
        """One step. `chunks`: (tokens, tokens of context before them); `contexts`: one per running stream."""
        seconds = self.step
        for tokens, context in chunks:
            seconds += self.prefill_token * tokens
            seconds += self.prefill_attention * tokens * (context + tokens / 2)
        for behind in contexts:
            seconds += self.decode_sequence + self.decode_context * behind
        return seconds

    def transfer_seconds(self, size: int) -> float:
        """`size` bytes of KV from one engine to another, without the first contact's handshake."""
        return self.kv_latency + size / self.kv_bandwidth

    def to_json(self) -> bytes:
        """As `load` reads it."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2)


def load(path: Path) -> CostProfile:
    """A profile from a JSON object; fields that are missing have the default's value.

    Raises ProfileError for an unknown field, a wrong type or a file that cannot be read.
    """
    try:
        values: Any = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ProfileError(f"{path}: {error}") from None
    known = {f.name for f in fields(CostProfile)}
    if not isinstance(values, dict) or (unknown := sorted(values.keys() - known)):
        what = "is not a JSON object" if not isinstance(values, dict) else f"unknown {', '.join(unknown)}"
        raise ProfileError(f"{path}: {what}; a profile has {', '.join(sorted(known))}")
    try:
        return msgspec.convert(values, CostProfile)
    except (msgspec.ValidationError, ProfileError) as error:
        raise ProfileError(f"{path}: {error}") from None
