"""The engines of a router: who is in use, which pairs have been proved to work, who serves which model."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice, product
from typing import Any

from tandem.router.engines import Engine, EngineRole, State
from tandem.router.few import few
from tandem.router.groups import NOBODY, Candidates, Group, answering, in_use, may_pair
from tandem.router.reported import count

logger = logging.getLogger("tandem.router")

_MANY = 200
"""Engines from which on changes may be worked out together: of fewer each counts at once."""
_COSTLY = 0.005
"""Seconds that working out a change takes where that is done."""
_SHARE = 10
"""That takes at most one part in so many of the time."""

_SHOWN = 20  # engines that a reason names; the others are counted

Defer = Callable[[float, Callable[[], None]], object]
"""Calls a function after so many seconds, as an event loop's `call_later`."""


class Fleet:
    """Changed by discovery, canaries and failures, read by the request engine.

    What requests ask for is worked out when something changes, not for each request. Among thousands of
    engines that takes a while, and something changes all the time; there the changes of some tenths of a
    second are worked out together.
    """

    def __init__(
        self,
        *,
        suspect_after: int = 5,
        survives_decoder_restart: bool = True,
        pairing: Sequence[str] = (),
        ramp_up: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        timer: Callable[[], float] = time.thread_time,
        defer: Defer | None = None,
    ) -> None:
        """`suspect_after`: failures in a row. `survives_decoder_restart`: see `connectors.base.Connector`.
        `pairing`: labels in which the engines of a pair must agree. `ramp_up`: see `groups.Candidates`.
        `timer` tells what working out a change takes, in seconds of CPU; without `defer` none waits for
        others."""
        self._suspect_after = suspect_after
        self._survives_decoder_restart = survives_decoder_restart
        self._pairing = pairing
        self._ramp_up = ramp_up
        self._clock = clock
        self._timer = timer
        self._defer = defer
        self._deferred = False
        self._next = float("-inf")
        """When the next change may be worked out."""
        self.engines: list[Engine] = []
        self._proved: set[tuple[Engine, Engine]] = set()
        self._met: dict[tuple[Engine, Engine], tuple[int, int]] = {}
        self._listeners: list[Callable[[], None]] = []
        self._mourners: list[Callable[[Engine], None]] = []
        self._followers: list[Callable[[Engine, bool], None]] = []
        self._work_out()

    def on_loss(self, listener: Callable[[Engine], None]) -> None:
        """Call a function with every engine that is lost or removed: its cache may be, too."""
        self._mourners.append(listener)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call a function after every change of which engines are in use."""
        self._listeners.append(listener)

    def on_member(self, listener: Callable[[Engine, bool], None]) -> None:
        """Call a function with every engine that is added (True) or removed (False)."""
        self._followers.append(listener)

    def add(self, engine: Engine) -> None:
        self.update(add=(engine,))

    def remove(self, engine: Engine) -> None:
        self.update(remove=(engine,))

    def update(self, *, add: Collection[Engine] = (), remove: Collection[Engine] = ()) -> None:
        """Engines have joined and left, all of them in one change."""
        if remove:
            gone = set(remove)
            self.engines = [e for e in self.engines if e not in gone]
            self._met = {pair: lives for pair, lives in self._met.items() if gone.isdisjoint(pair)}
        for engine in remove:
            engine.left = True
            for listener in self._followers:
                listener(engine, False)
        self._take_out(remove, "removed")
        self.engines.extend(add)
        for engine in add:
            for listener in self._followers:
                listener(engine, True)
        self._changed()

    def lost(self, engine: Engine, why: str) -> None:
        """Take an engine out of use until it has passed its canaries again. Of one that is out of use already
        only the reason is new, and that no proof counts that is under way: all its requests may say so."""
        if engine.state is State.WAITING:
            engine.why = why
            engine.losses += 1
            return
        said = why.removeprefix("cannot be reached: ").removeprefix(f"{engine.url}: ")
        logger.warning("%s %s is lost: %s", engine.role.value, engine.url, said)
        self._take_out((engine,), why)
        self._changed()

    def _take_out(self, engines: Collection[Engine], why: str) -> None:
        gone = set(engines)
        if gone:
            self._proved = {pair for pair in self._proved if gone.isdisjoint(pair)}
        for engine in engines:
            engine.state, engine.why, engine.failures = State.WAITING, why, 0
            engine.losses += 1
            for listener in self._mourners:
                listener(engine)

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

    def told(self, engine: Engine, models: list[dict[str, Any]]) -> None:
        """An engine that is not in use yet has told its models. `models` are its cards of /v1/models."""
        if engine.models != models:
            engine.models = models
            self._changed()

    def prove(self, engine: Engine, models: list[dict[str, Any]]) -> None:
        """An engine that answers has answered a canary. `models` are its cards of /v1/models."""
        engine.models = models
        self._join(engine)
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
        if prefiller.state is State.READY:
            prefiller.why = ""
            if not self._deferred:
                self._paired(prefiller, decoder)
            return True
        if prefiller.state is State.WAITING:  # one that is suspect has more to show
            self._join(prefiller)
        self._changed()
        return True

    def _paired(self, prefiller: Engine, decoder: Engine) -> None:
        """What `_changed` would work out, where nothing else has changed: proofs are as many as pairs."""
        groups = {id(each): each for each in (self._everybody, *self._groups.values())}.values()
        left = []
        for group in groups:
            if not {prefiller, decoder} <= group.members:
                continue
            prefillers = (p for p in self._of[EngineRole.PREFILL] if p in group.members)
            known = in_use(p for p in prefillers if (p, decoder) in self._proved)
            left.append(group.prefillers.get(decoder, NOBODY))
            group.prefillers[decoder] = self._candidates(known)
            pairable = [d for d in group.decoders.all if d in group.prefillers]
            if len(pairable) > len(group.pairable.all):
                group.pairable = self._candidates(pairable)
        used = {id(each) for group in groups for each in group.prefillers.values()}
        for before in left:
            if id(before) not in used:
                self._lists.pop(tuple(before.all), None)
        self._tell()

    def _join(self, engine: Engine) -> None:
        engine.state, engine.why, engine.failures = State.READY, "", 0
        engine.joined = self._clock()

    def is_proved(self, prefiller: Engine, decoder: Engine) -> bool:
        return (prefiller, decoder) in self._proved

    def may_pair(self, prefiller: Engine, decoder: Engine) -> bool:
        """Whether KV may go from one to the other at all."""
        return may_pair(prefiller, decoder, self._pairing)

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

    @property
    def answering(self) -> list[Engine]:
        """The engines in use that generate answers, by URL."""
        return self._answering

    def group(self, model: str | None) -> Group:
        """The engines that serve a model, by one of the names they report (also where none of them is in use
        now); all engines for another name."""
        return self._everybody if model is None else self._groups.get(model, self._everybody)

    @property
    def parted(self) -> bool:
        """Whether a request has to name its model: there is no name that every engine serves."""
        return self._parted

    def prefillers_for(self, decoder: Engine) -> Candidates:
        """Prefillers in use whose KV this decoder has been seen to read."""
        return self._everybody.prefillers.get(decoder, NOBODY)

    def ramp_up(self, engine: Engine) -> float:
        """The part of an engine's ramp-up that is over, 0 to 1; see `groups.Candidates`."""
        lists = [*self._everybody.prefillers.values(), *(g.decoders for g in self._groups.values())]
        return min((each.share(engine) for each in lists if engine in each.all), default=1.0)

    def _changed(self) -> None:
        """Work out a change: now, or soon together with others."""
        if self._defer is None or self._clock() >= self._next:
            self._work_out()
        elif not self._deferred:
            self._deferred = True
            self._defer(self._next - self._clock(), self._work_out)

    def _work_out(self) -> None:
        self._deferred = False
        begun = self._timer()
        self._sort()
        taken = self._timer() - begun
        costly = len(self.engines) >= _MANY and taken >= _COSTLY
        self._next = self._clock() + taken * _SHARE if costly else float("-inf")
        self._tell()

    def _sort(self) -> None:
        by_url = sorted(self.engines, key=lambda e: e.url)
        self._of = {role: [e for e in by_url if e.role is role] for role in EngineRole}
        self._ready = {role: in_use(engines) for role, engines in self._of.items()}
        self._lists: dict[tuple[Engine, ...], Candidates] = {}
        candidates = self._candidates

        def group(members: list[Engine]) -> Group:
            of = {role: [e for e in members if e.role is role] for role in EngineRole}
            decoders = [d for d in of[EngineRole.DECODE] if d.state is not State.WAITING]
            proved = {
                d: in_use(p for p in of[EngineRole.PREFILL] if (p, d) in self._proved) for d in decoders
            }
            prefillers = {d: candidates(known) for d, known in proved.items() if known}
            used = answering([*of[EngineRole.DECODE], *of[EngineRole.BOTH]])
            cards = [card for e in used for card in e.models]
            lengths = [n for c in cards if (n := count(c.get("max_model_len"))) is not None]
            return Group(
                members=frozenset(members),
                decoders=candidates(used),
                pairable=candidates([e for e in used if e in prefillers]),
                prefillers=prefillers,
                prefillers_exist=any(
                    self.may_pair(p, d) for p in of[EngineRole.PREFILL] for d in of[EngineRole.DECODE]
                ),
                max_model_len=max(lengths, default=None),
                adapters=frozenset(card["id"] for card in cards if "id" in card and card.get("parent")),
            )

        answer = [e for e in by_url if e.answers]
        known = {
            card["id"]: card
            for e in answer
            if e.state is not State.WAITING
            for card in e.models
            if isinstance(card.get("id"), str)
        }
        self.models = list(known.values())
        """The model cards of /v1/models, each id once."""
        self.model_ids = frozenset(known)
        serving: dict[str, list[Engine]] = {name: [] for e in answer for name in e.model_ids}
        for engine in by_url:
            for name in engine.model_ids or serving:  # one that has not told may serve any
                if name in serving:
                    serving[name].append(engine)
        self.names = frozenset(serving)
        """All names of models here, also of those that no engine in use serves now."""
        self._parted = bool(serving) and all(
            sum(e.answers for e in members) < len(answer) for members in serving.values()
        )
        self.all_told = all(e.models for e in answer)
        """Whether every engine that answers has told its models."""
        self._everybody = group(by_url)
        groups: dict[tuple[Engine, ...], Group] = {tuple(by_url): self._everybody}
        self._groups: dict[str, Group] = {}
        for name, members in serving.items():
            key = tuple(members)
            if key not in groups:
                groups[key] = group(members)
            self._groups[name] = groups[key]
        used = {e for each in groups.values() for e in each.decoders.all}
        self._answering = [e for e in answer if e in used]

    def _candidates(self, engines: list[Engine]) -> Candidates:
        """Equal lists are one."""
        key = tuple(engines)
        if key not in self._lists:
            self._lists[key] = Candidates(engines, self._ramp_up, self._clock)
        return self._lists[key]

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()

    @property
    def missing(self) -> str | None:
        """Why the endpoint cannot serve as configured yet, or None when it can: an engine that answers, and,
        where prefillers are configured, a proved pair."""
        if self.unanswered is not None:
            return self.unanswered
        if self.of(EngineRole.PREFILL) and not self._everybody.pairable:
            return "no prefill engine is ready: " + self._whys(EngineRole.PREFILL)
        return None

    @property
    def unanswered(self) -> str | None:
        """Why no engine answers, or None where one does."""
        if not self._everybody.decoders:
            role = EngineRole.DECODE if self.of(EngineRole.DECODE) else EngineRole.BOTH
            kind = "decode engine" if role is EngineRole.DECODE or not self.of(role) else "engine"
            return f"no {kind} is ready: " + self._whys(role)
        return None

    @property
    def unproved(self) -> list[str]:
        """Engines that are not in use, with the reason, and pairs across which no KV has gone yet."""
        return list(self._unproved())

    @property
    def unproved_shown(self) -> list[str]:
        """The first of `unproved`; the last one says when there are more."""
        shown = list(islice(self._unproved(), _SHOWN + 1))
        return [*shown[:_SHOWN], "and more"] if len(shown) > _SHOWN else shown

    def _unproved(self) -> Iterator[str]:
        for engine in self.engines:
            if engine.state is not State.READY:
                yield f"{engine.role.value} {engine.url}: {engine.why}"
        prefillers, decoders = self.ready(EngineRole.PREFILL), self.ready(EngineRole.DECODE)
        for p, d in product(prefillers, decoders):
            if not self.is_proved(p, d) and self.may_pair(p, d):
                yield f"{p.url} with {d.url}: {self._why_unproved(p, d)}"

    def _why_unproved(self, prefiller: Engine, decoder: Engine) -> str:
        if not self.may_pair(prefiller, decoder):
            return "labels or models differ"
        if self.may_meet(prefiller, decoder):
            return "no canary yet"
        return "the decode engine was restarted; restart the prefill engine, which cannot find it again"

    def _whys(self, role: EngineRole) -> str:
        whys = few(self.of(role), _SHOWN, lambda e: f"{e.url}: {e.why or self._why_unpaired(e)}")
        return "; ".join(whys) or "none is known"

    def _why_unpaired(self, prefiller: Engine) -> str:
        decoders = self.ready(EngineRole.DECODE)[:_SHOWN]
        return ", ".join(f"with {d.url}: {self._why_unproved(prefiller, d)}" for d in decoders)
