"""The tokenizer and chat template that a router's configuration names."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from tandem.config import RouterConfig
from tandem.prompt import PromptCounter, load

logger = logging.getLogger("tandem.router")


def load_counter(config: RouterConfig) -> PromptCounter | None:
    """The tokenizer and template that a configuration names, or None when engines shall count.

    Raises ValueError or OSError when the folder holds none that can be used.
    """
    folder = config.model_path or config.tokenizer
    if folder is None:
        return None
    counter = load(
        Path(folder),
        tokenizer_dir=Path(config.tokenizer) if config.tokenizer else None,
        chat_template=config.chat_template,
        content_format=config.chat_template_content_format,
        max_model_len=config.max_model_len,
        exclude_tools_when_tool_choice_none=config.exclude_tools_when_tool_choice_none,
        default_chat_template_kwargs=msgspec.json.decode(config.default_chat_template_kwargs or "{}"),
        cache_bytes=config.count_cache_bytes,
    )
    for what, why in (("any prompt", counter.inexact_text), ("chats", counter.inexact_chat)):
        if why:
            logger.warning("%s cannot be counted here, so engines count them: %s", what, why)
    return counter
