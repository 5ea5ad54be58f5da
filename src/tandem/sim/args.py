"""vLLM's command line, read by a parser of our own: every flag is known, those that the simulator can honour
have their effect, the others have none."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from tandem.sim import flags
from tandem.sim.events import EventsConfig
from tandem.sim.events import parse as parse_events

_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG]?)")
_DECIMAL = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

# How many values follow; a switch has its negation.
_NARGS: dict[str, Any] = {flags.VALUES: None, flags.LISTS: "+", flags.OPTIONAL: "?"}
_JSON = frozenset({"kv_transfer_config", "kv_events_config", "default_chat_template_kwargs", "hf_overrides"})


class UsageError(ValueError):
    """A command line that vLLM 0.32, or the simulator, would not take."""


@dataclass(frozen=True, kw_only=True)
class KvTransfer:
    """What of `--kv-transfer-config` counts here."""

    connector: str
    role: str = "kv_both"
    recompute: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    engine_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class VllmArgs:
    """A vLLM command line as the simulator understands it; None: the flag was not given."""

    model: str
    served_names: tuple[str, ...]
    host: str | None = None
    port: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    long_prefill_token_threshold: int = 0
    chunked_prefill: bool = True
    prefix_caching: bool = True
    reserve_full_isl: bool = True
    priority: bool = False
    block_size: int | None = None
    blocks: int | None = None
    kv_cache_bytes: int | None = None
    tensor_parallel: int = 1
    kv_transfer: KvTransfer | None = None
    kv_events: EventsConfig = field(default_factory=EventsConfig)
    tokenizer: str | None = None
    chat_template: str | None = None
    content_format: str = "auto"
    exclude_tools_when_tool_choice_none: bool = False
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    prompt_tokens_details: bool = False
    force_include_usage: bool = False
    request_id_headers: bool = False
    auto_tool_choice: bool = False
    tokens_as_ids: bool = False
    max_logprobs: int = 20
    response_role: str = "assistant"
    api_keys: tuple[str, ...] = ()
    lora_modules: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    """Flags that were given and do nothing here."""


def parse(argv: Sequence[str]) -> VllmArgs:
    """From flags, or from a whole command: `vllm serve MODEL …`, `python -m vllm.….api_server …`.

    Raises UsageError, which names unknown flags.
    """
    words = _normalized(_flags_of(list(argv)))
    given, rest = _parser().parse_known_args(words)
    unknown = [word for word in rest if word.startswith("-")]
    if unknown or rest:
        raise UsageError(f"unrecognized arguments: {' '.join(unknown or rest)} (vLLM 0.32 has no such flags)")
    v = {name: value for name, value in vars(given).items() if value is not None}
    model = v.get("model") or v.get("model_tag") or "Qwen/Qwen3-0.6B"
    used = {"model", "model_tag"}

    def take(name: str, default: Any = None, kind: Any = None) -> Any:
        used.add(name)
        value = v.get(name, default)
        try:
            return kind(value) if kind is not None and value is not None else value
        except ValueError as error:
            raise UsageError(f"argument --{name.replace('_', '-')}: {error}") from None

    length = take("max_model_len")
    args = VllmArgs(
        model=model,
        served_names=tuple(take("served_model_name", [model])),
        host=take("host"),
        port=take("port", kind=int),
        max_model_len=None if length in (None, "auto", "-1") else _number(length, "max-model-len"),
        max_num_batched_tokens=take("max_num_batched_tokens", kind=_number),
        max_num_seqs=take("max_num_seqs", kind=int),
        long_prefill_token_threshold=take("long_prefill_token_threshold", 0, int),
        chunked_prefill=take("enable_chunked_prefill", True),
        prefix_caching=take("enable_prefix_caching", True),
        reserve_full_isl=take("scheduler_reserve_full_isl", True),
        priority=take("scheduling_policy", "fcfs") == "priority",
        block_size=take("block_size", kind=int),
        blocks=take("num_gpu_blocks_override", kind=int),
        kv_cache_bytes=take("kv_cache_memory_bytes", kind=_number),
        tensor_parallel=take("tensor_parallel_size", 1, int),
        kv_transfer=_kv_transfer(take("kv_transfer_config", {})),
        kv_events=_kv_events(take("kv_events_config", {})),
        tokenizer=take("tokenizer"),
        chat_template=take("chat_template"),
        content_format=take("chat_template_content_format", "auto"),
        exclude_tools_when_tool_choice_none=take("exclude_tools_when_tool_choice_none", False),
        default_chat_template_kwargs=take("default_chat_template_kwargs", {}),
        prompt_tokens_details=take("enable_prompt_tokens_details", False),
        force_include_usage=take("enable_force_include_usage", False),
        request_id_headers=take("enable_request_id_headers", False),
        auto_tool_choice=take("enable_auto_tool_choice", False) and bool(take("tool_call_parser")),
        tokens_as_ids=take("return_tokens_as_token_ids", False),
        max_logprobs=take("max_logprobs", 20, int),
        response_role=take("response_role", "assistant"),
        api_keys=tuple(take("api_key", ())),
        lora_modules=_lora_modules(take("lora_modules", ())),
    )
    ignored = tuple(sorted(f"--{name.replace('_', '-')}" for name in v.keys() - used))
    return replace(args, ignored=ignored)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="vllm serve", add_help=False, allow_abbrev=False)
    parser.add_argument("model_tag", nargs="?")
    for name in flags.SWITCHES.split():
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=None)
    for names, nargs in _NARGS.items():
        for name in names.split():
            kind = _object if name.replace("-", "_") in _JSON else str
            parser.add_argument(f"--{name}", nargs=nargs, type=kind)
    return parser


def _flags_of(argv: list[str]) -> list[str]:
    """Less what starts the server."""
    for i, word in enumerate(argv):
        if word == "serve" and (i == 0 or Path(argv[i - 1]).name == "vllm"):
            return argv[i + 1 :]
        if word == "vllm.entrypoints.openai.api_server":
            return argv[i + 1 :]
    return argv


def _normalized(words: list[str]) -> list[str]:
    """`--a_b` is `--a-b`, `-tp` is `--tensor-parallel-size`, `--config.key VALUE` is a key of `--config`."""
    result: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    waiting = iter(words)
    for word in waiting:
        if not re.match(r"--?[A-Za-z]", word):
            result.append(word)
            continue
        flag, equals, value = word.partition("=")
        flag = flags.ALIASES.get(flag, flag)
        name, *keys = flag.split(".")
        name = name.replace("_", "-")
        if keys:
            text = value if equals else next(waiting, "true")
            inner = objects.setdefault(name, {})
            for key in keys[:-1]:
                inner = inner.setdefault(key, {})
            inner[keys[-1]] = _json_or_text(text)
        else:
            result.append(f"{name}={value}" if equals else name)
    for name, keyed in objects.items():
        result += [name, msgspec.json.encode(keyed).decode()]
    return result


def _json_or_text(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _object(text: str) -> dict[str, Any]:
    value = _json_or_text(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def _number(text: str, flag: str = "") -> int:
    """As vLLM reads them: 8k is 8,000, 8K is 8,192."""
    match = _NUMBER.fullmatch(str(text))
    if match is None:
        raise UsageError(
            f"argument --{flag}: {text!r} is not a number" if flag else f"{text!r} is not a number"
        )
    return int(float(match[1]) * _DECIMAL[match[2]])


def _kv_transfer(value: Mapping[str, Any]) -> KvTransfer | None:
    if not value:
        return None
    inner = value.get("kv_connector_extra_config") or {}
    if value.get("kv_connector") == "MultiConnector":
        # One of its connectors hands KV over between engines; stores beside it are not simulated.
        for connector in inner.get("connectors", ()):
            if connector.get("kv_connector", "").endswith("NixlConnector"):
                return _kv_transfer(
                    {**connector, "kv_load_failure_policy": value.get("kv_load_failure_policy")}
                )
    name = value.get("kv_connector")
    if not isinstance(name, str):
        raise UsageError("argument --kv-transfer-config: kv_connector is missing")
    return KvTransfer(
        connector=name,
        role=value.get("kv_role") or "kv_both",
        recompute=value.get("kv_load_failure_policy") == "recompute",
        extra=inner,
        engine_id=value.get("engine_id"),
    )


def _kv_events(value: Mapping[str, Any]) -> EventsConfig:
    try:
        return parse_events(dict(value))
    except ValueError as error:
        raise UsageError(f"argument --kv-events-config: {error}") from None


def _lora_modules(words: Sequence[str]) -> dict[str, str]:
    modules = {}
    for word in words:
        name, equals, path = word.partition("=")
        if not equals:
            entry = _object(word)
            name, path = str(entry.get("name")), str(entry.get("path"))
        modules[name] = path
    return modules
