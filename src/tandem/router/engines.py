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
    losses: int = 0
    """How often it was taken out of use: a proof that began before the last time proves nothing."""

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count a request as in flight for the length of a block, however it ends."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


class Fleet:
    """All engines of an endpoint. Changed by discovery and canaries, read by the request engine.

    What requests ask for is worked out when something changes, not for each request.
    """

    def __init__(self) -> None:
        self.engines: list[Engine] = []
        self._proved: set[tuple[Engine, Engine]] = set()
        self._changed()

    def add(self, engine: Engine) -> None:
        self.engines.append(engine)
        self._changed()

    def remove(self, engine: Engine) -> None:
        self.engines.remove(engine)
        self.lost(engine, "removed")

    def lost(self, engine: Engine, why: str) -> None:
        """Take an engine out of use until it has passed its canaries again."""
        engine.state, engine.why = State.WAITING, why
        engine.losses += 1
        self._proved = {pair for pair in self._proved if engine not in pair}
        self._changed()

    def prove_decoder(self, decoder: Engine, models: list[dict[str, Any]]) -> None:
        """A decoder has answered a canary. `models` are its cards of /v1/models."""
        decoder.state, decoder.why, decoder.models = State.READY, "", models
        self._changed()

    def pair(self, prefiller: Engine, decoder: Engine) -> tuple[int, int]:
        """To be taken before a pair's canary, and given to `prove_pair` after it."""
        return prefiller.losses, decoder.losses

    def prove_pair(self, prefiller: Engine, decoder: Engine, begun: tuple[int, int]) -> bool:
        """KV has gone from a prefiller to a decoder. False: one of the two was lost meanwhile."""
        if begun != self.pair(prefiller, decoder) or decoder.state is not State.READY:
            return False
        self._proved.add((prefiller, decoder))
        prefiller.state, prefiller.why = State.READY, ""
        self._changed()
        return True

    def is_proved(self, prefiller: Engine, decoder: Engine) -> bool:
        return (prefiller, decoder) in self._proved

    def of(self, role: EngineRole) -> list[Engine]:
        """All engines of a role, by URL."""
        return self._of[role]

    def ready(self, role: EngineRole) -> list[Engine]:
        """The engines of a role that are in use, by URL."""
        return self._ready[role]

    def prefillers_for(self, decoder: Engine) -> list[Engine]:
        """Ready prefillers whose KV this decoder has been seen to read, by URL."""
        return self._prefillers.get(decoder, [])

    def _changed(self) -> None:
        by_url = sorted(self.engines, key=lambda e: e.url)
        self._of = {role: [e for e in by_url if e.role is role] for role in EngineRole}
        self._ready = {
            role: [e for e in engines if e.state is State.READY] for role, engines in self._of.items()
        }
        decoders, prefillers = self._ready[EngineRole.DECODE], self._ready[EngineRole.PREFILL]
        self._prefillers = {d: [p for p in prefillers if (p, d) in self._proved] for d in decoders}
        cards = {m["id"]: m for e in decoders for m in e.models if "id" in m}
        self.models = list(cards.values())
        """The model cards of /v1/models, each id once."""
        self.model_ids = frozenset(cards)
        lengths = [m["max_model_len"] for m in self.models if isinstance(m.get("max_model_len"), int)]
        self.max_model_len: int | None = max(lengths, default=None)
        """The longest context that a decoder has, in tokens."""

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
            if not self.is_proved(p, d)
        ]

    def _whys(self, role: EngineRole) -> str:
        return "; ".join(f"{e.url}: {e.why}" for e in self.of(role)) or "none is configured"
