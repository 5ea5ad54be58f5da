"""Hundreds of engines that do not answer, or that come and go: what they cost, and who suffers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

import tandem.router.fleet as fleet_module
from tandem.config import RouterConfig
from tandem.http import Client, Origin
from tandem.router.budgets import Budgets
from tandem.router.canary import Prober
from tandem.router.connectors import Nixl
from tandem.router.counting import Counter
from tandem.router.discovery import Member, StaticDiscovery
from tandem.router.engines import Engine, EngineRole, State
from tandem.router.fleet import Fleet
from tandem.router.handover import Handovers
from tandem.router.legs import LegFailed, Legs
from tandem.router.notifications import Notifications
from tandem.router.visits import LONGEST_PAUSE, Visits

from .fakes import FakeEngine, engines, eventually

BOTH = EngineRole.BOTH


def engine(name: str, role: EngineRole = BOTH) -> Engine:
    return Engine(f"http://{name}:1", role, Origin.parse(f"http://{name}:1"))


class Watched:
    """A fleet, and how often it changed. `cost`: seconds that working out a change takes."""

    def __init__(self, cost: float = 0.0) -> None:
        self.now = 0.0
        self.cost = cost
        self.ticks = 0.0
        self.deferred: list[tuple[float, Callable[[], None]]] = []
        self.fleet = Fleet(clock=lambda: self.now, timer=self._timer, defer=self._defer)
        self.changes = 0
        self.fleet.on_change(self._changed)

    def _timer(self) -> float:
        self.ticks += self.cost
        return self.ticks

    def _defer(self, seconds: float, work: Callable[[], None]) -> None:
        self.deferred.append((self.now + seconds, work))

    def _changed(self) -> None:
        self.changes += 1

    def wait(self, seconds: float) -> None:
        self.now += seconds
        due = [work for at, work in self.deferred if at <= self.now]
        self.deferred = [(at, work) for at, work in self.deferred if at > self.now]
        for work in due:
            work()


def test_engines_that_come_and_go_together_are_one_change() -> None:
    watched = Watched()
    fleet = watched.fleet
    seen: list[tuple[Engine, bool]] = []
    lost: list[Engine] = []
    fleet.on_member(lambda e, here: seen.append((e, here)))
    fleet.on_loss(lost.append)
    old, new = [engine(f"old{i}") for i in range(50)], [engine(f"new{i}") for i in range(50)]
    fleet.update(add=old)
    for one in old:
        fleet.prove(one, [{"id": "m"}])
    watched.changes = 0
    fleet.update(add=new, remove=old[:40])
    assert watched.changes == 1
    assert set(fleet.engines) == {*old[40:], *new}
    assert set(fleet.answering) == set(old[40:])
    assert lost == old[:40]
    assert all(e.state is State.WAITING and e.why == "removed" for e in old[:40])
    assert seen[50:] == [(e, False) for e in old[:40]] + [(e, True) for e in new]


def test_where_a_change_takes_long_to_work_out_those_of_a_while_are_worked_out_together() -> None:
    watched = Watched(cost=0.05)
    many = [engine(f"e{i:03}") for i in range(300)]
    watched.fleet.update(add=many)
    watched.wait(10.0)
    watched.changes = 0
    for one in many:
        watched.fleet.prove(one, [{"id": "m"}])
    assert watched.changes == 1, "the first at once"
    assert watched.fleet.answering == many[:1]
    watched.wait(0.4)
    assert watched.changes == 1
    watched.wait(0.2)
    assert watched.changes == 2, "ten times as long later all the others"
    assert set(watched.fleet.answering) == set(many)
    watched.wait(10.0)
    assert watched.changes == 2


@pytest.mark.parametrize(("cost", "engines"), [(0.001, 300), (0.05, 10)])
def test_where_it_takes_no_time_or_they_are_few_each_change_counts_at_once(cost: float, engines: int) -> None:
    """On a machine that is busy with something else, too."""
    watched = Watched(cost)
    some = [engine(f"e{i}") for i in range(engines)]
    watched.fleet.update(add=some)
    for count, one in enumerate(some, 1):
        watched.fleet.prove(one, [{"id": "m"}])
        assert len(watched.fleet.answering) == count
    assert not watched.deferred


@pytest.mark.parametrize("seed", range(20))
def test_changes_that_were_worked_out_together_come_to_the_same(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "_MANY", 1)
    chance = random.Random(seed)
    slow, quick = Watched(cost=0.05), Watched()
    roles = [chance.choice(list(EngineRole)) for _ in range(8)]
    both = [(engine(f"e{i}", role), engine(f"e{i}", role)) for i, role in enumerate(roles)]
    for index, watched in enumerate((slow, quick)):
        watched.fleet.update(add=[pair[index] for pair in both])
    for _ in range(60):
        pick, other = chance.choice(both), chance.choice(both)
        what = chance.choice(["prove", "lost", "failed", "worked", "told", "pair", "pause"])
        for index, watched in enumerate((slow, quick)):
            one, fleet = pick[index], watched.fleet
            match what:
                case "prove" if one.answers:
                    fleet.prove(one, [{"id": "m"}])
                case "lost":
                    fleet.lost(one, "gone")
                case "failed":
                    for _ in range(5):
                        fleet.failed(one)
                case "worked":
                    fleet.worked(one)
                case "told":
                    fleet.told(one, [{"id": "m"}, {"id": "n"}])
                case "pair" if one.role is EngineRole.PREFILL and other[index].role is EngineRole.DECODE:
                    fleet.prove_pair(one, other[index], fleet.pair(one, other[index]))
                case "pause":
                    watched.wait(chance.random() if watched is slow else 0.0)
    slow.wait(10.0)

    def told(fleet: Fleet) -> Any:
        decoders = fleet.of(EngineRole.DECODE)
        return (
            fleet.models,
            [e.url for e in fleet.answering],
            [[p.url for p in fleet.prefillers_for(d).all] for d in decoders],
            fleet.missing,
            fleet.unproved,
        )

    assert told(slow.fleet) == told(quick.fleet)


def test_what_is_missing_names_some_engines_and_counts_the_others() -> None:
    fleet = Fleet()
    fleet.update(add=[engine(f"e{i:04}") for i in range(1000)])
    assert fleet.missing is not None
    assert fleet.missing.startswith("no engine is ready: http://e0000:1: not contacted yet; ")
    assert fleet.missing.endswith("; and 980 more")
    assert len(fleet.unproved) == 1000
    assert fleet.unproved_shown == [*fleet.unproved[:20], "and more"]


# Visits


class Clock:
    now = 0.0


def visits() -> tuple[Visits, Clock]:
    clock = Clock()
    return Visits(0.5, lambda: clock.now), clock


def test_a_silent_engine_is_visited_ever_more_seldom_but_never_forgotten() -> None:
    ours, clock = visits()
    one = engine("e")
    pauses = []
    while clock.now < 3600:
        ours.silent(one)
        pauses.append(ours.pause(one))
        clock.now += pauses[-1]
    assert pauses[:10] == [0.5] * 10, "it may be starting"
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE == 20.0
    ours.answered(one)
    ours.silent(one)
    assert ours.pause(one) == 0.5


def test_when_discovery_brings_news_silent_engines_are_looked_at_soon_but_not_each_time() -> None:
    ours, clock = visits()
    silent, fine, used = engine("silent"), engine("fine"), engine("used")
    used.state = State.READY
    for one in (silent, used):
        ours.silent(one)
    ours.stir()
    assert silent.alarm.is_set()
    assert not fine.alarm.is_set()
    assert not used.alarm.is_set()
    for _ in range(19):
        silent.alarm.clear()
        clock.now += 1
        ours.stir()
        assert not silent.alarm.is_set()
    clock.now += 1
    ours.stir()
    assert silent.alarm.is_set()


class CountingLegs(Legs):
    """Legs to engines of which some are silent: those whose host begins with `dead`, which are asked for
    nothing but their health."""

    now = most = asked = 0

    async def call(self, engine: Engine, method: str, path: str, *rest: Any, **options: Any) -> bytes:
        if "dead" not in engine.url:
            return await super().call(engine, method, path, *rest, **options)
        self.asked += 1
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(0.02)
        finally:
            self.now -= 1
        raise LegFailed(engine, "head_timeout", f"{engine.url}: silent")


async def test_a_live_engine_among_a_thousand_silent_ones_is_used_soon_and_all_the_time() -> None:
    live = FakeEngine("live")
    client = Client()
    fleet = Fleet(defer=asyncio.get_running_loop().call_later)
    lost: list[Engine] = []
    fleet.on_loss(lost.append)
    legs = CountingLegs(client, RouterConfig(engine=("http://127.0.0.1:1",)))
    async with engines(live):
        dead = [Member(f"http://dead{i}:1", BOTH) for i in range(1000)]
        prober = Prober(
            StaticDiscovery([*dead, Member(live.url, BOTH)]),
            fleet,
            legs,
            Counter(None, legs, fleet),
            Handovers(Nixl(), legs, fleet, Notifications(), notification_timeout=1.0),
            Budgets(),
            waiting_interval=0.001,
        )
        running = asyncio.create_task(prober.run())

        async def used() -> bool:
            return [e.url for e in fleet.answering] == [live.url]

        await eventually(used)
        known = fleet.answering[0]

        async def looked_around() -> bool:
            assert known.state is State.READY
            return legs.asked > 3000

        await eventually(looked_around)
        assert legs.most <= 256 + 128
        assert not lost, "an engine that is out of use is not lost again and again"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    await client.aclose()
