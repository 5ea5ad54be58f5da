"""What of a chat request changes its prompt, what only the engine can count, what it is sure to refuse."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.prompt import BadPrompt, NotExact, PromptCounter, load

HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "f"}}


def with_part(part: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "See:"}, part]}]}


def with_call(call: object) -> dict[str, Any]:
    return {"messages": [*HELLO, {"role": "assistant", "tool_calls": [call]}]}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (with_part({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}), "multimodal"),
        (with_part({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}), "multimodal"),
        (with_part({"type": "video_url", "video_url": {"url": "x"}}), "multimodal"),
        (with_part({"image_url": "https://example.org/a.png"}), "multimodal"),
        (with_part({"type": "text", "text": "a", "image_url": "x", "uuid": "1"}), "multimodal"),
        (with_part({"type": "prompt_embeds", "data": "AA=="}), "prompt_embeds"),
        (with_part({"type": "text", "text": None}), "content part"),
        (with_part({"type": "hologram"}), "content part"),
        ({"messages": HELLO, "chat_template": "{{ messages }}"}, "client template"),
        ({"messages": HELLO, "chat_template_kwargs": {"chat_template": "x"}}, "client template"),
        ({"messages": HELLO, "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"messages": HELLO, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"messages": HELLO, "kv_transfer_params": {"prompt_token_ids": [1]}}, "forwarded ids"),
        ({"messages": HELLO, "chat_template_kwargs": []}, "field type"),
        ({"messages": HELLO, "add_generation_prompt": "yes"}, "field type"),
        ({"messages": HELLO, "truncate_prompt_tokens": "5"}, "field type"),
        ({"messages": HELLO, "truncate_prompt_tokens": True}, "field type"),
        ({"messages": HELLO, "reasoning_effort": "heroic"}, "field type"),
        ({"messages": HELLO, "documents": [{"title": 1}]}, "field type"),
        ({"messages": HELLO, "tools": [{"type": "web_search"}]}, "tools"),
        ({"messages": HELLO, "tools": [{"function": {"name": "f", "strict": "no"}}]}, "field type"),
        ({"messages": [{"role": "user", "content": "a", "name": 5}]}, "field type"),
        ({"messages": [{"role": "developer", "content": "a", "tools": [TOOL]}]}, "developer tools"),
        ({"messages": [{"role": "user", "author": {"role": "user"}, "content": "a"}]}, "message format"),
        (
            with_call({"type": "function", "id": "1", "function": {"name": "f", "arguments": {}}}),
            "tool calls",
        ),
        (with_call({"type": "custom", "id": "1", "custom": {"name": "f", "input": ""}}), "tool calls"),
        (with_call({"type": "function", "function": {"name": "f", "arguments": "{}"}}), "tool calls"),
        (with_call("f()"), "tool calls"),
    ],
)
def test_the_engine_must_count(body: dict[str, Any], reason: str, counters: dict[str, PromptCounter]) -> None:
    with pytest.raises(NotExact) as caught:
        counters["smollm2"].chat(body)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["Hello"]}, "messages[0]"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": 5, "content": "a"}]}, "messages[0].role"),
        ({"messages": [*HELLO, {"role": "user", "content": 5}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
        ({"messages": HELLO, "tools": []}, "tools"),
        ({"messages": HELLO, "continue_final_message": True}, "continue_final_message"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, None),
        (
            {
                "messages": [{"role": "assistant"}],
                "add_generation_prompt": False,
                "continue_final_message": True,
            },
            "messages",
        ),
    ],
)
def test_a_bad_prompt_is_one_that_the_engine_refuses_too(
    body: dict[str, Any],
    param: str | None,
    counters: dict[str, PromptCounter],
    oracle: Callable[..., Any],
    refused: type[Exception],
) -> None:
    with pytest.raises(BadPrompt) as caught:
        counters["gemma"].chat(body)
    assert caught.value.param == param
    assert caught.value.message
    with pytest.raises(refused):
        oracle("gemma").chat(body)


@pytest.mark.parametrize("tool_choice", ["none", "auto"])
@pytest.mark.parametrize("exclude", [False, True])
def test_tools_that_may_not_be_chosen_can_be_left_out(
    exclude: bool, tool_choice: str, model_dirs: dict[str, Path], oracle: Callable[..., Any]
) -> None:
    body = {"messages": HELLO, "tools": [TOOL], "tool_choice": tool_choice}
    counter = load(model_dirs["qwen"], exclude_tools_when_tool_choice_none=exclude)
    assert counter.chat(body).ids == oracle("qwen", exclude_tools_when_tool_choice_none=exclude).chat(body)
    without = counter.chat({"messages": HELLO}).count
    assert (counter.chat(body).count == without) == (exclude and tool_choice == "none")


@pytest.mark.parametrize("own", [None, {"enable_thinking": True}, {"enable_thinking": None}])
@pytest.mark.parametrize("effort", [None, "none", "high"])
def test_the_engines_template_arguments_give_way_to_the_requests(
    own: dict[str, Any] | None, effort: str | None, model_dirs: dict[str, Path], oracle: Callable[..., Any]
) -> None:
    defaults = {"enable_thinking": False}
    body = {"messages": HELLO, "chat_template_kwargs": own, "reasoning_effort": effort}
    counter = load(model_dirs["qwen"], default_chat_template_kwargs=defaults)
    assert counter.chat(body).ids == oracle("qwen", default_chat_template_kwargs=defaults).chat(body)


def test_reasons_survive_a_process_boundary() -> None:
    import pickle

    for error in (NotExact("multimodal", "messages[0]"), BadPrompt("no", "messages")):
        assert vars(pickle.loads(pickle.dumps(error))) == vars(error)


def test_no_text_of_the_prompt_is_in_an_error(counters: dict[str, PromptCounter]) -> None:
    with pytest.raises(NotExact) as caught:
        counters["smollm2"].chat(
            with_part({"type": "image_url", "image_url": {"url": "secret"}, "text": "secret"})
        )
    assert "secret" not in str(caught.value)
    assert "messages[0].content[1]" in str(caught.value)
