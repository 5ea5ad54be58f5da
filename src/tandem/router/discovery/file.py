"""Engines that a file lists. The file is watched; a bad one changes nothing but what is said of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from tandem.router.discovery.base import Discovery, Member
from tandem.router.discovery.engine_list import Subscriptions, read_engines
from tandem.router.listing import BadList, decoded
from tandem.router.trouble import Trouble
from tandem.router.watched_file import WatchedFile

logger = logging.getLogger("tandem.router")

SIZE_LIMIT = 1 << 20
"""Bytes that the file may have."""


class FileDiscovery(Discovery):
    """A file that is bad, missing or unreadable leaves the engines as they were: none at first."""

    def __init__(
        self,
        path: str,
        *,
        subscriptions: Subscriptions = lambda host: None,
        interval: float = 1.0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`subscriptions` is asked for engines without `kvEvents`; `interval` is seconds between reads."""
        self._file = WatchedFile(path, size_limit=SIZE_LIMIT, interval=interval, sleep=sleep)
        self._subscriptions = subscriptions
        self._members: frozenset[Member] | None = None
        self._trouble = Trouble(f"engines of the file {path}")

    @property
    def trouble(self) -> str | None:
        """What is wrong with the file now, where, and what comes of it."""
        return self._trouble.text

    async def watch(self) -> AsyncIterator[frozenset[Member]]:
        """See `Discovery.watch`."""
        told: frozenset[Member] | None = None
        async for content in self._file.contents():
            await self._take(content)
            members = self._members or frozenset()
            if members != told:
                told = members
                yield members

    async def _take(self, content: bytes | str) -> None:
        if isinstance(content, str):
            self._tell(content)
            return
        try:
            # In a thread: ten thousand engines take half a second.
            members = await asyncio.to_thread(lambda: read_engines(decoded(content), self._subscriptions))
        except BadList as error:
            self._tell(f"{error}. Correct it")
            return
        if not members:
            left = ": all leave" if self._members else ""
            logger.warning("the file %s lists no engines%s", self._file.path, left)
        self._members = members
        self._trouble.over()

    def _tell(self, what: str) -> None:
        known = self._members
        then = (
            "until then there are none from it"
            if known is None
            else f"until then the {len(known)} that it listed before stay"
        )
        self._trouble.tell(f"{what}; {then}")
