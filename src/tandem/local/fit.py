"""What vLLM would refuse half a minute after its start, told before: flags that do not fit the model."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.api import Endpoint, Role
from tandem.engine import EngineLaunch, flag_value, has_flag, int_flag
from tandem.engine.args import settings
from tandem.engine.roles import sources
from tandem.local.errors import ResourceError
from tandem.local.memory import block_tokens, kv_cache_bytes, token_bytes
from tandem.local.vllm_flags import unknown_flags

_ALLOWS_LONGER = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"

# Where a model has any of these, its layers keep less than a full context, or other things than keys and
# values: then only vLLM can tell how much KV cache a context takes.
_NOT_PLAIN = (
    "attention_chunk_size",
    "attn_layer_indices",
    "attn_type_list",
    "cross_attention_layers",
    "full_attention_interval",
    "hybrid_override_pattern",
    "kv_lora_rank",
    "layers_block_type",
    "linear_num_value_heads",
    "mamba_d_state",
    "num_kv_shared_layers",
    "ssm_state_size",
    "state_size",
)


@dataclass(frozen=True)
class _Engine:
    """One role's engine, its model's configuration, and where its flags stand."""

    endpoint: Endpoint
    launch: EngineLaunch
    config: Mapping[str, Any]

    @property
    def args(self) -> Sequence[str]:
        return self.launch.argv

    def place(self, flag: str) -> str:
        """The field of the resource that gives a flag, with the flag; without a field where none does."""
        found = [
            source.path
            for source in sources(self.endpoint, self.launch.role)
            if any(setting.flag == flag for setting in settings(source.args))
        ]
        return f"{found[-1]}: {flag}" if found else f"{self.launch.role} engines: {flag}"


def fit_problems(
    endpoint: Endpoint, engines: Sequence[EngineLaunch], config: Mapping[str, Any], vllm: Path | None
) -> list[ResourceError]:
    """What of the flags keeps an engine with a model's config.json from starting, each thing once. `vllm`:
    the folder of its sources."""
    found: dict[str, None] = {}
    if vllm is not None:
        found |= dict.fromkeys(_unknown(endpoint, vllm))
    for launch in {engine.role: engine for engine in engines}.values():
        engine = _Engine(endpoint, launch, config)
        for check in (_context, _cache, _template):
            found |= dict.fromkeys(check(engine))
    return [ResourceError(problem) for problem in found]


def _unknown(endpoint: Endpoint, vllm: Path) -> Iterator[str]:
    """Flags that are none of vLLM's."""
    given = [
        (setting.flag, f"{source.path}: {setting.tokens[0].partition('=')[0]}")
        for role in Role
        for source in sources(endpoint, role)
        for setting in settings(source.args)
        if setting.flag.startswith("--")
    ]
    near = unknown_flags((flag for flag, _ in given), vllm)
    for flag, place in given:
        if flag in near:
            meant = f"; did you mean {near[flag]}?" if near[flag] else ""
            yield f"{place} is no flag of the installed vLLM{meant}"


def _context(engine: _Engine) -> Iterator[str]:
    """A context longer than the model's."""
    asked, longest = int_flag(engine.args, "--max-model-len"), _longest(engine.config)
    allowed = engine.launch.environment(os.environ).get(_ALLOWS_LONGER, "").lower() in ("1", "true")
    if asked is not None and longest is not None and asked > longest and not allowed:
        yield (
            f"{engine.place('--max-model-len')} {asked}: the model's context has {longest:,} tokens "
            "(max_position_embeddings of its config.json); use that or less"
        )


def _cache(engine: _Engine) -> Iterator[str]:
    """A KV cache that does not hold one prompt of the whole context."""
    if engine.launch.gpus or not _is_plain(engine.config):
        return  # of a GPU's memory vLLM takes what is left
    token = token_bytes(engine.args, engine.config)
    cache = kv_cache_bytes(engine.args, engine.launch.env, engine.config)
    context = _longest(engine.config)
    if has_flag(engine.args, "--max-model-len"):
        context = int_flag(engine.args, "--max-model-len")  # None of `auto`: as much as there is room for
    if token is None or cache is None or context is None:
        return
    block = block_tokens(engine.args)
    blocks = cache // (block * token) - 1  # vLLM keeps one for itself
    needed = math.ceil(context / block)
    if needed > blocks:
        room = max(0, blocks) * block
        shorter = f"set --max-model-len to {room} or less, or " if room else ""
        yield (
            f"{_size_place(engine)}: {cache / (1 << 20):,.0f} MiB of KV cache hold {room:,} tokens, and the "
            f"context has {context:,}: {shorter}--kv-cache-memory-bytes to {(needed + 1) * block * token}"
        )


def _size_place(engine: _Engine) -> str:
    """What says how large the KV cache is."""
    for flag in ("--num-gpu-blocks-override", "--kv-cache-memory-bytes"):
        if has_flag(engine.args, flag):
            return engine.place(flag)
    return "spec.worker.environmentVariables: VLLM_CPU_KVCACHE_SPACE"


def _template(engine: _Engine) -> Iterator[str]:
    """A chat template that is a path to nothing."""
    named = flag_value(engine.args, "--chat-template")
    if named is not None and not any(c in named for c in "{}\n") and not os.path.isfile(named):
        yield f"{engine.place('--chat-template')} {named}: there is no such file on this machine"


def _longest(config: Mapping[str, Any]) -> int | None:
    """The model's context in tokens; None where its rotary embedding may stretch it, which vLLM works out."""
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        return None
    stretched = text.get("rope_scaling") or text.get("rope_parameters")
    if stretched and stretched != {"rope_type": "default"} and not _is_default(stretched):
        return None
    length = text.get("max_position_embeddings")
    return length if isinstance(length, int) and "model_max_length" not in text else None


def _is_default(rope: Any) -> bool:
    return isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type")) in ("default", "llama3")


def _is_plain(config: Mapping[str, Any]) -> bool:
    """Whether every layer keeps keys and values of the whole context."""
    text = config.get("text_config", config)
    if not isinstance(text, Mapping) or any(text.get(name) is not None for name in _NOT_PLAIN):
        return False
    kinds = text.get("layer_types") or ()
    slides = text.get("sliding_window") is not None and text.get("use_sliding_window") is not False
    return not slides and isinstance(kinds, (list, tuple)) and set(kinds) <= {"full_attention"}
