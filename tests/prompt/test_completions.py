"""Completion prompts: text with the tokenizer's special tokens, or ids; both may be truncated."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.prompt import BadPrompt, NotExact, PromptCounter, load

HELLO = [{"role": "user", "content": "Hello there, how are you?"}]
TOKENIZERS = ["smollm2", "llama3", "llama2", "gpt_neox", "unigram", "wordpiece"]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("more", [{}, {"add_special_tokens": False}, {"echo": True, "max_tokens": 1}])
def test_text_has_the_engines_ids(
    name: str,
    more: dict[str, Any],
    counters: dict[str, PromptCounter],
    oracle: Callable[..., Any],
    texts: dict[str, str],
) -> None:
    for text in texts.values():
        body = {"prompt": text, **more}
        assert counters[name].completion(body).ids == oracle(name).completion(body), text


def test_odd_prompts_have_the_engines_ids(
    model: str,
    counters: dict[str, PromptCounter],
    oracle: Callable[..., Any],
    completions: dict[str, dict[str, Any]],
    refused: type[Exception],
) -> None:
    equal = 0
    for name, body in completions.items():
        try:
            ours: list[int] | None = counters[model].completion(body).ids
        except BadPrompt:
            ours = None
        except NotExact:
            assert body["truncate_prompt_tokens"] < 3, name  # hardly more than the tokenizer adds by itself
            continue
        try:
            assert ours == oracle(model).completion(body), name
        except refused:
            assert ours is None, name
        equal += ours is not None
    assert equal >= 50


def test_bos_is_added_unless_the_request_says_no(counters: dict[str, PromptCounter]) -> None:
    with_bos = counters["llama3"].completion({"prompt": "Hello"})
    without = counters["llama3"].completion({"prompt": "Hello", "add_special_tokens": False})
    assert with_bos.ids[1:] == without.ids
    assert with_bos.count == without.count + 1


@pytest.mark.parametrize("prompt", [[1, 2, 3], [[1, 2, 3]], ["Hello"], [""]])
def test_one_prompt_counts_however_it_is_wrapped(
    prompt: list[Any], counters: dict[str, PromptCounter], oracle: Callable[..., Any]
) -> None:
    body = {"prompt": prompt}
    assert counters["llama3"].completion(body).ids == oracle("llama3").completion(body)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"prompt": ["one", "two"]}, "prompt list"),
        ({"prompt": [[1], [2]]}, "prompt list"),
        ({"prompt_embeds": "AA=="}, "prompt_embeds"),
        ({"prompt": "def f(", "suffix": "return"}, "suffix"),
        ({"prompt": [1, True]}, "field type"),
        ({"prompt": [1, -1]}, "field type"),
        ({"prompt": [1, "a"]}, "field type"),
        ({"prompt": [["a"]]}, "field type"),
        ({"prompt": "a", "add_special_tokens": 1}, "field type"),
        ({"prompt": "a", "truncate_prompt_tokens": 0}, "truncation"),
        ({"prompt": "a", "kv_transfer_params": {"prompt_token_ids": [1]}}, "forwarded ids"),
    ],
)
def test_the_engine_must_count(body: dict[str, Any], reason: str, counters: dict[str, PromptCounter]) -> None:
    with pytest.raises(NotExact) as caught:
        counters["llama3"].completion(body)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    "body", [{}, {"prompt": None}, {"prompt": 5}, {"prompt": ""}, {"prompt": []}, {"prompt": "\udfff"}]
)
def test_a_bad_prompt_is_one_that_the_engine_refuses_too(
    body: dict[str, Any],
    counters: dict[str, PromptCounter],
    oracle: Callable[..., Any],
    refused: type[Exception],
) -> None:
    with pytest.raises(BadPrompt):
        counters["llama3"].completion(body)
    with pytest.raises(refused):
        oracle("llama3").completion(body)


@pytest.mark.parametrize("name", ["smollm2", "llama3", "wordpiece"])
@pytest.mark.parametrize("length", [-1, 4, 9, 1000])
@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("max_tokens", [None, 16])
def test_truncation_is_the_engines(
    name: str,
    length: int,
    side: str | None,
    max_tokens: int | None,
    loaded: Callable[..., PromptCounter],
    oracle: Callable[..., Any],
) -> None:
    # A context so short that -1 and the cut of the text before tokenizing both matter.
    limit = 1200 if length == 1000 else 20
    length = min(length, limit)
    counter, engine = loaded(name, max_model_len=limit), oracle(name, max_model_len=limit)
    cut = {"truncate_prompt_tokens": length, "truncation_side": side, "max_tokens": max_tokens}
    text = "".join(f"{i} ünd " for i in range(400))
    for more in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
        ids = {"prompt": list(range(100, 160)), **cut}
        assert counter.completion(ids).ids == engine.completion(ids)
        body = {"prompt": text, **cut, **more}
        assert counter.completion(body).ids == engine.completion(body)
        chat = {"messages": HELLO, **cut, **more}
        assert counter.chat(chat).ids == engine.chat(chat)


def test_truncation_that_hangs_on_an_unknown_context_is_the_engines_to_count(
    model_dirs: dict[str, Path],
) -> None:
    counter = load(model_dirs["llama3"])
    for cut in ({"truncate_prompt_tokens": -1}, {"truncate_prompt_tokens": 4, "truncation_side": "left"}):
        with pytest.raises(NotExact, match="truncation"):
            counter.chat({"messages": HELLO, **cut})
    assert counter.chat({"messages": HELLO, "truncate_prompt_tokens": 4}).count == 4


def test_completion_tokens_for_output_come_from_max_completion_tokens_in_chats(
    model_dirs: dict[str, Path], oracle: Callable[..., Any]
) -> None:
    counter, engine = load(model_dirs["llama3"], max_model_len=12), oracle("llama3", max_model_len=12)
    for more in ({"max_completion_tokens": 0, "max_tokens": 5}, {"max_completion_tokens": 5}, {}):
        body = {"messages": HELLO, "truncate_prompt_tokens": -1, **more}
        assert counter.chat(body).ids == engine.chat(body)
