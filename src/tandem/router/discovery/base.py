"""The interface of a discovery source."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from tandem.router.engines import EngineRole


@dataclass(frozen=True)
class Member:
    """An engine as a source names it. `uid` differs between two engines that had the same address."""

    url: str
    role: EngineRole
    uid: str = ""


class Discovery(Protocol):
    def watch(self) -> AsyncIterator[frozenset[Member]]:
        """Yield the whole set of members at first and after each change."""
        ...
