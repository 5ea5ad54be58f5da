"""A faster tokenizer library is used where it gives the ids of the reference, and only there."""

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer

from tandem.prompt import BadPrompt, PromptCounter
from tandem.prompt.fast import FastEncoder, fastest
from tandem.prompt.tokenizer import ReferenceEncoder


@pytest.fixture
def reference(model_dirs: dict[str, Path]) -> ReferenceEncoder:
    return ReferenceEncoder(Tokenizer.from_file(str(model_dirs["llama3"] / "tokenizer.json")))


class PanicException(BaseException):
    """What a library written in Rust raises when it panics."""


def library(change: Callable[[str, list[int]], list[int]]) -> Callable[[str], Any]:
    """A fast library that gives the reference's ids, but for what `change` makes of them."""

    def open_it(document: str) -> Any:
        tokenizer = Tokenizer.from_str(document)

        def encode(text: str, add_special_tokens: bool, split: bool) -> Any:
            ids = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            return SimpleNamespace(ids=change(text, ids))

        return SimpleNamespace(encode=encode)

    return open_it


def test_the_families_that_it_takes_are_tokenized_by_it(counters: dict[str, PromptCounter]) -> None:
    fast = {name for name, counter in counters.items() if counter.library == "fastokens"}
    assert fast >= {"smollm2", "llama3", "qwen", "gpt2", "gemma", "deepseek"}
    slow = {name for name, counter in counters.items() if counter.library == "tokenizers"}
    assert slow == {"unigram", "wordpiece", "bert", "mon", "llama2", "llama2 legacy", "mistral"}


def test_equal_ids_are_taken_from_it(reference: ReferenceEncoder) -> None:
    seen = []
    encoder, name = fastest(reference, library(lambda text, ids: seen.append(text) or ids))
    assert name == "fastokens"
    seen.clear()
    assert encoder.encode("Hello", True) == reference.encode("Hello", True)
    assert seen == ["Hello"]


@pytest.mark.parametrize(
    "differs",
    [
        lambda text: "🏳️‍🌈" in text,  # emoji
        lambda text: "\x1b" in text,  # one control character
        lambda text: "\u0e01" in text,  # one script
        lambda text: "<|eot_id|><|eot_id|>" in text,  # the model's own token, twice
        lambda text: "    " in text,  # a run of spaces
    ],
)
def test_a_difference_is_found_at_start_and_said_loudly(
    differs: Callable[[str], bool], reference: ReferenceEncoder, caplog: pytest.LogCaptureFixture
) -> None:
    encoder, name = fastest(reference, library(lambda text, ids: [*ids, 0] if differs(text) else ids))
    assert (encoder, name) == (reference, "tokenizers")
    (error,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "other ids than tokenizers" in error.getMessage()


@pytest.mark.parametrize("error", [ValueError("unsupported pre-tokenizer"), PanicException("index")])
def test_a_tokenizer_that_it_does_not_take_is_left_to_the_reference(
    error: BaseException, reference: ReferenceEncoder, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(document: str) -> Any:
        raise error

    with caplog.at_level(logging.INFO):
        assert fastest(reference, refuse) == (reference, "tokenizers")
    assert "does not take this tokenizer" in caplog.text


def test_a_text_that_it_refuses_goes_to_the_reference(reference: ReferenceEncoder) -> None:
    def refuse(text: str, ids: list[int]) -> list[int]:
        if "b" in text:
            raise ValueError("a byte that the vocabulary lacks")
        return [0]

    encoder = FastEncoder(library(refuse)(reference.to_json()), reference)
    assert encoder.encode("abc", False) == reference.encode("abc", False)
    assert encoder.encode("a", False) == [0], "others still do not"


def test_after_a_panic_it_is_not_asked_again(
    reference: ReferenceEncoder, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    def panic(text: str, ids: list[int]) -> list[int]:
        asked.append(text)
        raise PanicException

    encoder = FastEncoder(library(panic)(reference.to_json()), reference)
    assert [encoder.encode(t, False) for t in "ab"] == [reference.encode(t, False) for t in "ab"]
    assert asked == ["a"]
    assert "PanicException" in caplog.text


def test_the_wish_to_end_the_process_is_no_panic(reference: ReferenceEncoder) -> None:
    def interrupt(text: str, ids: list[int]) -> list[int]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        FastEncoder(library(interrupt)(reference.to_json()), reference).encode("a", False)


def test_text_that_is_no_unicode_is_refused(counters: dict[str, PromptCounter]) -> None:
    for name in ("llama3", "bert"):
        with pytest.raises(BadPrompt, match="surrogate"):
            counters[name].completion({"prompt": "a\ud800"})
