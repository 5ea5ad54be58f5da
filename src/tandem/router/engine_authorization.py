"""What engines get in the header `Authorization`: what the client sent, nothing, or the router's own key."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable

from tandem.config import RouterConfig
from tandem.http import Headers
from tandem.router.trouble import Trouble
from tandem.router.watched_file import WatchedFile

logger = logging.getLogger("tandem.router")

_SIZE_LIMIT = 4096
"""Bytes of the key's file."""

_KEY = re.compile(rb"[\x21-\x7e]+")
_NAME = b"authorization"


class EngineAuthorization:
    """With a key every engine gets it with every call, also with the router's own, and no client's reaches an
    engine. Its file is read at the start, where a bad one raises ValueError, and again when it changes, where
    a bad one leaves the key as it is."""

    def __init__(
        self, config: RouterConfig, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self.passes = config.passes_authorization
        """Whether engines get what clients say."""
        self._field: tuple[bytes, bytes] | None = None
        self._file: WatchedFile | None = None
        if (path := config.engine_key_file) is not None:
            self._file = WatchedFile(path, size_limit=_SIZE_LIMIT, sleep=sleep)
            self._trouble = Trouble(f"the engines' key of the file {path}")
            if (wrong := self._take(self._file.read())) is not None:
                raise ValueError(f"--engine-key-file: {path}: {wrong}")

    @property
    def missing(self) -> str:
        """What to do about an engine that answers that it does not know who calls."""
        if self._file is None:
            return "give the key that it asks for by --engine-key-file"
        return f"its key is not that of {self._file.path} (--engine-key-file)"

    def applied(self, headers: Headers) -> Headers:
        """The headers of a call to an engine."""
        if self.passes:
            return headers
        kept = [pair for pair in headers if pair[0] != _NAME]
        if self._field is not None:
            kept.append(self._field)
        return kept

    async def follow(self) -> None:
        """Keep to the file, if there is one, until cancelled."""
        if self._file is None:
            return
        async for content in self._file.contents():
            wrong = self._take(content)
            if wrong is None:
                self._trouble.over()
            else:
                self._trouble.tell(f"{wrong}; until then the key that it had before stays")

    def _take(self, content: bytes | str) -> str | None:
        """Why it is no key, and what to do."""
        if isinstance(content, str):
            return content
        key = content.strip()
        if not _KEY.fullmatch(key):
            return "it is not one word of printable ASCII. Put the engines' key there, and nothing else"
        self._field = _NAME, b"Bearer " + key
        return None
