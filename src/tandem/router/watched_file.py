"""A file that is read again whenever it changes."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable

# Seconds after which a change is read again: one that is written in place may be seen half.
_SETTLING = 0.1


class WatchedFile:
    """Reads a file about once a second, which sees each way of replacing it: a rename, the symbolic links of
    a Kubernetes ConfigMap or Secret, writing in place."""

    def __init__(
        self,
        path: str,
        *,
        size_limit: int,
        interval: float = 1.0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`size_limit` in bytes; `interval` is seconds between reads."""
        self.path = path
        self._size_limit = size_limit
        self._interval = interval
        self._sleep = sleep

    def read(self) -> bytes | str:
        """The content of the file; as a str what is wrong and what to do."""
        try:
            if not stat.S_ISREG(os.stat(self.path).st_mode):
                return "it is not a regular file. Name one that can be read again and again"
            with open(self.path, "rb") as file:
                content = file.read(self._size_limit + 1)
        except FileNotFoundError:
            return "it does not exist. Create it"
        except (OSError, ValueError) as error:  # ValueError: a path with a NUL
            what = error.strerror if isinstance(error, OSError) else error
            return f"it cannot be read: {what}. Correct that"
        if len(content) > self._size_limit:
            return f"it has more than {self._size_limit:,} bytes. Make it smaller"
        return content

    async def contents(self) -> AsyncIterator[bytes | str]:
        """What `read` gives, at first and after each change, for ever; each time when two reads in a row have
        found the same."""
        told: bytes | str | None = None
        before: bytes | str | None = None
        while True:
            found = await asyncio.to_thread(self.read)
            if found != told and found == before:
                told = found
                yield found
            before = found
            await self._sleep(self._interval if found == told else _SETTLING)
