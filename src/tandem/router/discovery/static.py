"""Engines named on the command line; they never change."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

from tandem.router.discovery.base import Member
from tandem.router.engines import EngineRole


class StaticDiscovery:
    def __init__(self, prefill: Iterable[str], decode: Iterable[str]) -> None:
        self._members = frozenset(
            [Member(url, EngineRole.PREFILL) for url in prefill]
            + [Member(url, EngineRole.DECODE) for url in decode]
        )

    async def watch(self) -> AsyncIterator[frozenset[Member]]:
        yield self._members
