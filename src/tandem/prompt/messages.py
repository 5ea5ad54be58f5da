"""The request's messages as a chat template receives them.

Follows vLLM 0.32: validation of the request model (vllm/entrypoints/openai/chat_completion/protocol.py), then
`parse_chat_messages` (vllm/renderers/chat_utils.py). Key order counts: templates print objects with `tojson`.
"""

import json
from collections.abc import Mapping
from typing import TypeAlias

from tandem.prompt import fields
from tandem.prompt.errors import BadPrompt, NotExact

Message: TypeAlias = dict[str, object]

# Content part type -> the key that holds its text. vLLM's request model lets no other textual type through.
_TEXT_PARTS = {"text": "text", "refusal": "refusal", "thinking": "thinking"}

# Fields that some content part type defines. A part handed to the template keeps only fields outside this set
# (vLLM's _KNOWN_CONTENT_PART_FIELDS).
KNOWN_PART_FIELDS = frozenset(
    {
        "audio_embeds",
        "audio_url",
        "closed",
        "data",
        "file",
        "image_embeds",
        "image_pil",
        "image_url",
        "input_audio",
        "name",
        "prompt_cache_breakpoint",
        "refusal",
        "text",
        "thinking",
        "type",
        "uuid",
        "video_embeds",
        "video_url",
    }
)

_MEDIA = ("image", "audio", "video", "file")

# Claude Code's attribution line: it changes with every request, so vLLM drops it from system messages.
_BILLING_HEADER = "x-anthropic-billing-header"


def conversation(messages: object, *, content_parts: bool) -> list[Message]:
    """Turns `messages` of a request into the list a template iterates over.

    content_parts: True for templates that iterate over content parts (vLLM's "openai" content format), False
    for those that want text ("string"); text parts are then joined by line feeds.
    Raises BadPrompt where the engine refuses, NotExact where only the engine can say.
    """
    if not isinstance(messages, list):
        raise BadPrompt("messages must be a list.", "messages")
    if not messages:
        raise BadPrompt("messages must hold at least one message.", "messages")
    return [_message(message, f"messages[{i}]", content_parts) for i, message in enumerate(messages)]


def _message(message: object, where: str, content_parts: bool) -> Message:
    if not isinstance(message, Mapping):
        raise BadPrompt(f"{where} must be an object.", where)
    role = message.get("role")
    if not isinstance(role, str):
        raise BadPrompt(f"{where}.role must be a string.", f"{where}.role")
    if "author" in message:
        raise NotExact("message format", f"{where} is a Harmony message")
    parts = _parts(message.get("content"), where, role)
    if role == "system":
        parts = _without_billing_header(parts)
    content: object
    if not content_parts:
        content = "\n".join(filter(None, map(_part_text, parts)))
    elif role == "tool" and all(_type_of(part) in _TEXT_PARTS for part in parts):
        # Most templates handle tool results as text only; references to tools stay parts.
        content = "\n".join(map(_part_text, parts))
    else:
        content = [_part_object(part) for part in parts]

    result: Message = {"role": role, "content": content}
    if role == "assistant":
        _add_assistant_fields(result, message, where)
    elif role == "tool" and "tool_call_id" in message:
        result["tool_call_id"] = fields.text(message, "tool_call_id", f"{where}.")
    if (name := fields.text(message, "name", f"{where}.")) is not None:
        result["name"] = name
    if (task := fields.text(message, "task", f"{where}.")) is not None:
        result["task"] = task
    if role == "developer":
        if message.get("tools") is not None:
            raise NotExact("developer tools", f"{where}.tools")
        result["tools"] = None
    return result


def _parts(content: object, where: str, role: str) -> list[dict[str, object]]:
    """Content as a list of checked part objects."""
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise BadPrompt(f"{where}.content must be a string or a list of parts.", f"{where}.content")
    return [_checked_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]


