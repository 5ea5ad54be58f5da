"""Text to token ids and back: the model's own tokenizer, or words where there is no model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

import msgspec
from tokenizers import Tokenizer

from tandem.prompt import BadPrompt, LoadError, NotExact, PromptCounter, load
from tandem.sim.text import Style

_COMMON = """
    the a of and to in is it that was for on with as at by from or an be this are but not have had they his
    her she he we you all one two three more some time day year way man world life hand part place case week
    work fact point home water room story money month book night area word river garden winter letter paper
    road door city house light sound green white small large old young first last long great little own
    other right high next early good new few public same able each which when where how then there here what
    who into over after under between through before again still never always often once about
"""
_WORDS = tuple(_COMMON.split())

MAX_ID = 2**31 - 1


class Vocabulary(Protocol):
    """What an engine needs of a tokenizer. Methods raise BadPrompt for prompts that the model cannot take."""

    size: int
    style: Style

    def chat(self, body: Mapping[str, object]) -> list[int]: ...
    def completion(self, body: Mapping[str, object]) -> list[int]: ...
    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str: ...
    def text(self, token: int) -> str: ...
    def spelling(self, token: int) -> str: ...


class WordVocabulary:
    """A word, a mark or a space is a token, for engines without a model. Ids are alike in all processes."""

    eos = 2
    size = 49_152

    def __init__(self, answer_tokens: tuple[int, int]) -> None:
        self._text: dict[int, str] = {1: "<|im_start|>", 2: "<|im_end|>"}
        words = dict.fromkeys(self._id(f" {word}") for word in _WORDS)
        self.style = Style(tuple(words), self.eos, answer_tokens)

    def chat(self, body: Mapping[str, object]) -> list[int]:
        """Rendered in the manner of ChatML."""
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise BadPrompt(
                "Cannot apply chat template to an empty conversation. Provide at least one message."
            )
        ids: list[int] = []
        tools = body.get("tools")
        if tools:
            ids += self._encode(msgspec.json.encode(tools).decode())
        for message in messages:
            role, content = message.get("role"), message.get("content")
            text = content if isinstance(content, str) else "".join(_texts(content))
            ids += [1, *self._encode(f"{role}\n{text}"), 2]
        return [*ids, 1, *self._encode("assistant\n")]

    def completion(self, body: Mapping[str, object]) -> list[int]:
        prompt: Any = body["prompt"]
        return self._encode(prompt) if isinstance(prompt, str) else list(prompt)

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        return "".join("" if skip_special and i in (1, 2) else self.spelling(i) for i in ids)

    def text(self, token: int) -> str:
        return "" if token in (1, 2) else self.spelling(token)

    def spelling(self, token: int) -> str:
        return self._text.get(token, f" t{token}")

    def _encode(self, text: str) -> list[int]:
        return [self._id(piece) for piece in _PIECES.findall(text)]

    def _id(self, piece: str) -> int:
        number = 3 + crc32(piece.encode("utf-8", "replace")) % (self.size - 3)
        self._text.setdefault(number, piece)
        return number


_PIECES = re.compile(r" ?\w+| ?[^\w\s]|\s")


def _texts(content: object) -> list[str]:
    parts = content if isinstance(content, list) else []
    return [str(part["text"]) for part in parts if isinstance(part, dict) and "text" in part]


class ModelVocabulary:
    """The tokenizer and chat template in a model's folder, exact as vLLM has them."""

    def __init__(
        self, counter: PromptCounter, tokenizer: Tokenizer, eos: int, answer_tokens: tuple[int, int]
    ) -> None:
        self._counter = counter
        self._tokenizer = tokenizer
        self.size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self._texts: dict[int, str] = {}
        words = [tokenizer.encode(f" {word}", add_special_tokens=False).ids for word in _WORDS]
        single = dict.fromkeys(ids[0] for ids in words if len(ids) == 1)
        plain = [i for i in single if self.text(i).strip()]
        self.style = Style(plain or [i for i in range(self.size) if i != eos], eos, answer_tokens)

    def chat(self, body: Mapping[str, object]) -> list[int]:
        if isinstance(messages := body.get("messages"), list) and not messages:
            raise BadPrompt(
                "Cannot apply chat template to an empty conversation. Provide at least one message."
            )
        try:
            return self._counter.chat(body).ids
        except NotExact as error:
            raise BadPrompt(f"The simulator cannot render this chat: {error}") from None

    def completion(self, body: Mapping[str, object]) -> list[int]:
        try:
            return self._counter.completion(body).ids
        except NotExact as error:
            raise BadPrompt(f"The simulator cannot tokenize this prompt: {error}") from None

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def text(self, token: int) -> str:
        known = self._texts.get(token)
        if known is None:
            # Between two others, as decoders strip the space before a first word.
            known = self._texts[token] = self.decode([token], skip_special=True)
            if self.spelling(token).startswith(("▁", "Ġ")) and not known.startswith(" "):
                known = self._texts[token] = " " + known
        return known

    def spelling(self, token: int) -> str:
        """The vocabulary's own form, such as "Ġhelpful"."""
        return self._tokenizer.id_to_token(token) or ""


def of_model(
    folder: Path,
    *,
    tokenizer: Path | None = None,
    chat_template: str | None = None,
    content_format: str = "auto",
    max_model_len: int | None = None,
    exclude_tools_when_tool_choice_none: bool = False,
    default_chat_template_kwargs: Mapping[str, object] | None = None,
    answer_tokens: tuple[int, int],
) -> ModelVocabulary:
    """The vocabulary of the model in `folder`, with vLLM's settings. Raises LoadError."""
    counter = load(
        folder,
        tokenizer_dir=tokenizer,
        chat_template=chat_template,
        content_format=content_format,
        max_model_len=max_model_len,
        exclude_tools_when_tool_choice_none=exclude_tools_when_tool_choice_none,
        default_chat_template_kwargs=default_chat_template_kwargs,
    )
    if counter.inexact_text:
        raise LoadError(f"The simulator cannot tokenize for {folder}: {counter.inexact_text}.")
    model = Tokenizer.from_file(str((tokenizer or folder) / "tokenizer.json"))
    model.no_truncation()
    model.no_padding()
    return ModelVocabulary(counter, model, _eos(folder, model), answer_tokens)


def _eos(folder: Path, tokenizer: Tokenizer) -> int:
    for name in ("generation_config.json", "config.json"):
        try:
            value = msgspec.json.decode((folder / name).read_bytes()).get("eos_token_id")
        except (OSError, msgspec.DecodeError, AttributeError):
            continue
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, int):
            return value
    return int(tokenizer.get_vocab_size(with_added_tokens=True)) - 1
