"""An engine from a vLLM command line: its vocabulary, memory, hand-off, metrics and server."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import zmq

from tandem.sim import lmcache, ucx_log
from tandem.sim.args import KvTransfer, UsageError, VllmArgs
from tandem.sim.clock import Clock
from tandem.sim.cost import CostProfile
from tandem.sim.engine import Engine, EngineSettings
from tandem.sim.events import EventsConfig, Publisher
from tandem.sim.generation import ServingOptions
from tandem.sim.handoff import HandOff, Network, NoHandOff
from tandem.sim.metrics import Metrics
from tandem.sim.model_files import ModelFiles
from tandem.sim.nixl import Nixl
from tandem.sim.scheduler import Limits
from tandem.sim.server import EngineServer, Listen
from tandem.sim.vocabulary import Vocabulary, WordVocabulary, of_model

logger = logging.getLogger("tandem.sim")

_DEFAULT_CONTEXT = 8192
_SIDE_CHANNEL_PORT = 5600
_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "float": 4}

ANSWER_TOKENS = (32, 71)


@dataclass(frozen=True, slots=True)
class Place:
    """Where one engine is, among others of a process."""

    listen: Listen
    side_channel: tuple[str, int]
    listens_to_others: bool
    """Whether engines of other processes may fetch KV."""
    events_offset: int = 0
    """Added to the ports of `--kv-events-config`, and of LMCache's configuration."""


Kind = Callable[[KvTransfer, VllmArgs, Place, Mapping[str, str], Engine], HandOff]
"""Makes an engine's side of a hand-off from `--kv-transfer-config`, the other flags, the engine's place and
the environment."""


def _nixl(
    transfer: KvTransfer, args: VllmArgs, place: Place, environment: Mapping[str, str], engine: Engine
) -> HandOff:
    lease = transfer.extra.get("kv_lease_duration", 30)
    if not isinstance(lease, int | float) or lease <= 0:
        raise UsageError(f"kv_lease_duration: {lease!r} is not a number of seconds")
    return Nixl(
        engine,
        side_channel=place.side_channel,
        lease_seconds=float(lease),
        tensor_parallel=args.tensor_parallel,
        tells=ucx_log.asked(environment),
        listen=place.listens_to_others,
    )


def _lmcache(
    transfer: KvTransfer, args: VllmArgs, place: Place, environment: Mapping[str, str], engine: Engine
) -> HandOff:
    ranks = args.tensor_parallel
    settings = lmcache.read(transfer, environment, ranks=ranks, offset=place.events_offset)
    if settings is None:
        logger.info("LMCache without enable_pd: what it would cache is not simulated")
        return NoHandOff()
    # In the form of LMCache's start-up line, which people grep for.
    logger.info("LMCache Configuration: %s", {"enable_pd": True, "pd_role": settings.role})
    return lmcache.make(engine, settings, model=args.model, ranks=ranks, listen=place.listens_to_others)


_NIXL = {"NixlConnector": _nixl, "CpuNixlConnector": _nixl}
KINDS: Mapping[str, Kind] = {**_NIXL, "LMCacheConnectorV1": _lmcache, "CpuLMCacheConnector": _lmcache}
"""vLLM's kv_connector → how it is simulated."""


