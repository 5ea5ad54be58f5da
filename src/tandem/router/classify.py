"""What a request asks for: may it disaggregate, or must a decoder serve it alone, and why."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from tandem.http import Headers
from tandem.router.body import Body
from tandem.router.errors import ApiError


class Api(StrEnum):
    """A generation endpoint; the value is its path."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


# Body fields and headers by which engines hand KV over or are picked. From a client they could read
# another tenant's KV or make an engine call any host, so they are refused, never stripped in silence.
REFUSED_FIELDS = frozenset(
    {
        "kv_transfer_params",
        "ec_transfer_params",
        "kv_cache_report_mode",
        "disagg_spec",
        "disaggregated_params",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "transfer_id",
        "data_parallel_rank",
        "data_parallel_rank_local",
        "request_id",
    }
)
REFUSED_HEADERS = frozenset(
    {
        b"x-data-parallel-rank",
        b"x-data-parallel-host-port",
        b"x-prefiller-host-port",
        b"x-encoder-hosts-ports",
        b"x-kv-cache-source-host-port",
        b"x-tandem-canary",
    }
)


def refuse_internal(body: Body, headers: Headers) -> None:
    """Raise ApiError 400 when a client sends a field or header that only the router may send."""
    if body.facts is None:  # else it was looked at before
        refuse_fields(body)
    for header, _ in headers:
        if header in REFUSED_HEADERS:
            raise ApiError(400, f"The header {header.decode()!r} is set by the router; remove it.")


def refuse_fields(body: Body) -> None:
    """The same for fields alone."""
    for name in body.names():
        if name in REFUSED_FIELDS:
            raise ApiError(400, f"The field {name!r} is set by the router; remove it.", param=name)
    # vLLM reads the same parameters out of this bag, and dies of one that is of the wrong type.
    bag = body.get("vllm_xargs")
    if bag is not None:
        if not isinstance(bag, dict):
            raise ApiError(400, "The field 'vllm_xargs' must be an object.", param="vllm_xargs")
        for name in bag.keys() & REFUSED_FIELDS:
            raise ApiError(400, f"The field 'vllm_xargs.{name}' is set by the router; remove it.", param=name)


UNCOUNTED = frozenset({"prompt_embeds", "prompt_list", "multimodal"})
"""Reasons of `why_decode_only` for which the tokens of a prompt are not known here."""


def why_decode_only(api: Api, body: Body) -> str | None:
    """The first reason why a decoder must serve this request alone, whatever its length; None when it may be
    disaggregated. Raises ApiError 400 for fields that no engine could use."""
    stream = body.get("stream", False)
    if not isinstance(stream, bool | None):
        raise ApiError(400, "The field 'stream' must be true or false.", param="stream")
    if body.get("chat_template") is not None:
        raise ApiError(
            400,
            "Templates sent by clients are not accepted; the model's own template is used.",
            param="chat_template",
        )
    for name in ("n", "best_of"):
        value = body.get(name)
        if value is not None and value != 1:
            return name
    if body.get("echo"):
        return "echo"
    if body.get("prompt_logprobs") is not None:
        return "prompt_logprobs"
    if body.get("use_beam_search"):
        return "beam_search"
    if api is Api.COMPLETIONS:
        if body.given("prompt_embeds"):
            return "prompt_embeds"
        if body.ids is not None:
            return None
        prompt = body.get("prompt")
        if isinstance(prompt, list) and any(not isinstance(item, int) for item in prompt):
            return "prompt_list"
        return None
    return "multimodal" if _has_media(body.get("messages")) else None


# Content part types that hold text.
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})


def _is_text(kind: Any) -> bool:
    return kind is None or (isinstance(kind, str) and kind in _TEXT_PARTS)


def _has_media(messages: Any) -> bool:
    """Whether any message has a content part that is not text."""
    if not isinstance(messages, list):
        return False
    for message in messages:
        content: Any = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and any(
            isinstance(part, dict) and not _is_text(part.get("type")) for part in content
        ):
            return True
    return False
