"""Requests of the OpenAI API: decoded, checked, and refused in vLLM 0.32's words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec

from tandem.sim.request import Sampling


class Refused(Exception):
    """An error answer."""

    def __init__(
        self, message: str, status: int = 400, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.status,
            }
        }


def internal_error(message: str = "Internal server error") -> Refused:
    return Refused(message, 500, "InternalServerError")


def decode_object(raw: bytes, content_type: bytes | None) -> dict[str, Any]:
    """The body of a request. Raises Refused."""
    kind = (content_type or b"").split(b";")[0].strip().lower()
    if kind != b"application/json":
        raise Refused(
            "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed",
            kind="Bad Request",
        )
    if not raw:
        raise _invalid("missing", "body", "Field required", "None")
    try:
        body = json.loads(raw)
    except json.JSONDecodeError as error:
        raise _invalid(
            "json_invalid", f"body.{error.pos}", "JSON decode error", "<dict of 0 items>", error.msg
        ) from None
    except UnicodeDecodeError:
        raise Refused("There was an error parsing the body", kind="Bad Request") from None
    if not isinstance(body, dict):
        raise _invalid(
            "model_attributes_type",
            "body",
            "Input should be a valid dictionary or object to extract fields from",
            _summary(body),
        )
    return body


def _invalid(kind: str, loc: str, message: str, given: str, context: str | None = None) -> Refused:
    entry: dict[str, Any] = {"type": kind, "loc": loc, "msg": message, "input": given}
    if context is not None:
        entry["ctx"] = {"error": context}
    return Refused(f"1 validation error:\n  {entry}", kind="Bad Request", param=loc)


def missing(field: str, body: Mapping[str, Any]) -> Refused:
    return _invalid("missing", f"body.{field}", "Field required", _summary(body))


def _summary(value: object) -> str:
    if isinstance(value, dict | list):
        return f"<{type(value).__name__} of {len(value)} items>"
    return str(value)


def _parameter(message: str, param: str, **value: object) -> Refused:
    told = "".join(f", value={v}" for v in value.values())
    return Refused(f"{message} (parameter={param}{told})", param=param)


def _integer(body: Mapping[str, Any], name: str) -> int | None:
    value = body.get(name)
    if value is None or type(value) is int:
        return value
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            message = "Input should be a valid integer, unable to parse string as an integer"
            raise _invalid("int_parsing", f"body.{name}", message, value) from None
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool):
        return int(value)
    kind = "int_from_float" if isinstance(value, float) else "int_type"
    message = "Input should be a valid integer"
    if kind == "int_from_float":
        message += ", got a number with a fractional part"
    raise _invalid(kind, f"body.{name}", message, _summary(value))


def _number(body: Mapping[str, Any], name: str) -> float | None:
    value = body.get(name)
    if value is None or isinstance(value, int | float):
        return None if value is None else float(value)
    try:
        return float(value)
    except (TypeError, ValueError):
        kind = "float_parsing" if isinstance(value, str) else "float_type"
        message = "Input should be a valid number"
        if isinstance(value, str):
            message += ", unable to parse string as a number"
        raise _invalid(kind, f"body.{name}", message, _summary(value)) from None


def _texts(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = body.get(name)
    if value is None:
        return ()
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
        raise _invalid("string_type", f"body.{name}", "Input should be a valid string", _summary(value))
    return tuple(v for v in values if v)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an answer is to look like; the prompt is not part of it."""

    chat: bool
    model: str | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    n: int
    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    include_stop: bool
    skip_special_tokens: bool
    logprobs: int | None
    """Tokens listed at each position, beside the chosen one; None: no logprobs."""
    echo: bool
    token_ids: bool
    tokens_as_ids: bool
    greedy: bool
    seed: int | None
    salt: str | None
    priority: int
    kv_params: dict[str, Any] | None

    def sampling(self, max_tokens: int, choice: int) -> Sampling:
        """Choice number `choice` of n."""
        seed = f"{self.seed}/{choice}".encode()
        return Sampling(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
            variant=b"" if self.greedy else blake2b(seed, digest_size=8).digest(),
        )


