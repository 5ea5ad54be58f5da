"""Which engines may serve a request, as lists that stay the same objects until something changes.

Strategies work things out once for each list (see `strategies.base.Kept`), so nothing is listed anew for a
request, and equal lists are one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tandem.router.engines import Engine, EngineRole, State
from tandem.router.strategies.base import MANY

NO_ENGINES: list[Engine] = []


class Candidates:
    """Engines in use, by URL. Those that have just joined the others are left out at times: one may have as
    many requests as the mean of the others, times the part of its ramp-up that is over, and at least one. Its
    cache is empty, and a strategy that goes by load would send everything to it."""

    def __init__(
        self, engines: list[Engine], ramp_up: float = 0.0, clock: Callable[[], float] = lambda: 0.0
    ) -> None:
        """`ramp_up`: seconds after `Engine.joined`, on the clock."""
        self.all = engines
        self._ramp_up = ramp_up
        self._clock = clock
        self._kept: dict[tuple[Engine, ...], list[Engine]] = {(): engines}
        # Of many engines it is worked out for every few questions only.
        self._every = max(1, len(engines) // MANY)
        self._asked = 0
        self._now = engines
        begun = clock() - ramp_up
        self._joining = [e for e in engines if e.joined > begun] if ramp_up else []
        if len(self._joining) == len(engines):  # there are no others
            self._joining = []

    def __bool__(self) -> bool:
        return bool(self.all)

    def now(self) -> list[Engine]:
        """Those that may be chosen."""
        if not self._joining:
            return self.all
        if self._asked % self._every == 0:
            self._now = self._without_full()
        self._asked += 1
        return self._now

    def share(self, engine: Engine) -> float:
        """The part of its ramp-up that is over, 0 to 1; 1 for one that was there before."""
        if engine not in self._joining:
            return 1.0
        return min(1.0, (self._clock() - engine.joined) / self._ramp_up)

    def _without_full(self) -> list[Engine]:
        self._joining = [e for e in self._joining if self.share(e) < 1.0]
        others = len(self.all) - len(self._joining)
        mean = (sum(map(_load, self.all)) - sum(map(_load, self._joining))) / others
        full = tuple(e for e in self._joining if _load(e) >= max(1.0, self.share(e) * mean))
        if full not in self._kept:
            if len(self._kept) > 64:
                self._kept = {(): self.all}
            left_out = set(full)
            self._kept[full] = [e for e in self.all if e not in left_out]
        return self._kept[full]


def _load(engine: Engine) -> int:
    return max(engine.in_flight, engine.held)


NOBODY = Candidates(NO_ENGINES)


@dataclass
class Group:
    """The engines that serve one model, or all of them. Changed by the fleet alone."""

    members: frozenset[Engine]
    """All of them, in use or not."""
    decoders: Candidates
    """Those in use that answer; see `answering`."""
    pairable: Candidates
    """Of these, decode engines that a prefill engine in use has been proved with."""
    prefillers: dict[Engine, Candidates]
    """For each decode engine that has any, the prefill engines in use that have been proved with it."""
    prefillers_exist: bool
    """Whether any prefill engine is known that might serve them, in use or not."""
    max_model_len: int | None
    """The longest context that one of them has, in tokens."""
    adapters: frozenset[str]
    """Model names among theirs that are LoRA adapters of another."""


def in_use(engines: Iterable[Engine]) -> list[Engine]:
    """Those that are ready; where none is, those that are only suspect: some request must find out."""
    known = list(engines)
    ready = [e for e in known if e.state is State.READY]
    return ready or [e for e in known if e.state is State.SUSPECT]


def answering(engines: Iterable[Engine]) -> list[Engine]:
    """Those that answer requests: decode engines that are ready, else engines without a role; where none is
    ready, those that are suspect, in the same order."""
    known = list(engines)
    for state in (State.READY, State.SUSPECT):
        for role in (EngineRole.DECODE, EngineRole.BOTH):
            if found := [e for e in known if e.state is state and e.role is role]:
                return found
    return []


def may_pair(prefiller: Engine, decoder: Engine, labels: Sequence[str]) -> bool:
    """Whether KV may go from one to the other: they agree in each of these labels that both have, and, where
    both have told their models, serve one in common."""
    for name in labels:
        ours, theirs = prefiller.labels.get(name), decoder.labels.get(name)
        if ours is not None and theirs is not None and ours != theirs:
            return False
    if prefiller.models and decoder.models:
        return not prefiller.model_ids.isdisjoint(decoder.model_ids)
    return True
