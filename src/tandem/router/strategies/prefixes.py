"""What is known of which engine holds which prefix: the interface between indices and the strategies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tandem.router.engines import Engine
from tandem.router.strategies.base import Prompt


class Hit(NamedTuple):
    """What an engine's cache gives for a prompt, in tokens; whole blocks, and never the whole prompt."""

    tokens: int = 0
    """What it holds, in any tier of its memory."""
    host: int = 0
    """The part of `tokens` that has to be loaded from the host's memory first."""
    rank: int | None = None
    """The data-parallel rank that holds them; None: not known."""
    coming: int = 0
    """What it will hold, where more, once it has computed what was sent to it."""


MISS = Hit()


class Match(Protocol):
    """What is known of one prompt."""

    def hit(self, engine: Engine) -> Hit: ...

    def leaders(self, most: int) -> Sequence[Engine]:
        """A few of the engines that hold the most of it; none where nobody holds any."""
        ...


class Prefixes(Protocol):
    def match(self, prompt: Prompt, candidates: Sequence[Engine], start: int) -> Match:
        """`start`: any number from 0; of equal leaders, others come first with another one."""
        ...

    def sent(self, prompt: Prompt, engine: Engine) -> object: ...

    def gone(self, engine: Engine) -> None: ...
