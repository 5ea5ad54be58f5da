"""Flags of a router that do nothing beside the others that are given: they are told, not refused, since one
command line may be kept for several routers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from tandem.config.router import RouterConfig
from tandem.config.values import dns_source


def without_effect(config: RouterConfig) -> list[str]:
    """A sentence for each group of flags that differ from their defaults and change nothing."""
    defaults = {f.name: f.default for f in fields(config)}
    told = []
    for names, needed in _rules(config):
        given = [f"--{name.replace('_', '-')}" for name in names if getattr(config, name) != defaults[name]]
        if given:
            told.append(f"{', '.join(given)}: no effect {needed}")
    specs = [spec for role in ("prefill", "decode", "engine") for spec in config.specs(role)]
    if config.routing_strategy != "kvaware" and any(spec.kv_events for spec in specs):
        told.append("kv-events of single engines: no effect without --routing-strategy kvaware")
    return told


def _rules(config: RouterConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    """Flags, and what is missing for them."""
    names: tuple[str, ...]
    strategy = config.routing_strategy
    if config.admin_port is None:
        yield ("admin_host",), "without --admin-port"
    if config.discover_kubernetes is None:
        yield ("discovery_stale_after",), "without --discover-kubernetes"
    if not _may_prefill(config):
        names = (
            "connector",
            "pair_labels",
            "routing_threshold",
            "uncached_threshold",
            "prefill_timeout",
            "max_fallbacks",
            "max_fallback_tokens",
        )
        yield names, "without prefill engines (--prefill, --discover-file, --discover-dns, …)"
    elif config.routing_threshold == 0:
        yield ("uncached_threshold",), "with --routing-threshold 0, where every prompt is disaggregated"
    if not config.discovers and max(map(len, (config.prefill, config.decode, config.engine))) < 2:
        yield ("ramp_up",), "where no role has a second engine"
    if strategy != "session":
        yield ("session_header", "session_field"), "without --routing-strategy session"
    if strategy != "kvaware":
        names = ("kv_events", "kv_replay", "kv_ranks", "kv_index_blocks")
        yield names, "without --routing-strategy kvaware"
    if strategy in ("session", "roundrobin") and not config.uncached_threshold:
        yield ("kv_block_size",), f"with --routing-strategy {strategy}, which does not go by caches"
    if not (config.model_path or config.tokenizer or config.model_files_path):
        names = (
            "chat_template",
            "chat_template_content_format",
            "default_chat_template_kwargs",
            "exclude_tools_when_tool_choice_none",
            "max_model_len",
            "counted_model",
            "count_in_process_bytes",
            "count_cache_bytes",
        )
        yield names, "where engines count: without --model-path, --tokenizer and --model-files-path"
    if config.max_concurrent_requests is None:
        names = ("max_queue_size", "queue_timeout", "overflow_status_code")
        yield names, "without --max-concurrent-requests"
    elif not config.max_queue_size:
        yield ("queue_timeout",), "without --max-queue-size"
    if _may_prefill(config) and not config.max_fallbacks:
        yield ("max_fallback_tokens",), "with --max-fallbacks 0"
    if not config.cors_origins:
        yield ("cors_methods", "cors_headers"), "without --cors-origins"
    if config.connector != "lmcache":
        names = (
            "lmcache_receivers",
            "lmcache_notify",
            "lmcache_chunk_size",
            "lmcache_buffer_chunks",
            "lmcache_ranks",
            "lmcache_step_tokens",
            "notification_timeout",
            "reservation_timeout",
            "reservation_queue",
        )
        yield names, "without --connector lmcache"


def _may_prefill(config: RouterConfig) -> bool:
    """Whether there may be prefill engines."""
    named = any(dns_source(text)[0] == "prefill" for text in config.discover_dns)
    return bool(config.prefill or config.discover_file or config.discover_kubernetes or named)
