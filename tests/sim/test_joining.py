"""Engines join and leave while requests run: none is lost, and one that left gets none. In virtual time."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from tandem.config import STRATEGIES, RouterConfig
from tandem.http import Client, Origin
from tandem.router.app import App, running
from tandem.router.discovery import Discovery, Member
from tandem.router.engines import EngineRole, State
from tandem.sim import virtual

from .helpers import MODEL, Engines, engines, flags, pair

REQUESTS = 200


class Changing(Discovery):
    """A discovery source whose engines a test sets."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = frozenset(members)
        self._changed = asyncio.Event()

    def set(self, members: Sequence[Member]) -> None:
        self._members = frozenset(members)
        self._changed.set()

    async def watch(self) -> AsyncIterator[frozenset[Member]]:
        while True:
            self._changed.clear()
            yield self._members
            await self._changed.wait()


class Load:
    """Clients of a router, and what became of their requests."""

    def __init__(self, port: int, client: Client, rnd: random.Random) -> None:
        self._origin = Origin("127.0.0.1", port)
        self._client = client
        self._rnd = rnd
        self.answers: Counter[str] = Counter()

    async def request(self, number: int) -> None:
        shared = [number % 7 * 1000 + i for i in range(160)]
        prompt = shared + [number % 900 + 10] * self._rnd.choice((5, 80, 200))
        stream = number % 2 == 0
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 20, "temperature": 0, "stream": stream}
        headers = [(b"content-type", b"application/json"), (b"x-session-id", b"%d" % (number % 20))]
        pieces: list[bytes] = []
        async with self._client.stream(
            self._origin,
            "POST",
            b"/v1/completions",
            headers,
            json.dumps(body).encode(),
            head_timeout=600,
            idle_timeout=600,
        ) as response:
            await response.relay(pieces.append)
        assert response.status == 200, b"".join(pieces)
        data = b"".join(pieces)
        if stream:
            assert data.endswith(b"data: [DONE]\n\n")
            events = [e for e in data.split(b"\n\n") if e.startswith(b"data: {")]
            assert sum(b'"text":"' in e for e in events) >= 20
        else:
            assert json.loads(data)["usage"]["completion_tokens"] == 20
        self.answers["whole"] += 1

    async def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        pieces: list[bytes] = []
        async with self._client.stream(self._origin, "GET", b"/metrics", []) as response:
            await response.relay(pieces.append)
        lines = b"".join(pieces).decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


async def served(sims: Engines, number: int) -> float:
    """Requests that an engine has answered."""
    return await sims.metric(number, "vllm:request_success_total")


def in_hand(sims: Engines, number: int) -> bool:
    state = sims[number].engine.state()
    return bool(state["running"] or state["waiting"] or state["loading"])


async def known(app: App, members: Sequence[Member]) -> None:
    """Until all engines that are told are in use, with each other."""
    while True:
        ready = {e.url for e in app.fleet.engines if e.state is State.READY}
        if ready == {m.url for m in members} and not app.fleet.unproved:
            return
        await asyncio.sleep(0.05)


async def churn(
    lines: Sequence[list[str]], roles: Sequence[EngineRole], here: int, *, per_second: float, **options: Any
) -> None:
    """Of the engines of each role so many are there at a time; each in turn leaves and comes back."""
    async with engines(*lines, environment={}) as sims:
        everyone = [Member(url, role) for url, role in zip(sims.fleet.urls, roles, strict=True)]
        by_role = {role: [m for m in everyone if m.role is role] for role in dict.fromkeys(roles)}

        def at(turn: int) -> list[Member]:
            return [each[(turn + i) % len(each)] for each in by_role.values() for i in range(here)]

        discovery, rnd, client = Changing(at(0)), random.Random(5), Client()
        config = RouterConfig(
            port=0,
            engine=("http://127.0.0.1:1",),  # what discovery tells counts
            routing_threshold=100,
            ramp_up=2.0,
            drain_timeout=10.0,
            log_level="error",
            **options,
        )
        async with running(config, None, discovery=discovery, waiting_interval=0.05) as (server, app):
            load = Load(server.port, client, rnd)
            await known(app, at(0))
            clients: list[asyncio.Task[None]] = []

            async def requests() -> None:
                for number in range(REQUESTS):
                    clients.append(asyncio.create_task(load.request(number)))
                    await asyncio.sleep(rnd.expovariate(per_second))

            arriving = asyncio.create_task(requests())
            turn = 0
            while not arriving.done():
                turn += 1
                gone = [everyone.index(m) for m in set(at(turn - 1)) - set(at(turn))]
                leaving = [e for e in app.fleet.engines if e.url in {everyone[number].url for number in gone}]
                working = [number for number in gone if in_hand(sims, number)]
                discovery.set(at(turn))
                await asyncio.sleep(0.1)
                finishing = {number: await served(sims, number) for number in working}
                while any(e.held or e.in_flight for e in leaving):
                    await asyncio.sleep(0.05)
                for number, before in finishing.items():
                    load.answers["ended after its engine left"] += await served(sims, number) - before
                # Whoever asks one of these now is refused.
                for number in gone:
                    await sims[number].set_faults("refuse")
                await known(app, at(turn))
                await asyncio.sleep(0.3)
                for number in gone:
                    await sims[number].set_faults("")
            await arriving
            await asyncio.gather(*clients)
            assert turn >= 8, "too little changed to show anything"
            assert load.answers["whole"] == REQUESTS
            assert load.answers["ended after its engine left"] > 0
            assert await load.metric("tandem_leg_failures_total") == 0
            assert await load.metric('tandem_requests_total{outcome="ok"') == REQUESTS
            assert await load.metric("tandem_requests_in_flight{") == 0
            assert await load.metric("tandem_tokens_in_flight{") == 0
            counts = [await served(sims, number) for number in range(len(everyone))]
            assert min(counts) > 0, "each had its share"
            await client.aclose()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_request_is_lost_while_engines_without_a_role_come_and_go(strategy: str) -> None:
    lines = [flags() for _ in range(6)]
    virtual.run(churn(lines, [EngineRole.BOTH] * 6, 3, per_second=20, routing_strategy=strategy))


def test_no_request_is_lost_while_prefillers_and_decoders_come_and_go() -> None:
    prefill, decode = pair()
    lines = [prefill] * 4 + [decode] * 4
    roles = [EngineRole.PREFILL] * 4 + [EngineRole.DECODE] * 4
    virtual.run(churn(lines, roles, 2, per_second=5))
