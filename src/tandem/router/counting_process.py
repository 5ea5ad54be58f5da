"""Prompts are counted in a process of its own, by `counting_worker`; where it cannot, engines are asked."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from tandem.config import RouterConfig
from tandem.prompt import BadPrompt, NotExact
from tandem.router.classify import Api
from tandem.router.errors import ApiError
from tandem.router.helper_frames import Kind
from tandem.router.helper_process import HelperProcess, Limits, command

COMMAND = command("tandem.router.counting_worker")


@dataclass(frozen=True, slots=True)
class Loaded:
    """Why text, and why chats, cannot be counted at all with the files that the process has loaded; "" where
    they can."""

    inexact_text: str = ""
    inexact_chat: str = ""


class CountingProcess(HelperProcess):
    def __init__(
        self,
        config: RouterConfig,
        *,
        command: Sequence[str] = COMMAND,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            msgspec.json.encode(config),
            command=command,
            name="the counting process",
            meanwhile="engines count its prompts",
            limits=limits,
            clock=clock,
        )

    async def ready(self) -> Loaded:
        """Wait until the process has loaded the tokenizer. Raises Unavailable where its first try failed,
        Unusable where another would not help."""
        told = await self.started()
        return Loaded(*msgspec.json.decode(told)) if told else Loaded()

    async def count(self, api: Api, data: bytes) -> Sequence[int]:
        """The token ids of a request's prompt. `data`: the body as it came.

        Raises Unavailable; NotExact and BadPrompt as PromptCounter does; ApiError for no JSON object."""
        if api is Api.COMPLETIONS:
            kind, rest = await self.ask(Kind.COMPLETION, data)
        else:
            kind, rest = await self.ask(Kind.LONG_CHAT if self.is_huge(data) else Kind.CHAT, data)
        if kind is Kind.TOO_LONG:
            kind, rest = await self.ask(Kind.LONG_CHAT, data, huge=True)
        if kind is Kind.IDS:
            ids = array("I")
            ids.frombytes(rest)
            return ids
        raise _error(kind, rest)


def _error(kind: Kind, rest: bytes) -> Exception:
    first, second = msgspec.json.decode(rest)
    if kind is Kind.NOT_EXACT:
        return NotExact(first, second)
    if kind is Kind.BAD_PROMPT:
        return BadPrompt(first, second)
    return ApiError(400, first, param=second, quotes=True)
