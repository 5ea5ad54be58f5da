"""Several sources of engines as one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass

from tandem.router.discovery.base import Discovery, Member

logger = logging.getLogger("tandem.router")

_RETRY = 5.0  # seconds until a source that failed is watched again


@dataclass(frozen=True)
class Source:
    """How it stands with one source. `engines` counts all that it names, in use or not."""

    name: str
    engines: int
    trouble: str | None
    age: float | None = None
    """See `Discovery.age`."""


class MergedDiscovery(Discovery):
    """The union of sources. Of an engine that several name, what the first of them says counts.

    A source that fails keeps the engines it named, and is watched again; the others go on.
    """

    def __init__(
        self,
        sources: Mapping[str, Discovery],
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`sources` by name, the one that counts most first."""
        self._sources = dict(sources)
        self._sleep = sleep
        self._found: dict[str, frozenset[Member]] = {}
        self._failures: dict[str, str] = {}
        self._twice: set[tuple[str, str, str]] = set()

    def sources(self) -> list[Source]:
        """How it stands with each source."""
        return [
            Source(
                name,
                len(self._found.get(name, ())),
                self._failures.get(name) or source.trouble,
                source.age,
            )
            for name, source in self._sources.items()
        ]

    @property
    def missing(self) -> str | None:
        """Why a source knows too little for a router to be ready, if so."""
        told = (source.missing for source in self._sources.values())
        return next(filter(None, told), None)

    async def watch(self) -> AsyncIterator[frozenset[Member]]:
        """See `Discovery.watch`. Begins with the first source that has spoken, and never ends."""
        changed = asyncio.Event()
        if self._found:  # watched again: what is known must not leave
            changed.set()
        tasks = [
            asyncio.create_task(self._follow(name, source, changed)) for name, source in self._sources.items()
        ]
        told: frozenset[Member] | None = None
        try:
            while True:
                await changed.wait()
                changed.clear()
                members = self._union()
                if members != told:
                    told = members
                    yield members
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, name: str, source: Discovery, changed: asyncio.Event) -> None:
        while True:
            try:
                async for members in source.watch():
                    if self._failures.pop(name, None) is not None:
                        logger.info("the source of engines %r works again", name)
                    self._found[name] = members
                    changed.set()
                return
            except Exception as error:
                failure = f"it failed ({type(error).__name__}: {error}) and is tried again"
                if self._failures.get(name) != failure:
                    logger.exception("the source of engines %r: %s", name, failure)
                self._failures[name] = failure
            await self._sleep(_RETRY)

    def _union(self) -> frozenset[Member]:
        counts: dict[str, tuple[str, Member]] = {}
        twice: set[tuple[str, str, str]] = set()
        for name in self._sources:
            for member in self._found.get(name, ()):
                first, _ = counts.setdefault(member.url, (name, member))
                if first != name:
                    twice.add((first, name, member.url))
        self._tell(twice - self._twice)
        self._twice = twice
        return frozenset(member for _, member in counts.values())

    def _tell(self, twice: set[tuple[str, str, str]]) -> None:
        for first, second in sorted({pair[:2] for pair in twice}):
            urls = sorted(url for a, b, url in twice if (a, b) == (first, second))
            logger.warning(
                "%d engines of the source %r are named by %r too, which counts: %s%s",
                len(urls),
                second,
                first,
                ", ".join(urls[:3]),
                ", …" if len(urls) > 3 else "",
            )
