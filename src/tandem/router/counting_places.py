"""Where prompts are counted without asking an engine: in the router's loop, or in processes of their own."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import ClassVar, Protocol

from tandem.config import RouterConfig
from tandem.prompt import MOST_TEXT, NotExact, PromptCounter, TooLong
from tandem.router.body import Body
from tandem.router.classify import Api
from tandem.router.counting_process import COMMAND, CountingProcess
from tandem.router.helper_process import Unusable

logger = logging.getLogger("tandem.router")

# What a byte of a list of token ids costs, in bytes of text.
_IDS_COST = 8

# Characters of a chat's text for each byte of the largest body that counts as small.
_TEXT = 2


class Place(Protocol):
    @property
    def advice(self) -> str:
        """What to check where an engine counts otherwise."""
        ...

    async def count(self, api: Api, body: Body) -> Sequence[int]:
        """The token ids of a request's prompt. Raises Unavailable, NotExact, BadPrompt, ApiError."""
        ...

    async def sample(self, api: Api, body: Body) -> Sequence[int]:
        """The same for a short prompt that is nobody's request."""
        ...

    async def aclose(self) -> None:
        """Nothing is counted there any more: prompts that wait get Unavailable."""
        ...


class InLoop:
    """The router's own files, loaded in its own process; large prompts go to another."""

    advice = "check --model-path, --tokenizer, --chat-template, --counted-model"

    def __init__(self, counter: PromptCounter, process: CountingProcess | None, large: int) -> None:
        """`large`: bytes of a body that goes to `process`, if there is one."""
        self._counter = counter
        self._process = process
        self._large = large

    async def count(self, api: Api, body: Body) -> Sequence[int]:
        if self._process is None:
            return self._counted(api, body, MOST_TEXT)
        if _is_large(api, body, self._large):
            return await self._process.count(api, body.data)
        try:
            return self._counted(api, body, _TEXT * self._large)
        except TooLong:  # a template makes much of little: of indented objects, say
            return await self._process.count(api, body.data)

    async def sample(self, api: Api, body: Body) -> Sequence[int]:
        return self._counted(api, body, MOST_TEXT)

    def _counted(self, api: Api, body: Body, most: int) -> Sequence[int]:
        fields = body.decoded()
        return (self._counter.chat(fields, most) if api is Api.CHAT else self._counter.completion(fields)).ids

    async def aclose(self) -> None:
        if self._process is not None:
            await self._process.aclose()


@dataclasses.dataclass(frozen=True, slots=True)
class InProcesses:
    """Files that came from elsewhere: they are neither loaded nor run in the router's own process, where to
    load them would hold up streams. Large prompts have a process of their own, lest others wait for them."""

    stack: AsyncExitStack
    """What ends the processes."""
    small: CountingProcess
    large: CountingProcess | None
    large_from: int
    """Bytes of a body that goes to `large`, if there is one."""
    inexact_chat: str = ""
    """Why chats cannot be counted, or ""."""
    advice: ClassVar[str] = (
        "if it serves the model files that were fetched, check that its --tokenizer, --chat-template and the "
        "like are the router's"
    )

    @classmethod
    async def start(cls, config: RouterConfig, model: Path) -> InProcesses:
        """Return when a model's files are loaded. Raises Unusable for files with which no prompt can be
        counted, Unavailable where it may go well another time."""
        config = dataclasses.replace(
            config, model_path=str(model), model_files_path=None, model_files_cache=None
        )
        large_from = config.count_in_process_bytes
        async with AsyncExitStack() as stack:
            # As urgent as the router itself; a text that is longer than a small body's is for another.
            command = (*COMMAND, "0", *([str(_TEXT * large_from)] if large_from else []))
            small = await stack.enter_async_context(CountingProcess(config, command=command))
            loaded = await small.ready()
            if loaded.inexact_text:
                raise Unusable(loaded.inexact_text)
            if loaded.inexact_chat:
                logger.warning("chats cannot be counted here, so engines count them: %s", loaded.inexact_chat)
            large = await stack.enter_async_context(CountingProcess(config)) if large_from else None
            small.beyond = large
            return cls(stack.pop_all(), small, large, large_from, loaded.inexact_chat)

    async def count(self, api: Api, body: Body) -> Sequence[int]:
        if self.large is not None and _is_large(api, body, self.large_from):
            return await self._count(self.large, api, body)
        return await self._count(self.small, api, body)

    async def sample(self, api: Api, body: Body) -> Sequence[int]:
        return await self._count(self.small, api, body)

    async def _count(self, process: CountingProcess, api: Api, body: Body) -> Sequence[int]:
        if api is Api.CHAT and self.inexact_chat:
            raise NotExact("model", self.inexact_chat)
        return await process.count(api, body.data)

    async def aclose(self) -> None:
        await self.stack.aclose()


def _is_large(api: Api, body: Body, large: int) -> bool:
    size = len(body.data)
    if size >= large:
        return True
    # A number is an object, so a list of ids costs many times what a text of its size does.
    return api is Api.COMPLETIONS and size * _IDS_COST >= large and body.ids is not None
