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
    """A source of engines. What else it tells of itself than its members may be left as it is here."""

    def watch(self) -> AsyncIterator[frozenset[Member]]:
        """Yield the whole set of members at first and after each change."""
        ...

    @property
    def trouble(self) -> str | None:
        """What is wrong with it now, and what comes of it."""
        return None

    @property
    def age(self) -> float | None:
        """Seconds since a source that is watched was last heard, infinite before the first time; None for
        one that is asked again and again, or never changes."""
        return None

    @property
    def missing(self) -> str | None:
        """Why it knows too little for a router to be ready, if so."""
        return None
