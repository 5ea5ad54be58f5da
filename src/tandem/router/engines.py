"""The engines a router knows: their state, their load, and which pairs have been proved to work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
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
    SUSPECT = "suspect"  # failed several requests in a row; used only where no other is ready


@dataclass(eq=False, slots=True, weakref_slot=True)
class Engine:
    """One engine. Identity is the object: an engine that leaves discovery and returns is another one."""

    url: str
    role: EngineRole
    origin: Origin
    state: State = State.WAITING
    why: str = "not contacted yet"
    in_flight: int = 0
    pending_tokens: int = 0
    """Prompt tokens of requests in flight that it has to compute and that have no first answer yet."""
    models: list[dict[str, Any]] = field(default_factory=list)
    losses: int = 0
    """How often it was taken out of use: a proof that began before the last time proves nothing."""
    failures: int = 0
    """Legs that failed since the last one that worked."""
    started: float | None = None
    """When its process started, as it says itself (Unix seconds)."""
    life: int = 0
    """Counts the processes that it has been."""
    alarm: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it is to be looked at now."""

    @contextmanager
    def busy(self, tokens: int = 0) -> Iterator[Callable[[], None]]:
        """Count a request as in flight for the length of a block, however it ends. `tokens` of prompt that it
        has to compute; they are pending until the block's value is called."""
        pending = tokens

        def computed() -> None:
            nonlocal pending
            self.pending_tokens -= pending
            pending = 0

        self.in_flight += 1
        self.pending_tokens += pending
        try:
            yield computed
        finally:
            self.in_flight -= 1
            computed()

    def identify(self, started: float | None) -> None:
        """It has come into use (again). Unless it says that it started when it did before, it is taken for
        another process."""
        if started is None or started != self.started:
            self.life += 1
        self.started = started


