"""Engines that a file lists. The file is watched; a bad one changes nothing but what is said of it."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable

from tandem.router.discovery.base import Discovery, Member
from tandem.router.discovery.engine_list import BadList, Subscriptions, read_engines
from tandem.router.discovery.trouble import Trouble

logger = logging.getLogger("tandem.router")

SIZE_LIMIT = 1 << 20
"""Bytes that the file may have."""

# Seconds after which a change is read again: one that is written in place may be seen half.
_SETTLING = 0.1


class FileDiscovery(Discovery):
    """Follows a file by reading it about once a second, which sees each way of replacing it: a rename, the
    symbolic links of a Kubernetes ConfigMap, writing in place.

    A file that is bad, missing or unreadable leaves the engines as they were: none at first.
    """

    def __init__(
        self,
        path: str,
        *,
        subscriptions: Subscriptions = lambda host: None,
        interval: float = 1.0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`subscriptions` is asked for engines without `kvEvents`; `interval` is seconds between reads."""
        self._path = path
        self._subscriptions = subscriptions
        self._interval = interval
        self._sleep = sleep
        self._members: frozenset[Member] | None = None
        self._trouble = Trouble(f"engines of the file {path}")

    @property
    def trouble(self) -> str | None:
        """What is wrong with the file now, where, and what comes of it."""
        return self._trouble.text

    async def watch(self) -> AsyncIterator[frozenset[Member]]:
        """See `Discovery.watch`."""
        told: frozenset[Member] | None = None
        async for content in self._contents():
            await self._take(content)
            members = self._members or frozenset()
            if members != told:
                told = members
                yield members

    async def _contents(self) -> AsyncIterator[bytes | str]:
        """What the file holds, or why it cannot be read, at first and after each change; each time when two
        reads in a row have found the same."""
        told: bytes | str | None = None
        before: bytes | str | None = None
        while True:
            found = await asyncio.to_thread(_read, self._path)
            if found != told and found == before:
                told = found
                yield found
            before = found
            await self._sleep(self._interval if found == told else _SETTLING)

    async def _take(self, content: bytes | str) -> None:
        if isinstance(content, str):
            self._tell(content)
            return
        try:
            # In a thread: ten thousand engines take half a second.
            members = await asyncio.to_thread(_parse, content, self._subscriptions)
        except BadList as error:
            self._tell(f"{error}. Correct it")
            return
        if not members:
            logger.warning(
                "the file %s lists no engines%s", self._path, ": all leave" if self._members else ""
            )
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


def _read(path: str) -> bytes | str:
    """The content of the file; as a str what is wrong and what to do."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return "it is not a regular file. Name one that can be read again and again"
        with open(path, "rb") as file:
            content = file.read(SIZE_LIMIT + 1)
    except FileNotFoundError:
        return "it does not exist. Create it"
    except OSError as error:
        return f"it cannot be read: {error.strerror}. Correct that"
    if len(content) > SIZE_LIMIT:
        return f"it has more than {SIZE_LIMIT:,} bytes. Make it smaller"
    return content


def _parse(content: bytes, subscriptions: Subscriptions) -> frozenset[Member]:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadList(f"byte {error.start + 1} is not UTF-8") from None
    return read_engines(text, subscriptions)
