"""What a client may be answered while things go wrong, and what not.

The policy (docs/concepts.md) saves a request before its first byte as long as a decode engine is there that
nothing is done to. Who did what to whom, and when, the soak knows best: it did it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

ROUTER = "router"


class End(StrEnum):
    """How one exchange of a client ended."""

    RIGHT = "whole and right"
    LEFT = "the client left"
    BROKEN = "broken off with an error event"
    WAIT = "503 with Retry-After"
    ERROR = "an error"
    CUT = "the connection broke"
    AWAY = "nobody listened"
    # What nothing excuses:
    WRONG = "a wrong answer"
    HALF = "half an answer that looks whole"
    NONE = "no answer"


@dataclass
class Spell:
    """A time in which something was done to a process, or it was not back in use yet. Seconds."""

    begin: float
    end: float = inf


@dataclass
class Timeline:
    """By process."""

    spells: dict[str, list[Spell]] = field(default_factory=dict)

    def strike(self, who: str, now: float) -> None:
        if self.is_well(who):
            self.spells.setdefault(who, []).append(Spell(now))

    def recover(self, who: str, now: float) -> None:
        if not self.is_well(who):
            self.spells[who][-1].end = now

    def is_well(self, who: str) -> bool:
        return not (known := self.spells.get(who)) or known[-1].end < inf

    def was_well(self, who: str, begin: float, end: float) -> bool:
        """All the time between."""
        return all(spell.end <= begin or end <= spell.begin for spell in self.spells.get(who, ()))


@dataclass(frozen=True)
class Exchange:
    """One try of a client. `decoder`: the engine that answered, as far as it is known."""

    end: End
    begun: float
    ended: float
    is_long: bool
    decoder: str | None = None
    detail: str = ""


def broken(
    exchange: Exchange, timeline: Timeline, prefillers: Collection[str], decoders: Collection[str]
) -> str | None:
    """Which promise was broken in an exchange; None: none."""

    def was_well(who: str) -> bool:
        return timeline.was_well(who, exchange.begun, exchange.ended)

    match exchange.end:
        case End.RIGHT | End.LEFT:
            return None
        case End.WRONG | End.HALF | End.NONE:
            return f"{exchange.end}: {exchange.detail}"
        case _ if not was_well(ROUTER):
            return None
        case End.CUT | End.AWAY:
            return f"{exchange.end}, and nothing was done to the router: {exchange.detail}"
        case End.BROKEN:
            if exchange.decoder is None or was_well(exchange.decoder):
                return f"a stream broke off, and nothing was done to its decoder: {exchange.detail}"
            return None
        case End.WAIT if exchange.is_long and not any(map(was_well, prefillers)):
            return None  # decoders compute no more long prompts at once than they may
        case _:
            if any(map(was_well, decoders)):
                return f"{exchange.end}, though a decoder was well all the time: {exchange.detail}"
            return None
