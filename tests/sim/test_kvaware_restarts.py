"""kvaware when routers start late, and when engines restart, leave and come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from tandem.config import engine_spec
from tandem.router.canary import Prober
from tandem.router.discovery import Member
from tandem.router.engines import EngineRole
from tandem.sim import EngineSpec, parse

from .helpers import Engines, engines
from .kvaware_router import QUICK, Start, eventually, ids, publishing, spec, starting, until


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Start:
    """See `starting`."""
    return starting(monkeypatch)


async def test_a_router_that_starts_later_is_told_what_was_before(tmp_path: Path, router: Start) -> None:
    lines = [publishing(tmp_path, i) for i in range(2)]
    async with engines(*lines, **QUICK) as sims:
        for seed in range(8):
            await sims.complete(seed % 2, ids(seed, 200))
        async with router(sims) as r:
            await r.caught_up()
            for told in (await r.engines()).values():
                (rank,) = told["kvIndex"]
                assert (rank["sinceStart"], rank["coverage"]) == (True, 1.0)
            for seed in range(8):
                answer = await r.agreed(ids(seed, 200))
                assert (answer.engine, answer.cached) == (sims[seed % 2].url, 192)
                assert "fallback" not in answer.why


async def test_what_is_not_replayed_is_missed_and_said_once(
    tmp_path: Path, router: Start, caplog: pytest.LogCaptureFixture
) -> None:
    async with engines(publishing(tmp_path, 0), **QUICK) as sims:
        for seed in range(3):
            await sims.complete(0, ids(seed, 200))
        async with router(specs=(spec(sims, 0, replay=False),)) as r:
            # The first events that come show how much is missing; until then none have come.
            seed = 9
            while not (await r.engines())[sims[0].url]["kvIndex"]:
                seed += 1
                await r.complete(ids(seed, 100))
            before = await r.metrics()
            answer = await r.complete(ids(0, 200))
            assert (answer.expected, answer.cached) == (0, 192)
            assert answer.why.endswith("(fallback: joined_late)")
            await r.complete(ids(seed, 100))
            told = await r.metrics()
            name = 'tandem_kvaware_fallbacks_total{reason="joined_late"}'
            assert told[name] == before.get(name, 0) + 2
            assert told[f'tandem_kv_index_coverage{{engine="{sims[0].url}",rank="0"}}'] == -1
            assert len([m for m in caplog.messages if "falls back (joined_late)" in m]) == 1


async def test_an_engine_that_was_restarted_is_expected_to_hold_nothing(
    tmp_path: Path, router: Start
) -> None:
    line = publishing(tmp_path, 0)
    async with engines(line, **QUICK) as sims:
        port, text = sims[0].port, spec(sims, 0)
        async with router(specs=(text,)) as r:
            r.sims.append(sims)
            await r.agreed(ids(1, 100))
            assert (await r.agreed(ids(1, 100))).cached == 96
            life = r.app.fleet.engines[0].life
            await sims.fleet.close()
            r.look()
            await r.ready(0)
            async with engines(EngineSpec(parse(line), port=port), **QUICK) as again:
                await r.ready(1)
                assert r.app.fleet.engines[0].life == life + 1
                r.sims[:] = [again]
                # What is said of the process before it counts as said of this one, so: is it right again?
                for seed in (1, 2):
                    first = await r.complete(ids(seed, 100))
                    assert (first.expected, first.cached) == (0, 0)

                    async def known(seed: int = seed) -> bool:
                        return bool((await r.chosen(ids(seed, 100)))["expectedHitTokens"] == 96)

                    await eventually(known)
                    assert (await r.complete(ids(seed, 100))).cached == 96
                (rank,) = (await r.engines())[again[0].url]["kvIndex"]
                assert (rank["sinceStart"], rank["coverage"]) == (True, 1.0)
                assert (await r.metrics())['tandem_kv_events_total{kind="restart"}'] >= 1


async def test_events_tell_of_a_restart_that_nobody_else_saw(
    tmp_path: Path, router: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that comes after answers before the router looks again."""
    monkeypatch.setattr("tandem.router.app.Prober", partial(Prober, ready_interval=1000.0))
    line = publishing(tmp_path, 0)
    async with engines(line, **QUICK) as sims:
        port, text = sims[0].port, spec(sims, 0)
        async with router(specs=(text,)) as r:
            r.sims.append(sims)
            await r.agreed(ids(1, 100))
            await r.agreed(ids(2, 100))
            await sims.fleet.close()
            async with engines(EngineSpec(parse(line), port=port), **QUICK) as again:
                seed, counts = 10, r.knowledge.subscriber.counts
                # Its events are numbered from 0 again, and some are missed until ZMQ has connected.
                while r.knowledge.subscriber.counts == counts:
                    seed += 1
                    await again.complete(0, ids(seed, 100))
                    await asyncio.sleep(0.02)
                await until(lambda: r.knowledge.subscriber.idle)
                assert r.app.fleet.engines[0].life == 1
                assert (await r.chosen(ids(1, 100)))["expectedHitTokens"] == 0

                async def known() -> bool:
                    return bool((await r.chosen(ids(seed, 100)))["expectedHitTokens"] == 96)

                await eventually(known)
                answer = await r.complete(ids(2, 100))
                assert (answer.expected, answer.cached) == (0, 0)


class Told:
    """A discovery source that finds what a test makes it find."""

    def __init__(self, *members: Member) -> None:
        self.members = frozenset(members)
        self.changed = asyncio.Event()

    def tell(self, *members: Member) -> None:
        self.members = frozenset(members)
        self.changed.set()

    async def watch(self) -> AsyncIterator[frozenset[Member]]:
        while True:
            yield self.members
            await self.changed.wait()
            self.changed.clear()


def member(sims: Engines, number: int) -> Member:
    return Member.of(engine_spec(spec(sims, number)), EngineRole.BOTH)


async def test_an_engine_that_leaves_is_forgotten_and_known_again_when_it_is_back(
    tmp_path: Path, router: Start
) -> None:
    lines = [publishing(tmp_path, i) for i in range(2)]
    async with engines(*lines, **QUICK) as sims:
        here = [member(sims, i) for i in range(2)]
        discovery = Told(*here)
        async with router(sims, discovery=discovery) as r:
            first = await r.agreed(ids(1, 200))
            holder = sims.fleet.urls.index(first.engine)
            discovery.tell(here[1 - holder])
            await r.ready(1)
            assert first.engine not in await r.engines()
            assert first.engine not in str(await r.metrics())
            other = await r.agreed(ids(2, 200))
            assert other.engine == sims[1 - holder].url
            elsewhere = await r.complete(ids(1, 200), max_tokens=1)
            assert (elsewhere.engine, elsewhere.expected, elsewhere.cached) == (other.engine, 0, 0)
            # What it computes meanwhile is known as well once it is back.
            await sims.complete(holder, ids(3, 200))
            discovery.tell(*here)
            await r.ready(2)
            await until(lambda: r.knowledge.subscriber.idle)
            back = await r.chosen(ids(3, 200))
            assert (back["url"], back["expectedHitTokens"]) == (first.engine, 192)
            (rank,) = (await r.engines())[first.engine]["kvIndex"]
            assert (rank["sinceStart"], rank["coverage"]) == (True, 1.0)