def _checked_part(part: object, where: str) -> dict[str, object]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise BadPrompt(f"{where} must be a string or an object.", where)
    kind = _type_of(part)
    if part.get("uuid") is None:
        if kind in _TEXT_PARTS and isinstance(part.get(_TEXT_PARTS[kind]), str):
            return part
        if kind == "tool_reference" and isinstance(part.get("name"), str):
            return part
    # Anything else carries media, or only the engine knows what it makes of it.
    if any(word in key for word in _MEDIA for key in (kind, *part)):
        raise NotExact("multimodal", where)
    if kind == "prompt_embeds" or "prompt_embeds" in part:
        raise NotExact("prompt_embeds", where)
    raise NotExact("content part", where)


def _type_of(part: Mapping[str, object]) -> str:
    kind = part.get("type")
    return kind if isinstance(kind, str) else ""


def _part_text(part: Mapping[str, object]) -> str:
    return str(part[_TEXT_PARTS.get(_type_of(part), "name")])


def _part_object(part: Mapping[str, object]) -> dict[str, object]:
    if _type_of(part) == "tool_reference":
        return {"type": "tool_reference", "name": part["name"]}
    own = {key: value for key, value in part.items() if key not in KNOWN_PART_FIELDS}
    return {"type": "text", "text": _part_text(part), **own}


def _without_billing_header(parts: list[dict[str, object]]) -> list[dict[str, object]]:
    kept = []
    for part in parts:
        value = part.get("text")
        if _type_of(part) != "text" or not isinstance(value, str) or not value.startswith(_BILLING_HEADER):
            kept.append(part)
        elif rest := value.partition("\n")[2]:
            kept.append({**part, "text": rest})
    return kept


def _add_assistant_fields(result: Message, message: Mapping[str, object], where: str) -> None:
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list):
            raise NotExact("tool calls", f"{where}.tool_calls")
        if calls:
            result["tool_calls"] = [_tool_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(calls)]
    reasoning = fields.text(message, "reasoning", f"{where}.")
    if reasoning is None:
        # The field's former name; the new one wins where both are set.
        reasoning = fields.text(message, "reasoning_content", f"{where}.")
    if reasoning is not None:
        result["reasoning"] = reasoning
        result["reasoning_content"] = reasoning


def _tool_call(call: object, where: str) -> dict[str, object]:
    """One tool call, its arguments an object; keys in the order of vLLM's request model, unknown ones last.

    vLLM 0.32 takes arguments as a JSON string only and refuses objects; other versions differ, so the engine
    judges whatever is not of that form.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if (
        not isinstance(call, dict)
        or not isinstance(function, dict)
        or call.get("type") != "function"
        or not all(
            isinstance(v, str) for v in (call.get("id"), function.get("name"), function.get("arguments"))
        )
    ):
        raise NotExact("tool calls", where)
    return {
        "id": call["id"],
        "function": {
            "arguments": _arguments(function["arguments"], where),
            "name": function["name"],
            **{key: value for key, value in function.items() if key not in ("arguments", "name")},
        },
        "type": "function",
        **{key: value for key, value in call.items() if key not in ("id", "function", "type")},
    }


def _arguments(encoded: str, where: str) -> dict[str, object]:
    try:
        decoded = json.loads(encoded) if encoded else {}
    except json.JSONDecodeError:
        return {}  # as vLLM: a broken call in the history must not end the conversation
    except (ValueError, RecursionError) as e:
        raise NotExact("tool calls", f"{where}.function.arguments") from e
    return decoded if isinstance(decoded, dict) else {}


def without_developer_role(messages: list[Message]) -> list[Message]:
    """For templates that lack the developer role: it becomes system, and system texts move to the front."""
    converted = []
    for message in messages:
        if message["role"] == "developer":
            message = {key: value for key, value in message.items() if key != "tools"} | {"role": "system"}
        converted.append(message)
    system = [i for i, message in enumerate(converted) if message["role"] == "system"]
    if system in ([], [0]):
        return converted
    texts = [_system_text(converted[i]["content"]) for i in system]
    merged: Message = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(message for message in converted if message["role"] != "system")]


def _system_text(content: object) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if "text" in part)
    return str(content)
