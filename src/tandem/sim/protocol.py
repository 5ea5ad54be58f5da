"""Requests of the OpenAI API: decoded, checked, and refused in vLLM 0.32's words and in its order."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec

from tandem.sim import schema
from tandem.sim.refusal import MISTYPED, Refused, invalid, parameter
from tandem.sim.request import Sampling

_MAX_PROMPTS = 1024
_MAX_SALT = 128
_NOT_IN_SALT = frozenset("@/\\\0")


def decode(raw: bytes, content_type: bytes | None) -> Any:
    """The JSON of a request's body. Raises Refused."""
    check_content_type(content_type)
    try:
        body = json.loads(raw) if raw else None
    except json.JSONDecodeError as error:
        told = {"type": "json_invalid", "loc": f"body.{error.pos}", "msg": "JSON decode error"}
        raise invalid([{**told, "input": {}, "ctx": {"error": error.msg}}]) from None
    except UnicodeDecodeError:
        raise Refused("There was an error parsing the body", kind=MISTYPED) from None
    if body is None:
        raise invalid([{"type": "missing", "loc": "body", "msg": "Field required", "input": None}])
    return body


def check_content_type(content_type: bytes | None) -> None:
    """Raises Refused for a body that is not said to be JSON."""
    kind = (content_type or b"").split(b";")[0].strip().lower()
    if kind != b"application/json":
        raise Refused(
            "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed", kind=MISTYPED
        )


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an answer is to look like; the prompt is not part of it."""

    chat: bool
    model: str | None
    request_id: str
    """The client's own, in the body; "" if it gave none."""
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

    @property
    def echo_only(self) -> bool:
        """The prompt is wanted back, and nothing more."""
        return self.echo and not self.chat and self.max_tokens == 0

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


