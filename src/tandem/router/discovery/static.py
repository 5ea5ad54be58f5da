"""Engines named on the command line; they never change."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

from tandem.router.discovery.base import Discovery, Member


class StaticDiscovery(Discovery):
    def __init__(self, members: Iterable[Member]) -> None:
        self._members = frozenset(members)

    async def watch(self) -> AsyncIterator[frozenset[Member]]:
        yield self._members