def side_channel(environment: Mapping[str, str]) -> tuple[str, int]:
    """VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT. Raises UsageError."""
    host = environment.get("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
    port = environment.get("VLLM_NIXL_SIDE_CHANNEL_PORT", str(_SIDE_CHANNEL_PORT))
    if not port.isdigit():
        raise UsageError(f"VLLM_NIXL_SIDE_CHANNEL_PORT: {port!r} is not a port")
    return host, int(port)


def vocabulary(args: VllmArgs, answer_tokens: tuple[int, int]) -> Vocabulary:
    """The model's own where `--model` is a folder with a tokenizer, else words. Raises LoadError."""
    folder = Path(args.model)
    tokenizer = Path(args.tokenizer) if args.tokenizer and Path(args.tokenizer).is_dir() else None
    if not ((tokenizer or folder) / "tokenizer.json").is_file():
        logger.info("%s is no folder with a tokenizer: words count as tokens", args.model)
        return WordVocabulary(answer_tokens)
    return of_model(
        folder if folder.is_dir() else tokenizer or folder,
        tokenizer=tokenizer,
        chat_template=args.chat_template,
        content_format=args.content_format,
        max_model_len=max_model_len(args),
        exclude_tools_when_tool_choice_none=args.exclude_tools_when_tool_choice_none,
        default_chat_template_kwargs=args.default_chat_template_kwargs,
        answer_tokens=answer_tokens,
    )


def max_model_len(args: VllmArgs) -> int:
    """Tokens of context: the flag's, else the model's own."""
    own = _model_config(args.model).get("max_position_embeddings")
    return args.max_model_len or (own if isinstance(own, int) else _DEFAULT_CONTEXT)


def kv_bytes_per_token(args: VllmArgs, profile: CostProfile) -> int:
    """From the model's config.json, else the profile's."""
    config = _model_config(args.model)
    try:
        layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        head = config.get("head_dim") or config["hidden_size"] // heads
        element = _ELEMENT_BYTES[config.get("dtype") or config.get("torch_dtype") or "bfloat16"]
        return int(2 * layers * kv_heads * head * element)
    except (KeyError, TypeError):
        return profile.kv_bytes_per_token


def settings(args: VllmArgs, profile: CostProfile, environment: Mapping[str, str]) -> EngineSettings:
    """Memory and limits. Raises UsageError where vLLM would not start."""
    length = max_model_len(args)
    block_size = args.block_size or profile.block_size
    blocks = args.blocks
    if blocks is None:
        space = environment.get("VLLM_CPU_KVCACHE_SPACE", "")
        size = int(space) << 30 if space.isdigit() and int(space) else args.kv_cache_bytes
        blocks = (size or profile.kv_cache_bytes) // (block_size * profile.kv_bytes_per_token)
        if size is None:  # nobody said how much: a larger model sits on a larger device
            blocks = max(blocks, 4 * -(-length // block_size) + 1)
    if (blocks - 1) * block_size < length:
        raise UsageError(
            f"{blocks} KV blocks of {block_size} tokens do not hold one request of --max-model-len {length}: "
            "give more by --kv-cache-memory-bytes or --num-gpu-blocks-override, or lower --max-model-len"
        )
    batched = args.max_num_batched_tokens or profile.max_num_batched_tokens
    seqs = args.max_num_seqs or min(profile.max_num_seqs, batched)
    if not args.chunked_prefill:
        batched = args.max_num_batched_tokens or max(batched, length)
        if batched < length:
            raise UsageError(f"--max-num-batched-tokens {batched} is below --max-model-len {length}")
    if batched < seqs:
        raise UsageError(f"--max-num-batched-tokens {batched} is below --max-num-seqs {seqs}")
    limits = Limits(
        max_num_batched_tokens=batched,
        max_num_seqs=seqs,
        max_model_len=length,
        chunked_prefill=args.chunked_prefill,
        long_prefill_token_threshold=args.long_prefill_token_threshold,
        reserve_full_isl=args.reserve_full_isl,
        priority=args.priority,
    )
    return EngineSettings(
        limits=limits,
        blocks=blocks,
        block_size=block_size,
        prefix_caching=args.prefix_caching,
        recompute_failed_loads=args.kv_transfer is not None and args.kv_transfer.recompute,
    )


def build(
    args: VllmArgs,
    profile: CostProfile,
    words: Vocabulary,
    place: Place,
    *,
    clock: Clock,
    network: Network,
    environment: Mapping[str, str],
    on_crash: Callable[[], None] = lambda: None,
    serves_model_files: bool = False,
) -> EngineServer:
    """An engine and its server, not started. `serves_model_files`: those of its tokenizer's folder, too.

    Raises UsageError, or OSError for an events endpoint."""
    profile = replace(profile, kv_bytes_per_token=kv_bytes_per_token(args, profile))
    engine_settings = settings(args, profile, environment)
    transfer = args.kv_transfer
    if transfer is not None and transfer.connector not in KINDS:
        raise UsageError(
            f"--kv-transfer-config: {transfer.connector} is not simulated; there are {', '.join(KINDS)}"
        )
    events = _moved(args.kv_events, place.events_offset)
    metrics = Metrics(
        args.served_names[0],
        engine_settings.limits.max_model_len,
        nixl=transfer is not None and transfer.connector in _NIXL,
        consumer=transfer is not None and transfer.role != "kv_producer",
        cache_info=_cache_info(args, engine_settings),
        layers=_layers(args.model),
    )

    def make_handoff(engine: Engine) -> HandOff:
        if transfer is None:
            return NoHandOff()
        return KINDS[transfer.connector](transfer, args, place, environment, engine)

    def crashed() -> None:
        server.crashed()
        on_crash()

    engine = Engine(
        engine_settings,
        profile,
        words.style,
        metrics,
        clock=clock,
        network=network,
        make_handoff=make_handoff,
        publisher=_publisher(events),
        on_crash=crashed,
    )
    if transfer is not None and transfer.engine_id:
        engine.engine_id = transfer.engine_id
    files = ModelFiles(Path(args.tokenizer or args.model)) if serves_model_files else None
    server = EngineServer(engine, words, _options(args, engine_settings), place.listen, events, files)
    _log(args, engine)
    return server


def _publisher(events: EventsConfig) -> Publisher | None:
    if not events.enabled:
        return None
    try:
        return Publisher(events)
    except zmq.ZMQError as error:
        raise OSError(f"--kv-events-config: cannot use {events.endpoint}: {error}") from None


def _options(args: VllmArgs, engine: EngineSettings) -> ServingOptions:
    return ServingOptions(
        names=args.served_names,
        root=args.model,
        max_model_len=engine.limits.max_model_len,
        fingerprint=f"vllm-0.32.0-{uuid4().hex[:8]}",
        lora_modules=args.lora_modules,
        max_logprobs=args.max_logprobs,
        role=args.response_role,
        prompt_tokens_details=args.prompt_tokens_details,
        force_include_usage=args.force_include_usage,
        request_id_headers=args.request_id_headers,
        auto_tool_choice=args.auto_tool_choice,
        tokens_as_ids=args.tokens_as_ids,
        api_keys=args.api_keys,
    )


def _moved(events: EventsConfig, offset: int) -> EventsConfig:
    """Engines of one process count up from the ports given."""

    def moved(endpoint: str) -> str:
        head, colon, port = endpoint.rpartition(":")
        if endpoint.startswith("tcp://") and colon and port.isdigit() and port != "0":
            return f"{head}:{int(port) + offset}"
        return f"{endpoint}-{offset}" if endpoint.startswith("ipc://") and offset else endpoint

    replay = events.replay_endpoint
    return replace(
        events, endpoint=moved(events.endpoint), replay_endpoint=None if replay is None else moved(replay)
    )


# What vllm:cache_config_info tells of features that a simulator has no use for: vLLM's defaults.
_CACHE_DEFAULTS = {
    "_block_size_resolved": "True",
    "cache_dtype": "auto",
    "cache_hit_alignment_tokens": "None",
    "enable_mamba_shared_prefix_checkpoint": "False",
    "gpu_memory_utilization": "0.92",
    "hash_block_size": "None",
    "is_attention_free": "False",
    "kv_cache_dtype_skip_layers": "[]",
    "kv_cache_layout": "None",
    "kv_offloading_backend": "native",
    "kv_offloading_size": "None",
    "kv_sharing_fast_prefill": "False",
    "mamba_block_size": "None",
    "mamba_cache_dtype": "auto",
    "mamba_cache_mode": "none",
    "mamba_page_size_padded": "None",
    "mamba_ssm_cache_dtype": "float32",
    "num_cpu_blocks": "None",
    "prefix_cache_retention_interval": "0",
    "prefix_caching_hash_algo": "sha256",
    "prefix_match_unit": "None",
    "replayssm_buffer_len": "16",
    "skip_page_size_padded": "None",
    "sliding_window": "None",
    "swa_bounded_replay": "True",
    "use_kda_recoverssm": "False",
    "use_replayssm": "False",
}


def _cache_info(args: VllmArgs, engine: EngineSettings) -> dict[str, str]:
    """Labels of vllm:cache_config_info."""
    tokens = engine.blocks * engine.block_size
    return {
        **_CACHE_DEFAULTS,
        "block_size": str(engine.block_size),
        "effective_attention_block_size": str(engine.block_size),
        "enable_prefix_caching": str(engine.prefix_caching),
        "kv_cache_max_concurrency": str(tokens / engine.limits.max_model_len),
        "kv_cache_memory_bytes": str(args.kv_cache_bytes),
        "kv_cache_size_tokens": str(tokens),
        "num_gpu_blocks": str(engine.blocks),
        "num_gpu_blocks_override": str(args.blocks),
        "user_specified_block_size": str(args.block_size is not None),
    }


def _layers(model: str) -> int:
    """The model's layers; 1 where its folder does not tell."""
    layers = _model_config(model).get("num_hidden_layers")
    return layers if isinstance(layers, int) else 1


def _model_config(model: str) -> dict[str, Any]:
    try:
        config = msgspec.json.decode((Path(model) / "config.json").read_bytes())
    except (OSError, msgspec.DecodeError):
        return {}
    if not isinstance(config, dict):
        return {}
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


_PD_ROLES = {"kv_producer": "sender", "kv_consumer": "receiver"}


def _log(args: VllmArgs, engine: Engine) -> None:
    logger.info("simulated engine %s: model %s, %d KV blocks", engine.engine_id, args.model, engine.pool.size)
    if (
        isinstance(engine.handoff, Nixl)
        and args.kv_transfer
        and (role := _PD_ROLES.get(args.kv_transfer.role))
    ):
        # As `_lmcache` does, for those who grep.
        logger.info("hand-off: %s", {"kv_connector": args.kv_transfer.connector, "pd_role": role})
    if args.ignored:
        logger.info("these flags do nothing here: %s", ", ".join(args.ignored))
