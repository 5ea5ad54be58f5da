"""From a decoded request to the token ids that the engine will compute."""

import dataclasses
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Literal

from tandem.prompt import chat, tokenizer_files
from tandem.prompt.errors import BadPrompt, LoadError, NotExact, TooLong
from tandem.prompt.fast import fastest
from tandem.prompt.fields import FIELD_TYPE, boolean, integer
from tandem.prompt.messages import conversation
from tandem.prompt.segments import SegmentCache, markers
from tandem.prompt.template import ChatTemplate
from tandem.prompt.tokenizer import Encoder, ReferenceEncoder
from tandem.prompt.truncation import Truncation

# Of a completion request that gives none, or null (the OpenAI API's default).
_DEFAULT_MAX_TOKENS = 16

# Token ids are smaller in every tokenizer.
_NO_ID = 2**32

# Characters of a chat's text: four million tokens of English. What a template makes more of is refused.
MOST_TEXT = 16 * 2**20

# Bytes of pieces of chats that are remembered, with their ids: some four million tokens.
CACHE_BYTES = 32 * 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids of one prompt, as the engine sees it."""

    ids: list[int]

    @property
    def count(self) -> int:
        return len(self.ids)


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """The engine's own settings that change a prompt; each is named like vLLM's command-line flag.

    max_model_len: tokens of context; without it, requests whose truncation depends on it are not exact.
    """

    content_format: Literal["auto", "string", "openai"] = "auto"
    max_model_len: int | None = None
    exclude_tools_when_tool_choice_none: bool = False
    default_chat_template_kwargs: Mapping[str, object] = dataclasses.field(default_factory=dict)


class PromptCounter:
    """Counts the prompts of one model. Made by `load`. Of requests it keeps pieces of chats, in a bounded
    cache; threads may share it."""

    def __init__(
        self,
        encoder: Encoder | None,
        reference: ReferenceEncoder | None,
        templates: Mapping[str, ChatTemplate],
        special_tokens: Mapping[str, str],
        settings: Settings,
        *,
        inexact_text: str = "",
        inexact_chat: str = "",
        library: str = "",
    ) -> None:
        self._encoder = encoder
        self._reference = reference
        self._templates = templates
        self._special_tokens = special_tokens
        self._settings = settings
        #: Why text cannot be counted locally at all, or "" where it can.
        self.inexact_text = inexact_text
        #: Why chats cannot be counted locally at all, or "" where they can.
        self.inexact_chat = inexact_text or inexact_chat
        #: The library that tokenizes: "tokenizers", or "fastokens" where it gives the same ids.
        self.library = library

    @property
    def remembered_bytes(self) -> int:
        """Size of the pieces of chats that are kept, with their ids."""
        return self._encoder.size if isinstance(self._encoder, SegmentCache) else 0

    def chat(self, body: Mapping[str, object], most: int = MOST_TEXT) -> Tokens:
        """Counts a /v1/chat/completions request.

        body: the decoded JSON object. most: characters that its text may have. Raises NotExact or BadPrompt,
        and TooLong where `most` is below MOST_TEXT.
        """
        if self.inexact_chat:
            raise NotExact("model", self.inexact_chat)
        chat.refuse_what_only_the_engine_renders(body)
        truncation = Truncation.of(body, chat.max_output_tokens(body), self._settings.max_model_len)
        add_special_tokens = boolean(body, "add_special_tokens", False)
        arguments = chat.template_arguments(
            body,
            self._settings.default_chat_template_kwargs,
            self._settings.exclude_tools_when_tool_choice_none,
        )
        template = self._template(with_tools=arguments.get("tools") is not None)
        given = self._settings.content_format
        content_format = template.content_format if given == "auto" else given
        messages = conversation(body.get("messages"), content_parts=content_format == "openai")
        try:
            text = template.render(messages, self._special_tokens, arguments, most=min(most, MOST_TEXT))
        except TooLong:
            if most < MOST_TEXT:
                raise
            raise BadPrompt(
                f"The chat template makes more than {MOST_TEXT} characters of this request. Shorten its "
                "messages, or nest its tools and documents less deeply.",
                "messages",
            ) from None
        return Tokens(self._encode(text, add_special_tokens, truncation))

    def completion(self, body: Mapping[str, object]) -> Tokens:
        """Counts a /v1/completions request with one prompt, text or token ids.

        body: the decoded JSON object. Raises NotExact or BadPrompt.
        """
        for name in ("prompt_embeds", "suffix"):
            if body.get(name) is not None:
                raise NotExact(name)
        chat.refuse_forwarded_ids(body)
        prompt = _only_prompt(body.get("prompt"))
        max_tokens = integer(body, "max_tokens")
        asked = _DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens
        truncation = Truncation.of(body, asked, self._settings.max_model_len)
        if isinstance(prompt, str):
            return Tokens(self._encode(prompt, boolean(body, "add_special_tokens", True), truncation))
        ids = [id for id in prompt if type(id) is int and 0 <= id < _NO_ID]
        if len(ids) != len(prompt):
            raise NotExact(FIELD_TYPE, "prompt holds more than token ids")
        return Tokens(truncation.cut(ids) if truncation else ids)

    def _template(self, *, with_tools: bool) -> ChatTemplate:
        if with_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        return self._templates["default"]

    def _encode(self, text: str, add_special_tokens: bool, truncation: Truncation | None) -> list[int]:
        if self.inexact_text or self._encoder is None or self._reference is None:
            raise NotExact("model", self.inexact_text)
        if truncation is None:
            longest = self._settings.max_model_len
            if longest is not None and len(text) > longest * self._reference.longest_token:
                # As vLLM, which does not tokenize it either: megabytes would take minutes and gigabytes.
                raise BadPrompt(
                    f"The prompt has {len(text)} characters, more than {longest} tokens can hold."
                )
            return self._encoder.encode(text, add_special_tokens)
        if truncation.side is None:
            return self._reference.encode_truncated(text, add_special_tokens, truncation.length, "left")
        text = truncation.cut_text(text, self._reference.longest_token)
        return truncation.cut(self._encoder.encode(text, add_special_tokens))


def _only_prompt(prompt: object) -> str | list[object]:
    """The one prompt of a completion request: text, or what should be token ids."""
    if not isinstance(prompt, str | list):
        raise BadPrompt("prompt must be a string or a list.", "prompt")
    if not prompt:
        raise BadPrompt("prompt must not be empty.", "prompt")
    if isinstance(prompt, str) or not isinstance(prompt[0], str | list):
        return prompt
    if len(prompt) > 1:
        raise NotExact("prompt list")
    return prompt[0]


def load(
    model_dir: Path,
    *,
    tokenizer_dir: Path | None = None,
    chat_template: str | None = None,
    content_format: str = "auto",
    max_model_len: int | None = None,
    exclude_tools_when_tool_choice_none: bool = False,
    default_chat_template_kwargs: Mapping[str, object] | None = None,
    cache_bytes: int = CACHE_BYTES,
    fast: bool = True,
    now: Callable[[], datetime] = datetime.now,
) -> PromptCounter:
    """Reads a model's tokenizer and chat template as vLLM would with the same arguments.

    model_dir: holds config.json, and the tokenizer's files unless tokenizer_dir does.
    chat_template: vLLM's --chat-template: a file, or the template itself.
    content_format: vLLM's --chat-template-content-format: auto, string or openai.
    max_model_len, exclude_tools_when_tool_choice_none, default_chat_template_kwargs: as vLLM has them.
    cache_bytes: how much of chats is remembered, so that it is not tokenized again; 0 = nothing.
    fast: whether a faster library than the reference one may tokenize, where it gives the same ids.
    now: the clock of templates that print the date.
    Raises LoadError for files that cannot be used. A model that vLLM does not render by tokenizer.json and a
    Jinja template loads too; its counter then raises NotExact, and `inexact_text` and `inexact_chat` say why.
    """
    if content_format not in ("auto", "string", "openai"):
        raise LoadError(f"content_format is {content_format!r}; it must be auto, string or openai.")
    if not model_dir.is_dir():
        raise LoadError(f"{model_dir} is no directory. Give the one that holds the model's config.json.")
    model_config = tokenizer_files.read_object(model_dir / "config.json")
    directory = tokenizer_dir or model_dir
    files = tokenizer_files.read(directory)
    templates: dict[str, ChatTemplate] = {}
    inexact_text = files.inexact or chat.own_renderer(model_config, directory)
    inexact_chat = chat.own_chat_format(model_config, directory)
    sources = chat.template_sources(chat_template, files.chat_templates)
    try:
        templates = {name: ChatTemplate(source, now=now) for name, source in sources.items()}
    except NotExact as e:
        inexact_chat = inexact_chat or e.detail
    if "default" not in templates:
        inexact_chat = inexact_chat or f"there is no chat template in {directory}"
    settings = Settings(
        "auto" if content_format == "auto" else "string" if content_format == "string" else "openai",
        max_model_len,
        exclude_tools_when_tool_choice_none,
        dict(default_chat_template_kwargs or {}),
    )
    encoder: Encoder | None = None
    library = ""
    if (reference := files.encoder) is not None:
        encoder, library = fastest(reference) if fast else (reference, "tokenizers")
        encoder = SegmentCache(encoder, _cuts(reference, files.special_tokens, sources), cache_bytes)
    return PromptCounter(
        encoder,
        reference,
        templates,
        files.special_tokens,
        settings,
        inexact_text=inexact_text,
        inexact_chat=inexact_chat,
        library=library,
    )


def _cuts(
    reference: ReferenceEncoder, special_tokens: Mapping[str, str], templates: Mapping[str, str]
) -> list[str]:
    """The markers that the model's prompts have: those that a template spells out or knows by name."""
    spelled = "\n".join(templates.values())
    named = set(special_tokens.values())
    safe = markers(reference.added_tokens, splits_special_tokens=reference.splits_special_tokens)
    return [marker for marker in safe if marker in named or marker in spelled]