def read_chat(body: Any) -> tuple[schema.Chat, dict[str, Any], Wanted]:
    """A chat's body, checked; the body with its simple fields coerced; what is wanted. Raises Refused.

    Checks that need the model come later: `check_sampling`, `check_intake`.
    """
    if isinstance(body, dict):
        messages = body.get("messages", [])
        if messages is None or isinstance(messages, int | float):
            raise Refused(f"'{type(messages).__name__}' object is not iterable")
        _check_ends(body)
        body = _with_tool_choice(body)
        _check_numbers(body, "top_logprobs")
        if (top := body.get("top_logprobs")) and not body.get("logprobs"):
            raise parameter("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
        _check_stream_options(body)
        _check_response_format(body)
        _check_salt(body)
    chat = schema.check(schema.CHAT, body)
    check_conversation(chat)
    longest = chat.max_tokens if chat.max_completion_tokens is None else chat.max_completion_tokens
    top = chat.top_logprobs if chat.logprobs else None
    wanted = _wanted(chat, max_tokens=longest, logprobs=top, chat=True)
    return chat, schema.coerced(chat, body), wanted


def read_completion(body: Any) -> tuple[schema.Completion, dict[str, Any], Wanted]:
    """As `read_chat`, of a completion's body."""
    if isinstance(body, dict):
        _check_prompt(body)
        _check_stream_options(body)
        _check_numbers(body, "logprobs")
        _check_response_format(body)
        if body.get("max_tokens") is None:
            body = {**body, "max_tokens": 16}
        _check_salt(body)
    completion = schema.check(schema.COMPLETION, body)
    if body.get("prompt_embeds"):
        message = "You must set `--enable-prompt-embeds` to input `prompt_embeds`."
        raise parameter(message, "prompt_embeds")
    body = {name: value for name, value in body.items() if name != "prompt_embeds"}
    if completion.suffix is not None:
        raise Refused("suffix is only supported for models with FIM completion rendering", param="suffix")
    wanted = _wanted(completion, max_tokens=completion.max_tokens, logprobs=completion.logprobs, chat=False)
    return completion, {**schema.coerced(completion, body), "prompt": completion.prompt}, wanted


def _wanted(
    request: schema.Chat | schema.Completion, *, max_tokens: int | None, logprobs: int | None, chat: bool
) -> Wanted:
    options = request.stream_options or schema.StreamOptions()
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    return Wanted(
        chat=chat,
        model=request.model,
        request_id=request.request_id,
        stream=bool(request.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
        n=1 if request.n is None else request.n,
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        ignore_eos=request.ignore_eos,
        stop=tuple(stop),
        stop_token_ids=frozenset(request.stop_token_ids or ()),
        include_stop=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
        logprobs=logprobs,
        echo=bool(request.echo),
        token_ids=bool(request.return_token_ids),
        tokens_as_ids=bool(request.return_tokens_as_token_ids),
        greedy=request.temperature is not None and request.temperature < 1e-5,
        seed=request.seed,
        salt=request.cache_salt,
        priority=request.priority,
        kv_params=request.kv_transfer_params,
    )


def read_tokenize(body: Any) -> tuple[schema.TokenizeText | schema.TokenizeChat, dict[str, Any]]:
    """The body of /tokenize, checked, and with its simple fields coerced. Raises Refused."""
    if isinstance(body, dict) and "prompt" not in body:
        _check_ends(body)
    asked = schema.check(schema.TOKENIZE, body)
    if isinstance(asked, schema.TokenizeChat):
        check_conversation(asked)
    return asked, schema.coerced(asked, body)


# What vLLM checks before the types of fields


def _check_ends(body: Mapping[str, Any]) -> None:
    if body.get("continue_final_message") and body.get("add_generation_prompt"):
        raise Refused("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")


def _with_tool_choice(body: dict[str, Any]) -> dict[str, Any]:
    """ "auto" where tools are given and no choice is."""
    tools = body.get("tools")
    if tools == []:
        raise parameter(
            "`tools` must not be an empty array. Either provide at least one tool or omit the field "
            "entirely.",
            "tools",
        )
    if "tool_choice" not in body and tools:
        return {**body, "tool_choice": "auto"}
    choice = body.get("tool_choice")
    if choice in (None, "none"):
        return body
    if tools is None:
        raise parameter("When using `tool_choice`, `tools` must be set.", "tool_choice")
    if isinstance(choice, dict):
        _check_named_tool(choice, tools)
    elif choice not in ("auto", "required"):
        raise parameter(
            f'Invalid value for `tool_choice`: {choice}! Only named tools, "none", "auto" or "required" are '
            "supported.",
            "tool_choice",
        )
    return body


def _check_named_tool(choice: dict[str, Any], tools: list[Any]) -> None:
    usage = 'Correct usage: `{"type": "function", "function": {"name": "my_function"}}`'
    function = choice.get("function")
    if not isinstance(function, dict):
        message = f"Invalid value for `function`: `{function}` in `tool_choice`! {usage}"
        raise parameter(message, "tool_choice.function")
    if "name" not in function:
        message = f"Expected field `name` in `function` in `tool_choice`! {usage}"
        raise parameter(message, "tool_choice.function.name")
    if not any(tool["function"]["name"] == function["name"] for tool in tools):
        message = "The tool specified in `tool_choice` does not match any of the specified `tools`"
        raise parameter(message, "tool_choice")


def _check_numbers(body: Mapping[str, Any], logprobs: str) -> None:
    """`prompt_logprobs` and the field that asks for log probabilities of the answer."""
    for name in ("prompt_logprobs", logprobs):
        value = body.get(name)
        if value is not None and not isinstance(value, int | float):
            raise parameter(f"`{name}` must be an integer.", name, value=value)
    prompt = body.get("prompt_logprobs")
    if prompt is not None and body.get("stream") and (prompt > 0 or prompt == -1):
        raise parameter("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
    for name in ("prompt_logprobs", logprobs):
        value = body.get(name)
        if value is not None and value < 0 and value != -1:
            raise parameter(f"`{name}` must be a positive value or -1.", name, value=value)


def _check_stream_options(body: Mapping[str, Any]) -> None:
    if body.get("stream_options") and not body.get("stream"):
        raise parameter("Stream options can only be defined when `stream=True`.", "stream_options")


def _check_response_format(body: Mapping[str, Any]) -> None:
    asked = body.get("response_format")
    if isinstance(asked, dict) and asked.get("type") == "json_schema" and asked.get("json_schema") is None:
        raise parameter(
            "When response_format type is 'json_schema', the 'json_schema' field must be provided.",
            "response_format",
        )


def _check_salt(body: Mapping[str, Any]) -> None:
    salt = body.get("cache_salt")
    if salt is None:
        return
    if not isinstance(salt, str) or not salt:
        raise parameter("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    if len(salt) > _MAX_SALT or not _NOT_IN_SALT.isdisjoint(salt):
        raise parameter(
            "Parameter 'cache_salt' must be at most 128 characters and must not contain '@', '/', '\\\\', or "
            "NUL.",
            "cache_salt",
        )


def _check_prompt(body: Mapping[str, Any]) -> None:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) > _MAX_PROMPTS and not isinstance(prompt[0], int):
        raise parameter(
            f"prompt list length {len(prompt)} exceeds the maximum allowed count of {_MAX_PROMPTS}. To "
            "increase this limit, set the VLLM_MAX_COMPLETION_PROMPTS environment variable.",
            "prompt",
        )
    if prompt in (None, "") and body.get("prompt_embeds") in (None, []):
        raise parameter("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")


# What vLLM checks when it renders a chat


def check_conversation(chat: schema.Chat | schema.TokenizeChat) -> None:
    """Raises Refused for messages and templates that vLLM does not take."""
    _check_messages(chat.messages)
    if chat.chat_template is not None:
        raise Refused(
            "Chat template is passed with request, but --trust-request-chat-template is not set. Refused "
            "request with untrusted chat template."
        )
    if chat.continue_final_message and chat.add_generation_prompt:
        raise Refused(
            "continue_final_message and add_generation_prompt are not compatible. Use continue_final_message "
            "when you want the model to continue the final message, and add_generation_prompt when you want "
            "to add a header that will prompt it to start a new assistant message instead."
        )


def _check_messages(messages: list[Any]) -> None:
    """Roughly: where vLLM tells how a message fails to be one of each kind, this tells the first fault."""
    for i, message in enumerate(messages):
        where = f"body.messages.{i}"
        if not isinstance(message, dict):
            error = {"type": "dict_type", "loc": where, "msg": "Input should be a valid dictionary"}
            raise invalid([{**error, "input": message}])
        role, content = message.get("role"), message.get("content", "")
        if not isinstance(role, str):
            error = {"type": "string_type", "loc": f"{where}.role", "msg": "Input should be a valid string"}
            raise invalid([{**error, "input": role}])
        empty = content is None and role in ("assistant", "function")
        if not (empty or isinstance(content, str | list)):
            error = {
                "type": "string_type",
                "loc": f"{where}.content",
                "msg": "Input should be a valid string",
            }
            raise invalid([{**error, "input": content}])
        if isinstance(content, list) and not all(isinstance(part, dict) for part in content):
            raise Refused(f"messages[{i}].content holds what is no object")


def encode(value: object) -> bytes:
    """JSON as vLLM's servers write it."""
    return msgspec.json.encode(value)
