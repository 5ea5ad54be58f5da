"""How much memory the engines of an endpoint take on a CPU, and whether this machine has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.engine import flag_value, int_flag
from tandem.engine.hand_off import L1_VARIABLE
from tandem.engine.kv_size import kv_bytes_per_token
from tandem.engine.pod_variables import lmcache_variable
from tandem.local.errors import LocalError

OWN_BYTES = 1 << 30
"""What an engine takes beside weights and KV cache, at least. Measured: 530 MiB of the API server's own, and
560 MiB of the process that schedules and computes, with a model of next to nothing."""

_CPU_BLOCK = 128
"""Tokens of a KV block unless `--block-size` says otherwise: vLLM's own choice on a CPU."""

_MOST_BYTES = 1 << 60
_FOUR_BYTES = ("float32", "float")
_TWO_BYTES = ("bfloat16", "float16", "half")


@dataclass(frozen=True)
class Need:
    """Bytes of memory that one engine takes, at least."""

    role: str
    weights: int
    kv_cache: int
    l1: int = 0
    """What LMCache keeps beside the KV cache."""
    own: int = OWN_BYTES

    @property
    def bytes(self) -> int:
        return self.weights + self.kv_cache + self.l1 + self.own


def float_bytes(args: Sequence[str]) -> int:
    """Bytes of a number that an engine with these flags computes with: two, also where the weights have four,
    unless `--dtype` asks for four."""
    return 4 if flag_value(args, "--dtype") in _FOUR_BYTES else 2


def block_tokens(args: Sequence[str]) -> int:
    """Tokens of a KV block."""
    return int_flag(args, "--block-size") or _CPU_BLOCK


def token_bytes(args: Sequence[str], config: Mapping[str, Any]) -> int | None:
    """Bytes of one token's KV in an engine; None where config.json or the flags leave it open."""
    asked = flag_value(args, "--kv-cache-dtype") or "auto"
    if asked == "auto":
        return kv_bytes_per_token(config, 1, element_bytes=float_bytes(args))
    if asked in _FOUR_BYTES or asked in _TWO_BYTES:
        return kv_bytes_per_token(config, 1, element_bytes=4 if asked in _FOUR_BYTES else 2)
    return None


def kv_cache_bytes(
    args: Sequence[str], environment: Mapping[str, str], config: Mapping[str, Any]
) -> int | None:
    """The whole KV cache of an engine; None where nothing says how large it is."""
    blocks = int_flag(args, "--num-gpu-blocks-override")
    if blocks is not None:
        token = token_bytes(args, config)
        return None if token is None else blocks * block_tokens(args) * token
    if (gib := environment.get("VLLM_CPU_KVCACHE_SPACE", "")).isdecimal():
        return int(gib) << 30
    return int_flag(args, "--kv-cache-memory-bytes", most=_MOST_BYTES)


def l1_bytes(environment: Mapping[str, str]) -> int:
    """What LMCache takes at its start to keep KV in. (What is no size it says itself.)"""
    if environment.get(lmcache_variable("local_cpu")) != "true":
        return 0
    try:
        return max(0, int(float(environment.get(L1_VARIABLE, "0")) * (1 << 30)))
    except (OverflowError, ValueError):
        return 0


def memory_problem(needed: Sequence[Need], available: int) -> LocalError | None:
    """What to say where the engines take more than is available, in bytes."""
    total = sum(need.bytes for need in needed)
    if total <= available:
        return None
    each = "; ".join(
        f"{count} × {need.role} {_gib(need.bytes)} (weights {_gib(need.weights)}, KV cache "
        f"{_gib(need.kv_cache)}, {f'L1 {_gib(need.l1)}, ' if need.l1 else ''}its process {_gib(need.own)})"
        for need, count in Counter(needed).items()
    )
    return LocalError(
        f"The engines take {_gib(total)} of memory and {_gib(available)} are available: {each}. Use fewer "
        "replicas (spec.pdSpec), a smaller --kv-cache-memory-bytes (spec.worker.args) or a smaller model, or "
        "end other programs; --no-memory-check starts them all the same."
    )


def _gib(size: int) -> str:
    return f"{size / (1 << 30):,.1f} GiB"
