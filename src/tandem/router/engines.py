"""The engines a router knows: their state, their load, and which pairs have been proved to work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tandem.http import Origin


class EngineRole(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class State(StrEnum):
    WAITING = "waiting"  # not answering yet, or lost
    READY = "ready"  # answered and passed its canaries


@dataclass(eq=False, slots=True)
class Engine:
    """One engine. Identity is the object: an engine that leaves and returns is another one."""

    url: str
    role: EngineRole
    origin: Origin
    state: State = State.WAITING
    why: str = "not contacted yet"
    in_flight: int = 0
    models: list[dict[str, Any]] = field(default_factory=list)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count a request as in flight for the length of a block, however it ends."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


class Fleet:
    """All engines of an endpoint. Changed by discovery and canaries, read by the request engine."""

    def __init__(self) -> None:
        self.engines: list[Engine] = []
        self._proved: set[tuple[Engine, Engine]] = set()

    def add(self, engine: Engine) -> None:
        self.engines.append(engine)

    def remove(self, engine: Engine) -> None:
        self.engines.remove(engine)
        self.lost(engine, "removed")

    def ready(self, role: EngineRole) -> list[Engine]:
        return [e for e in self.engines if e.role is role and e.state is State.READY]

    def of(self, role: EngineRole) -> list[Engine]:
        return [e for e in self.engines if e.role is role]

    def prefillers_for(self, decoder: Engine) -> list[Engine]:
        """Ready prefillers whose KV this decoder has been seen to read."""
        return [p for p in self.ready(EngineRole.PREFILL) if (p, decoder) in self._proved]

    def prove(self, prefiller: Engine, decoder: Engine) -> None:
        self._proved.add((prefiller, decoder))

    def is_proved(self, prefiller: Engine, decoder: Engine) -> bool:
        return (prefiller, decoder) in self._proved

    def lost(self, engine: Engine, why: str) -> None:
        """Take an engine out of use until it has passed its canaries again."""
        engine.state = State.WAITING
        engine.why = why
        self._proved = {pair for pair in self._proved if engine not in pair}

    @property
    def missing(self) -> str | None:
        """Why the endpoint cannot serve as configured yet, or None when it can: a ready decoder, and,
        where prefillers are configured, a proved pair."""
        decoders = self.ready(EngineRole.DECODE)
        if not decoders:
            return "no decode engine is ready: " + self._whys(EngineRole.DECODE)
        if self.of(EngineRole.PREFILL) and not any(self.prefillers_for(d) for d in decoders):
            return "no prefill engine is ready: " + self._whys(EngineRole.PREFILL)
        return None

    @property
    def unproved(self) -> list[str]:
        """Engines that are not in use, with the reason, and pairs across which no KV has gone yet."""
        waiting = [f"{e.role.value} {e.url}: {e.why}" for e in self.engines if e.state is State.WAITING]
        prefillers, decoders = self.ready(EngineRole.PREFILL), self.ready(EngineRole.DECODE)
        return waiting + [
            f"{p.url} with {d.url}: no canary yet"
            for p in prefillers
            for d in decoders
            if (p, d) not in self._proved
        ]

    def _whys(self, role: EngineRole) -> str:
        return "; ".join(f"{e.url}: {e.why}" for e in self.of(role)) or "none is configured"

    @property
    def models(self) -> list[dict[str, Any]]:
        """The model cards of /v1/models, each id once."""
        cards = {m["id"]: m for e in self.ready(EngineRole.DECODE) for m in e.models if "id" in m}
        return list(cards.values())
