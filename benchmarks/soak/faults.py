"""Kills and freezes processes of an endpoint, and watches until each is back in use."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import machine
from endpoint import Endpoint
from promises import ROUTER, Timeline

FREEZES = (2.0, 12.0)
"""Seconds, from and to."""
LOOK = 0.25
BACK_WITHIN = 180.0
"""Seconds in which what was struck has to be back in use; two engines that start share the cores with all
the rest."""
# How often which role is struck, and how often it is killed rather than frozen.
_ROLES = {"prefill": 4, "decode": 4, ROUTER: 1}
_KILLED = 0.6

Say = Callable[[str], None]


@dataclass
class Faults:
    endpoint: Endpoint
    seed: int
    now: Callable[[], float]
    say: Say
    timeline: Timeline = field(default_factory=Timeline)
    done: Counter[str] = field(default_factory=Counter)
    late: set[str] = field(default_factory=set)
    """What was not back in time."""
    pids: set[int] = field(default_factory=set)
    """All processes that the endpoint has ever been seen to have."""
    _before: dict[str, set[int]] = field(default_factory=dict)
    """Of those that were killed: the processes they were then."""
    _frozen: set[str] = field(default_factory=set)
    _since: dict[str, float] = field(default_factory=dict)

    async def strike(self, period: float) -> None:
        """One fault in every period, for ever; a frozen process is let go on before this ends."""
        rnd = random.Random(self.seed)
        async with asyncio.TaskGroup() as thawing:
            while True:
                await asyncio.sleep(period)
                role = rnd.choices(list(_ROLES), list(_ROLES.values()))[0]
                kills, seconds, which = rnd.random() < _KILLED, rnd.uniform(*FREEZES), rnd.random()
                well = [name for name in self.endpoint.of(role) if self.timeline.is_well(name)]
                if not well:
                    self.done["nothing left of the role to strike"] += 1
                    continue
                who = well[int(which * len(well))]
                self.timeline.strike(who, self.now())
                self._since[who] = self.now()
                if kills or who == ROUTER:
                    self._kill(who, rnd)
                else:
                    thawing.create_task(self._freeze(who, seconds))

    def _kill(self, who: str, rnd: random.Random) -> None:
        """One of its processes, as when memory runs out; whoever is left of it has to be ended by others."""
        pids = sorted(machine.working(self.endpoint.pids(who)))
        self._before[who] = set(pids)
        victim = pids[0] if who == ROUTER else rnd.choice(pids)
        self.done[f"{self.endpoint.roles[who]} killed"] += 1
        self.say(f"kills process {victim} of {who}")
        machine.send([victim], signal.SIGKILL)

    async def _freeze(self, who: str, seconds: float) -> None:
        pids = self.endpoint.pids(who)
        self._frozen.add(who)
        self.done[f"{self.endpoint.roles[who]} frozen"] += 1
        self.say(f"freezes {who} for {seconds:.0f} s")
        machine.send(pids, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            machine.send(pids, signal.SIGCONT)
            self._frozen.discard(who)

    async def watch(self) -> None:
        """Note for ever who is back in use."""
        while True:
            self.pids |= set(machine.children(self.endpoint.pid))
            for who, since in list(self._since.items()):
                if await self._is_back(who):
                    self.timeline.recover(who, self.now())
                    self.say(f"{who} is back after {self.now() - since:.0f} s")
                    del self._since[who]
                elif self.now() - since > BACK_WITHIN:
                    self.late.add(f"{who}, struck at {since:.0f} s, was not back {BACK_WITHIN:g} s later")
            await asyncio.sleep(LOOK)

    @property
    def missing(self) -> list[str]:
        """Who was struck and is not back in use."""
        return list(self._since)

    async def _is_back(self, who: str) -> bool:
        if who in self._frozen:
            return False
        if who in self._before and (not (now := self.endpoint.pids(who)) or now & self._before[who]):
            return False  # not another process yet
        ready = await self.endpoint.ready()
        if who == ROUTER:  # one that has just begun has to prove all engines
            others = {name for name in self.endpoint.roles if name != ROUTER and name not in self._since}
            back = ready is not None and others <= ready
        else:
            back = ready is not None and who in ready and await self.endpoint.answers(who)
        if back:
            self._before.pop(who, None)
        return back
