"""Token ids of chats equal vLLM's own, for every conversation of the corpus and every model."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tandem.prompt import BadPrompt, NotExact, PromptCounter, load

Conversations = dict[str, dict[str, Any]]


def differences(
    counter: PromptCounter, engine: Any, conversations: Conversations, refused: type[Exception]
) -> tuple[list[str], int]:
    """What differs from the engine, by conversation; and how many have the engine's ids.

    One kind of request is left to the engine: fewer tokens kept than the tokenizer adds by itself."""
    wrong, equal = [], 0
    for name, body in conversations.items():
        try:
            expected: list[int] | str = engine.chat(body)
        except refused as e:
            expected = str(e)
        try:
            ours: list[int] | str = counter.chat(body).ids
        except BadPrompt as e:
            ours = e.message
        except NotExact as e:
            if e.reason == "truncation" and body["truncate_prompt_tokens"] == 1:
                continue
            wrong.append(f"{name}: not exact, {e}")
            continue
        if ours == expected:
            equal += isinstance(ours, list)
        elif isinstance(ours, list) and isinstance(expected, list):
            wrong.append(f"{name}: {len(ours)} tokens, the engine has {len(expected)}")
        elif isinstance(ours, list) or isinstance(expected, list):
            wrong.append(f"{name}: {str(ours)[:200]!r}, the engine: {str(expected)[:200]!r}")
    return wrong, equal


def test_every_conversation_has_the_engines_ids_or_its_refusal(
    model: str,
    counters: dict[str, PromptCounter],
    oracle: Callable[..., Any],
    conversations: Conversations,
    refused: type[Exception],
) -> None:
    wrong, equal = differences(counters[model], oracle(model), conversations, refused)
    assert not wrong
    assert equal >= 180  # the strictest template refuses the rest


@pytest.mark.parametrize("content_format", ["string", "openai"])
@pytest.mark.parametrize("name", ["llama2 legacy", "qwen"])
def test_a_forced_content_format_is_the_engines(
    name: str,
    content_format: str,
    model_dirs: dict[str, Path],
    oracle: Callable[..., Any],
    conversations: Conversations,
    refused: type[Exception],
) -> None:
    counter = load(model_dirs[name], content_format=content_format, max_model_len=131_072)
    engine = oracle(name, chat_template_content_format=content_format)
    wrong, equal = differences(counter, engine, conversations, refused)
    assert not wrong
    assert equal >= 90


def test_the_corpus_is_wide(counters: dict[str, PromptCounter], conversations: Conversations) -> None:
    counts = [counters["smollm2"].chat(body).count for body in conversations.values()]
    assert len(counts) > 200
    assert (min(counts), max(counts) > 20_000) == (1, True)


def test_a_hundred_thousand_tokens_have_the_engines_ids(
    model: str, counters: dict[str, PromptCounter], oracle: Callable[..., Any], texts: dict[str, str]
) -> None:
    unit = "\n".join(texts.values())

    def chat(times: int) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": unit * times}]}

    body = chat(100_000 * 10 // counters[model].chat(chat(10)).count + 1)
    tokens = counters[model].chat(body)
    assert 98_000 < tokens.count < 105_000
    assert tokens.ids == oracle(model).chat(body)


def test_calls_with_arguments_that_are_no_string_are_the_engines_to_judge(
    counters: dict[str, PromptCounter],
    oracle: Callable[..., Any],
    conversations: Conversations,
    with_objects: Callable[[dict[str, Any]], dict[str, Any]],
    refused: type[Exception],
) -> None:
    tried = 0
    for name, body in conversations.items():
        if not name.startswith("generated") or "tool_calls" not in str(body):
            continue
        tried += 1
        with pytest.raises(NotExact, match="tool calls"):
            counters["qwen"].chat(with_objects(body))
        with pytest.raises(refused):
            oracle("qwen").chat(with_objects(body))
    assert tried > 10


def test_counting_leaves_the_request_as_it_is(
    model_dirs: dict[str, Path], conversations: Conversations
) -> None:
    before = deepcopy(conversations)
    counter = load(model_dirs["gpt_neox"], max_model_len=131_072)
    for body in conversations.values():
        counter.chat(body)
    assert conversations == before
