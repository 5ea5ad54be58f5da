"""What of a chat request, besides its messages, reaches the template; which models have no such template."""

from collections.abc import Mapping
from pathlib import Path

from tandem.prompt.errors import BadPrompt, LoadError, NotExact
from tandem.prompt.fields import FIELD_TYPE, boolean, choice, integer, objects, text

_EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "max"})

# Arguments that steer transformers' rendering function itself or collide with its own.
_RESERVED_ARGUMENTS = frozenset(
    {
        "chat_template",
        "compiled_template",
        "conversation",
        "conversations",
        "max_length",
        "messages",
        "model_config",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "self",
        "tokenize",
        "tokenizer",
        "tokenizer_kwargs",
        "truncation",
    }
)

# vLLM renders the chats of these architectures by code of its own.
_OWN_RENDERER = frozenset(
    {
        "DeepseekV32ForCausalLM",
        "DeepseekV41ForCausalLM",
        "DeepseekV4ForCausalLM",
        "DeepseekV4ForConditionalGeneration",
        "InklingForCausalLM",
        "InklingForConditionalGeneration",
        "KimiK3ForConditionalGeneration",
        "MoonshotKimiaForCausalLM",
    }
)


def own_renderer(model_config: Mapping[str, object], directory: Path) -> str:
    """Why vLLM would not take this model's prompts through tokenizer.json, or ""."""
    architectures = model_config.get("architectures")
    for name in architectures if isinstance(architectures, list) else ():
        if name in _OWN_RENDERER:
            return f"vLLM renders {name} by code of its own"
    if model_config.get("is_encoder_decoder"):
        return "the model has an encoder and a decoder"
    if (directory / "tekken.json").exists() or any(directory.glob("tokenizer.model.v*")):
        return f"vLLM may tokenize with mistral-common: {directory} holds its files"
    return ""


def own_chat_format(model_config: Mapping[str, object], directory: Path) -> str:
    """Why vLLM would not take this model's chats through the tokenizer's chat template, or ""."""
    if model_config.get("model_type") == "gpt_oss":
        return "vLLM renders gpt_oss chats in the Harmony format"
    if (directory / "chat_template.json").exists():
        return f"a processor's template comes before the tokenizer's: {directory / 'chat_template.json'}"
    return ""


def template_sources(given: str | None, model: Mapping[str, str]) -> Mapping[str, str]:
    """Templates by name; `given` (a file or the template itself) replaces the model's."""
    if given is None:
        return model
    try:
        return {"default": Path(given).read_text(encoding="utf-8")}
    except (OSError, ValueError) as e:
        # As vLLM tells them apart: a path has none of these characters.
        if any(c in given for c in "{}\n"):
            return {"default": given}
        raise LoadError(
            f"The chat template {given} cannot be read: {e}. "
            "Give a file that exists here, or the template itself."
        ) from e


def refuse_what_only_the_engine_renders(body: Mapping[str, object]) -> None:
    """Raises NotExact for requests that bring their own template or their own ids."""
    if body.get("chat_template") is not None:
        raise NotExact("client template", "chat_template")
    refuse_forwarded_ids(body)


def refuse_forwarded_ids(body: Mapping[str, object]) -> None:
    transfer = body.get("kv_transfer_params")
    if isinstance(transfer, Mapping) and transfer.get("prompt_token_ids") is not None:
        raise NotExact("forwarded ids", "kv_transfer_params.prompt_token_ids")


def max_output_tokens(body: Mapping[str, object]) -> int:
    """Tokens of output that a chat asks for; 0 = no limit given."""
    asked = integer(body, "max_completion_tokens")
    return (integer(body, "max_tokens") if asked is None else asked) or 0


def template_arguments(
    body: Mapping[str, object],
    engine_defaults: Mapping[str, object],
    exclude_tools_when_tool_choice_none: bool,
) -> dict[str, object]:
    """What the template gets besides the messages: the engine's defaults, then the request's.

    As vLLM merges them: fields of the request come before its chat_template_kwargs, those before the engine's
    defaults; null and "auto" count as not given.
    """
    own = _chat_template_kwargs(body)
    effort = choice(body, "reasoning_effort", _EFFORTS)
    arguments = dict(engine_defaults)
    tools = _tools(body)
    if tools is not None and not (exclude_tools_when_tool_choice_none and body.get("tool_choice") == "none"):
        arguments["tools"] = tools
    add_generation_prompt = boolean(body, "add_generation_prompt", True)
    continue_final_message = boolean(body, "continue_final_message", False)
    if add_generation_prompt and continue_final_message:
        raise BadPrompt(
            "continue_final_message needs add_generation_prompt to be false: "
            "the prompt either continues the last message or starts a new one.",
            "continue_final_message",
        )
    requested = own | {
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
    }
    if (documents := _documents(body)) is not None:
        requested["documents"] = documents
    if effort is not None:
        requested["reasoning_effort"] = effort
        requested.setdefault("enable_thinking", effort != "none")
    return arguments | {name: value for name, value in requested.items() if value not in (None, "auto")}


def _chat_template_kwargs(body: Mapping[str, object]) -> dict[str, object]:
    own = body.get("chat_template_kwargs")
    if own is None:
        return {}
    if not isinstance(own, dict):
        raise NotExact(FIELD_TYPE, "chat_template_kwargs is not an object")
    if own.get("chat_template") is not None:
        raise NotExact("client template", "chat_template_kwargs.chat_template")
    if reserved := _RESERVED_ARGUMENTS & own.keys():
        raise NotExact("chat_template_kwargs", min(reserved))
    for name in ("tools", "documents"):
        objects(own.get(name), f"chat_template_kwargs.{name}")
    return own


def _documents(body: Mapping[str, object]) -> list[dict[str, object]] | None:
    documents = objects(body.get("documents"), "documents")
    if any(not isinstance(value, str) for document in documents or () for value in document.values()):
        raise NotExact(FIELD_TYPE, "documents hold more than strings")
    return documents


def _tools(body: Mapping[str, object]) -> list[dict[str, object]] | None:
    """`tools` as vLLM's request model prints them: fixed key order, unknown keys dropped, some nulls kept."""
    tools = objects(body.get("tools"), "tools")
    if tools is None:
        return None
    if not tools:
        raise BadPrompt("tools must not be empty: give at least one tool or leave the field out.", "tools")
    return [_tool(tool, f"tools[{i}].") for i, tool in enumerate(tools)]


def _tool(tool: dict[str, object], where: str) -> dict[str, object]:
    function = tool.get("function")
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        raise NotExact("tools", f"{where}function")
    parameters = function.get("parameters")
    name = text(function, "name", f"{where}function.")
    if name is None or not isinstance(parameters, dict | None):
        raise NotExact("tools", f"{where}function")
    defer = _flag(tool, "defer_loading", where)
    printed: dict[str, object] = {
        "name": name,
        "description": text(function, "description", f"{where}function."),
        "parameters": parameters,
    }
    if (strict := _flag(function, "strict", where)) is not None:
        printed["strict"] = strict
    deferred = _flag(function, "defer_loading", where)
    if (deferred := defer if deferred is None else deferred) is not None:
        printed["defer_loading"] = deferred
    return {"type": "function", "function": printed} | ({} if defer is None else {"defer_loading": defer})


def _flag(of: Mapping[str, object], name: str, where: str) -> bool | None:
    value = of.get(name)
    if value is not None and not isinstance(value, bool):
        raise NotExact(FIELD_TYPE, f"{where}{name} is not true or false")
    return value
