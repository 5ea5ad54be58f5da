"""The interface of a discovery source."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from tandem.config import EngineSpec, Subscription
from tandem.router.engines import EngineRole


@dataclass(frozen=True)
class Member:
    """An engine as a source names it. Another `uid`, label or subscription makes it another engine."""

    url: str
    role: EngineRole
    uid: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    """Sorted by name; see `EngineSpec`."""
    kv_events: Subscription | None = None

    @classmethod
    def of(cls, spec: EngineSpec, role: EngineRole, uid: str = "") -> Member:
        return cls(spec.url, role, uid, spec.labels, spec.kv_events)


class Discovery(Protocol):
    def watch(self) -> AsyncIterator[frozenset[Member]]:
        """Yield the whole set of members at first and after each change."""
        ...
