"""One engine as a router knows it: its state and its load."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tandem.config import Subscription
from tandem.http import Origin


class EngineRole(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"
    """An engine without a role: it serves whole requests."""


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
    labels: Mapping[str, str] = field(default_factory=dict)
    kv_events: Subscription | None = None
    """Where it publishes its KV events."""
    state: State = State.WAITING
    why: str = "not contacted yet"
    in_flight: int = 0
    pending_tokens: int = 0
    """Prompt tokens of requests in flight that it has to compute and that have no first answer yet."""
    pending_squares: int = 0
    """Of these, each prompt's squared: what attention costs grows with it."""
    held: int = 0
    """Requests that it was chosen to answer, from then to their end: also while another computes their
    prompts."""
    held_tokens: int = 0
    """Of these, the prompts and the outputs that are expected."""
    kv_use: float = 0.0
    """The part of its KV cache that is in use, 0 to 1, when it last said."""
    running: int | None = None
    """Requests that it computes, from all routers, when it last said."""
    waiting: int | None = None
    """Requests that wait for that."""
    cache_tokens: int | None = None
    """What its KV cache holds, as it says itself; 0 where it keeps no prefixes."""
    models: list[dict[str, Any]] = field(default_factory=list)
    """Its cards of /v1/models; none: not asked yet."""
    joined: float = 0.0
    """When it came into use, on the fleet's clock."""
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
    left: bool = False
    """Whether it has been removed from the fleet, for good: what is learnt of it from now on is of no use."""
    doubted: bool = False
    """Whether it is to tell at the next look whether it is still the process that it was."""

    def doubt(self) -> None:
        """Have it looked at now: it may be gone, or be another process already."""
        self.doubted = True
        self.alarm.set()

    @contextmanager
    def busy(self, tokens: int = 0) -> Iterator[Callable[[], None]]:
        """Count a request as in flight for the length of a block, however it ends. `tokens` of prompt that it
        has to compute; they are pending until the block's value is called."""
        pending = tokens

        def computed() -> None:
            nonlocal pending
            self.pending_tokens -= pending
            self.pending_squares -= pending * pending
            pending = 0

        self.in_flight += 1
        self.pending_tokens += pending
        self.pending_squares += pending * pending
        try:
            yield computed
        finally:
            self.in_flight -= 1
            computed()

    @contextmanager
    def holding(self, tokens: int) -> Iterator[None]:
        """Count a request that it was chosen to answer for the length of a block."""
        self.held += 1
        self.held_tokens += tokens
        try:
            yield
        finally:
            self.held -= 1
            self.held_tokens -= tokens

    @property
    def kind(self) -> str:
        """What it is, in words."""
        return "engine" if self.role is EngineRole.BOTH else f"{self.role.value} engine"

    @property
    def answers(self) -> bool:
        """Whether it generates answers."""
        return self.role is not EngineRole.PREFILL

    @property
    def model_ids(self) -> frozenset[str]:
        return frozenset(card["id"] for card in self.models if isinstance(card.get("id"), str))

    def identify(self, started: float | None) -> bool:
        """It has come into use (again). Unless it says that it started when it did before, it is taken for
        another process. Whether it was another before."""
        changed = started is None or started != self.started
        if changed:
            self.life += 1
        self.started = started
        return changed and self.life > 1