def read(body: dict[str, Any], *, chat: bool) -> Wanted:
    """What a decoded request wants, its fields checked as vLLM's request models check them. Raises Refused.

    Checks that need the model come later: `check_sampling`.
    """
    if chat and "messages" not in body:
        raise missing("messages", body)
    stream = bool(body.get("stream"))
    options = body.get("stream_options") or {}
    if options and not stream:
        raise _parameter("Stream options can only be defined when `stream=True`.", "stream_options")
    salt = body.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise _parameter("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    if not chat and body.get("prompt") in (None, "") and body.get("prompt_embeds") is None:
        raise _parameter("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    n = _integer(body, "n")
    temperature = _number(body, "temperature")
    kv_params = body.get("kv_transfer_params")
    stop_ids = body.get("stop_token_ids") or []
    max_tokens = _integer(body, "max_tokens")
    if chat and (newer := _integer(body, "max_completion_tokens")) is not None:
        max_tokens = newer
    elif not chat and "max_tokens" not in body:
        max_tokens = 16
    return Wanted(
        chat=chat,
        model=body.get("model"),
        stream=stream,
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("include_usage") and options.get("continuous_usage_stats")),
        n=1 if n is None else n,
        max_tokens=max_tokens,
        min_tokens=_integer(body, "min_tokens") or 0,
        ignore_eos=bool(body.get("ignore_eos")),
        stop=_texts(body, "stop"),
        stop_token_ids=frozenset(i for i in stop_ids if isinstance(i, int)),
        include_stop=bool(body.get("include_stop_str_in_output")),
        skip_special_tokens=body.get("skip_special_tokens") is not False,
        logprobs=_logprobs(body, chat),
        echo=bool(body.get("echo")),
        token_ids=bool(body.get("return_token_ids")),
        tokens_as_ids=bool(body.get("return_tokens_as_token_ids")),
        greedy=temperature == 0,
        seed=_integer(body, "seed"),
        salt=salt,
        priority=_integer(body, "priority") or 0,
        kv_params=dict(kv_params) if isinstance(kv_params, dict) else None,
    )


def _logprobs(body: Mapping[str, Any], chat: bool) -> int | None:
    if not chat:
        return _integer(body, "logprobs")
    top = _integer(body, "top_logprobs")
    if top and not body.get("logprobs"):
        raise _parameter("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
    return (top or 0) if body.get("logprobs") else None


def check_sampling(body: Mapping[str, Any], wanted: Wanted, max_tokens: int, max_logprobs: int) -> None:
    """What vLLM's SamplingParams refuse; `max_tokens` is what the context leaves of what was asked."""
    if wanted.n < 1:
        raise Refused(f"n must be at least 1, got {wanted.n}.")
    if max_tokens < 1:
        raise _parameter(f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens", value=max_tokens)
    temperature, top_p = _number(body, "temperature"), _number(body, "top_p")
    if temperature is not None and temperature < 0:
        raise _parameter(
            f"temperature must be non-negative, got {temperature}.", "temperature", value=temperature
        )
    if top_p is not None and not 0 < top_p <= 1:
        raise _parameter(f"top_p must be in (0, 1], got {top_p}.", "top_p", value=top_p)
    if wanted.min_tokens > max_tokens:
        raise Refused(
            f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {wanted.min_tokens}."
        )
    if wanted.logprobs is not None and wanted.logprobs > max_logprobs:
        raise _parameter(
            f"Requested sample logprobs of {wanted.logprobs}, which is greater than max allowed: "
            f"{max_logprobs}",
            "logprobs",
            value=wanted.logprobs,
        )


def check_length(prompt: int, max_model_len: int) -> None:
    """Raises Refused for a prompt longer than the context."""
    if prompt > max_model_len:
        least = max_model_len + 1
        raise _parameter(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
            f"at least {least} input tokens, which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt.",
            "input_tokens",
            value=least,
        )


def check_max_tokens(wanted: Wanted, max_model_len: int) -> None:
    if wanted.max_tokens is not None and wanted.max_tokens > max_model_len:
        raise _parameter(
            f"max_tokens={wanted.max_tokens} cannot be greater than max_model_len={max_model_len}. Please "
            "request fewer output tokens.",
            "max_tokens",
            value=wanted.max_tokens,
        )


def prompts_of(body: Mapping[str, Any]) -> list[Any]:
    """The prompts of a completion request: texts or lists of token ids."""
    prompt = body["prompt"]
    if prompt == []:
        raise Refused("You must pass at least one prompt")
    if isinstance(prompt, list) and isinstance(prompt[0], str | list):
        return prompt
    return [prompt]


def check_ids(ids: object, size: int) -> list[int]:
    """Token ids that a client sent."""
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise _invalid("string_type", "body.prompt", "Input should be a valid string", _summary(ids))
    outside = next((i for i in ids if not 0 <= i < size), None)
    if outside is not None:
        raise Refused(f"Token id {outside} is out of vocabulary")
    return ids


def encode(value: object) -> bytes:
    """JSON as vLLM's servers write it."""
    return msgspec.json.encode(value)