class Fleet:
    """All engines of an endpoint. Changed by discovery, canaries and failures, read by the request engine.

    What requests ask for is worked out when something changes, not for each request.
    """

    def __init__(self, *, suspect_after: int = 5, survives_decoder_restart: bool = True) -> None:
        """`suspect_after`: failures in a row. `survives_decoder_restart`: see `connectors.base.Connector`."""
        self._suspect_after = suspect_after
        self._survives_decoder_restart = survives_decoder_restart
        self.engines: list[Engine] = []
        self._proved: set[tuple[Engine, Engine]] = set()
        self._met: dict[tuple[Engine, Engine], tuple[int, int]] = {}
        self._listeners: list[Callable[[], None]] = []
        self._mourners: list[Callable[[Engine], None]] = []
        self._changed()

    def on_loss(self, listener: Callable[[Engine], None]) -> None:
        """Call a function with every engine that is lost or removed: its cache may be, too."""
        self._mourners.append(listener)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call a function after every change of which engines are in use."""
        self._listeners.append(listener)

    def add(self, engine: Engine) -> None:
        self.engines.append(engine)
        self._changed()

    def remove(self, engine: Engine) -> None:
        self.engines.remove(engine)
        self._met = {pair: lives for pair, lives in self._met.items() if engine not in pair}
        self.lost(engine, "removed")

    def lost(self, engine: Engine, why: str) -> None:
        """Take an engine out of use until it has passed its canaries again."""
        engine.state, engine.why, engine.failures = State.WAITING, why, 0
        engine.losses += 1
        self._proved = {pair for pair in self._proved if engine not in pair}
        for listener in self._mourners:
            listener(engine)
        self._changed()

    def failed(self, engine: Engine) -> None:
        """A leg failed there, not by the request's own fault. After several in a row the engine is suspect:
        a canary decides, so that requests which no engine can serve do not take engines out of use."""
        engine.failures += 1
        if engine.state is State.READY and engine.failures >= self._suspect_after:
            engine.state, engine.why = State.SUSPECT, f"{engine.failures} requests failed in a row"
            engine.alarm.set()
            self._changed()

    def worked(self, engine: Engine) -> None:
        """A leg or a canary went well there."""
        engine.failures = 0
        if engine.state is State.SUSPECT:
            engine.state, engine.why = State.READY, ""
            self._changed()

    def prove_decoder(self, decoder: Engine, models: list[dict[str, Any]]) -> None:
        """A decoder has answered a canary. `models` are its cards of /v1/models."""
        decoder.state, decoder.why, decoder.models, decoder.failures = State.READY, "", models, 0
        self._changed()

    def pair(self, prefiller: Engine, decoder: Engine) -> tuple[int, int]:
        """To be taken before a pair's canary, and given to `prove_pair` after it."""
        self._met[prefiller, decoder] = prefiller.life, decoder.life
        return prefiller.losses, decoder.losses

    def prove_pair(self, prefiller: Engine, decoder: Engine, begun: tuple[int, int]) -> bool:
        """KV has gone from a prefiller to a decoder. False: one of the two was lost meanwhile."""
        if begun != (prefiller.losses, decoder.losses) or decoder.state is State.WAITING:
            return False
        self._proved.add((prefiller, decoder))
        if prefiller.state is State.WAITING:  # one that is suspect has more to show
            prefiller.state, prefiller.why, prefiller.failures = State.READY, "", 0
        self._changed()
        return True

    def is_proved(self, prefiller: Engine, decoder: Engine) -> bool:
        return (prefiller, decoder) in self._proved

    def may_meet(self, prefiller: Engine, decoder: Engine) -> bool:
        """Whether a canary may be tried across a pair. No: they have met, the decoder came back as another
        process, and the prefiller, still the same, would hang or write into nothing."""
        if self._survives_decoder_restart:
            return True
        met = self._met.get((prefiller, decoder))
        return met is None or met[0] != prefiller.life or met[1] == decoder.life

    def of(self, role: EngineRole) -> list[Engine]:
        """All engines of a role, by URL."""
        return self._of[role]

    def ready(self, role: EngineRole) -> list[Engine]:
        """The engines of a role that are in use, by URL."""
        return self._ready[role]

    def prefillers_for(self, decoder: Engine) -> list[Engine]:
        """Prefillers in use whose KV this decoder has been seen to read, by URL."""
        return self._prefillers.get(decoder, [])

    def _changed(self) -> None:
        by_url = sorted(self.engines, key=lambda e: e.url)
        self._of = {role: [e for e in by_url if e.role is role] for role in EngineRole}
        self._ready = {role: _in_use(engines) for role, engines in self._of.items()}
        decoders, prefillers = self._ready[EngineRole.DECODE], self._of[EngineRole.PREFILL]
        self._prefillers = {d: _in_use([p for p in prefillers if (p, d) in self._proved]) for d in decoders}
        cards = {m["id"]: m for e in decoders for m in e.models if "id" in m}
        self.models = list(cards.values())
        """The model cards of /v1/models, each id once."""
        self.model_ids = frozenset(cards)
        self.adapters = frozenset(name for name, card in cards.items() if card.get("parent"))
        """The models among them that are LoRA adapters of another."""
        lengths = [m["max_model_len"] for m in self.models if isinstance(m.get("max_model_len"), int)]
        self.max_model_len: int | None = max(lengths, default=None)
        """The longest context that a decoder has, in tokens."""
        for listener in self._listeners:
            listener()

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
        waiting = [f"{e.role.value} {e.url}: {e.why}" for e in self.engines if e.state is not State.READY]
        prefillers, decoders = self.ready(EngineRole.PREFILL), self.ready(EngineRole.DECODE)
        return waiting + [
            f"{p.url} with {d.url}: {self._why_unproved(p, d)}"
            for p in prefillers
            for d in decoders
            if not self.is_proved(p, d)
        ]

    def _why_unproved(self, prefiller: Engine, decoder: Engine) -> str:
        if self.may_meet(prefiller, decoder):
            return "no canary yet"
        return "the decode engine was restarted; restart the prefill engine, which cannot find it again"

    def _whys(self, role: EngineRole) -> str:
        return (
            "; ".join(f"{e.url}: {e.why or self._why_unpaired(e)}" for e in self.of(role))
            or "none is configured"
        )

    def _why_unpaired(self, prefiller: Engine) -> str:
        decoders = self.ready(EngineRole.DECODE)
        return ", ".join(f"with {d.url}: {self._why_unproved(prefiller, d)}" for d in decoders)


def _in_use(engines: list[Engine]) -> list[Engine]:
    """Those that are ready; where none is, those that are only suspect: some request must find out."""
    ready = [e for e in engines if e.state is State.READY]
    return ready or [e for e in engines if e.state is State.SUSPECT]
