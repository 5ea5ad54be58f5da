"""The router's configuration, from the resource."""

from __future__ import annotations

from typing import Any

from tandem.api import RequestLimits, Role
from tandem.config import RouterConfig
from tandem.engine import (
    EngineError,
    flag_value,
    has_flag,
    pod_kv_events,
    served_model_name,
    switch,
)
from tandem.engine.pd_buffer import CHUNK_TOKENS
from tandem.engine.roles import served_model_names
from tandem.operator import model_files, names
from tandem.operator.errors import RenderError
from tandem.operator.lmcache import receiver_ports
from tandem.operator.plan import Plan
from tandem.operator.pools import disaggregated
from tandem.operator.wishes import invocation_path

KV_LAYOUT = "kv-layout"
"""What the router calls pods' label KV_LAYOUT_LABEL."""

_LORA = ("--enable-lora", "--lora-modules")


def router_config(plan: Plan) -> RouterConfig:
    """Engines are the pods of the endpoint, also those of what it was before: while it changes, whichever are
    ready serve."""
    pods = ",".join(f"{name}={value}" for name, value in plan.names.pods_of_endpoint().items())
    known: dict[str, Any] = {
        "host": "0.0.0.0",
        "port": names.ROUTER_PORT,
        "admin_port": names.ROUTER_ADMIN_PORT,
        "drain_delay": float(plan.router_leaves),
        "drain_timeout": float(plan.times.longest_stream),
        "discover_kubernetes": f"{plan.names.namespace}:{names.PROXY_PORT}:{pods}",
        "invocation_path": invocation_path(plan.spec),
        "routing_strategy": plan.strategy,
        "kv_block_size": plan.pools[-1].flags.block_size,
        "max_model_len": plan.context,
        "served_model_name": _served(plan),
        **_counting(plan),
        **_limits(plan.spec.worker.request_limits),
    }
    if plan.api_keys_secret is not None:
        known["api_keys_file"] = f"{names.API_KEYS_FOLDER}/{names.API_KEYS_FILE}"
    if plan.spec.pd_spec is not None:
        known |= {
            "connector": plan.connector.name,
            "pair_labels": (KV_LAYOUT,),
            "routing_threshold": plan.spec.pd_spec.routing_threshold,
        }
    if plan.kv_events:
        ranks = max(pool.flags.dp for pool in plan.pools)
        try:
            where = pod_kv_events(ranks)
        except EngineError as error:
            raise RenderError(str(error)) from None
        known |= {"kv_events": where.events, "kv_replay": where.replay, "kv_ranks": ranks}
    if plan.lmcache_pd:
        known |= _lmcache(plan)
    try:
        return RouterConfig(**known)
    except ValueError as error:
        raise RenderError(f"the router cannot be configured: {error}") from None


def _served(plan: Plan) -> tuple[str, ...]:
    """The models that clients may name: those of the flags. With adapters, which have names of their own,
    those that the engines report."""
    endpoint = disaggregated(plan.endpoint)
    try:
        served_model_name(endpoint)  # says so where the roles' names differ
    except EngineError as error:
        raise RenderError(str(error)) from None
    if any(has_flag(pool.args, flag) for pool in plan.pools for flag in _LORA):
        return ()
    return served_model_names(endpoint, Role.DECODE)


def _counting(plan: Plan) -> dict[str, Any]:
    """Flags that shape prompts, as the engines have them."""
    args = plan.pools[-1].args
    template = flag_value(args, "--chat-template")
    known = {
        # A file of the model container is not there in the router's; text is.
        "chat_template": template if template and model_files.is_text(template) else None,
        "chat_template_content_format": flag_value(args, "--chat-template-content-format"),
        "default_chat_template_kwargs": flag_value(args, "--default-chat-template-kwargs"),
    }
    if model_files.why_not(plan) is None:
        known |= {"model_files_path": model_files.PATH, "model_files_cache": model_files.CACHE}
    excluded = switch(args, "--exclude-tools-when-tool-choice-none")
    found: dict[str, Any] = {name: value for name, value in known.items() if value is not None}
    return found | ({"exclude_tools_when_tool_choice_none": True} if excluded else {})


def _limits(limits: RequestLimits | None) -> dict[str, Any]:
    if limits is None or limits.max_concurrent_requests is None:
        return {}
    return {
        "max_concurrent_requests": limits.max_concurrent_requests,
        "max_queue_size": limits.max_queue_size or 0,
        "overflow_status_code": limits.overflow_status_code,
    }


def _lmcache(plan: Plan) -> dict[str, Any]:
    assert plan.buffer is not None
    init, alloc = receiver_ports(plan.pool(Role.DECODE))
    return {
        "lmcache_receivers": (f"{','.join(map(str, init))}:{','.join(map(str, alloc))}",),
        "lmcache_notify": f"0.0.0.0:{names.NOTIFY_PORT}",
        "lmcache_chunk_size": CHUNK_TOKENS,
        "lmcache_buffer_chunks": plan.buffer.chunks,
        "lmcache_ranks": plan.pool(Role.PREFILL).flags.tp,
        "lmcache_step_tokens": plan.step_tokens,
    }
