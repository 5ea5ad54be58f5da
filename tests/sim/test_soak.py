"""A router before 32 engines that break all the time: nobody gets a wrong answer, and nothing is left behind.

In virtual time, so that minutes of trouble take seconds.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from tandem.bench.scrape import ROUTER_IN_HAND
from tandem.config import RouterConfig
from tandem.http import Client, HTTPClientError, Origin
from tandem.router.app import App, running
from tandem.sim import virtual
from tandem.sim.handoff import Network

from .helpers import MODEL, Engines, engines
from .matrix import Connector
from .matrix_bench import ENVIRONMENT, command_lines, connector_flags, delivery

PREFILLERS, DECODERS = 12, 20
# What may befall an engine. Left out is what no router can see: KV that was overwritten before it was read,
# and an event that is no JSON in a stream that ends well.
TROUBLE = (
    "status=500,rate=0.5",
    "status=503",
    "head=500,rate=0.7",
    "reset",
    "reset@2",
    "crash@3,rate=0.5",
    "truncate@1",
    "error",
    "error@2",
    "hang,rate=0.3",
    "hang@2,rate=0.3",
    "delay=2",
    "delay=1@2",
    "no-kv-params",
    "lost-kv,rate=0.5",
    "slow=5",
    "refuse",
)
LMCACHE_TROUBLE = ("lost-notification,rate=0.5", "late-notification=3", "full-buffer,rate=0.3")


class Soak:
    """The clients, and what became of their requests."""

    def __init__(self, sims: Engines, url: str, client: Client, rnd: random.Random) -> None:
        self.sims, self.client, self.rnd = sims, client, rnd
        self.origin = Origin.parse(url)
        self.ends: Counter[str] = Counter()

    async def request(self, number: int) -> None:
        rnd = self.rnd
        prompt = [number % 900 + 10, *(rnd.randrange(10, 900) for _ in range(rnd.choice((5, 90, 300))))]
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": 8,
            "temperature": 0,
            "stream": rnd.random() < 0.5,
        }
        patience = rnd.uniform(0.0, 1.0) if rnd.random() < 0.15 else None
        try:
            async with asyncio.timeout(patience):
                status, data = await self.send(body)
        except TimeoutError:
            self.ends["the client left"] += 1
            return
        except HTTPClientError:
            self.ends["broken off"] += 1
            return
        if status != 200:
            assert status in (500, 502, 503), data
            assert json.loads(data)["error"]["message"]
            self.ends["an error"] += 1
            return
        assert text_of(data) == text_of(await self.alone(body)), f"wrong answer to {number}"
        self.ends["the right answer"] += 1

    async def send(self, body: dict[str, Any]) -> tuple[int, bytes]:
        pieces: list[bytes] = []
        headers = [(b"content-type", b"application/json")]
        data = json.dumps(body).encode()
        async with self.client.stream(
            self.origin, "POST", b"/v1/completions", headers, data, head_timeout=600, idle_timeout=600
        ) as response:
            await response.relay(pieces.append)
            return response.status, b"".join(pieces)

    async def metrics(self) -> dict[str, float]:
        pieces: list[bytes] = []
        async with self.client.stream(self.origin, "GET", b"/metrics", []) as response:
            await response.relay(pieces.append)
        lines = b"".join(pieces).decode().splitlines()
        return {x.rsplit(" ", 1)[0]: float(x.rsplit(" ", 1)[1]) for x in lines if not x.startswith("#")}

    async def leg_failures(self) -> float:
        told = await self.metrics()
        return sum(value for name, value in told.items() if name.startswith("tandem_leg_failures_total{"))

    async def gauges(self) -> dict[str, float]:
        """What the router has in hand, where it has anything."""
        told = await self.metrics()
        return {name: value for name, value in told.items() if name.startswith(ROUTER_IN_HAND) and value}

    async def alone(self, body: dict[str, Any]) -> bytes:
        """What an engine that is behind no router answers."""
        return (await self.sims.ask(PREFILLERS + DECODERS, "/v1/completions", body)).body

    async def trouble(self, kinds: Sequence[str]) -> None:
        """Give one engine after another something to suffer from, for a while."""
        while True:
            engine = self.sims[self.rnd.randrange(PREFILLERS + DECODERS)]
            await engine.set_faults(self.rnd.choice(kinds))
            await asyncio.sleep(self.rnd.uniform(0.5, 3.0))
            await engine.set_faults("")


def text_of(data: bytes) -> str:
    if not data.startswith(b"data: "):
        return str(json.loads(data)["choices"][0]["text"])
    events = [e.removeprefix(b"data: ") for e in data.split(b"\n\n") if e]
    assert events.pop() == b"[DONE]"
    return "".join(c["text"] for e in events for c in json.loads(e)["choices"])


def left_behind(sims: Engines, app: App) -> list[str]:
    left = [f"{e.url}: {e.in_flight} in flight" for e in app.fleet.engines if e.in_flight]
    return left + [f"engine {i}: {sims[i].engine.state()}" for i in range(33) if not sims.idle(i)]


async def soak(connector: Connector, requests: int, seed: int) -> Counter[str]:
    lines = command_lines(connector, PREFILLERS, DECODERS)
    network = Network()
    async with engines(*lines, environment=ENVIRONMENT, network=network) as sims:
        urls = sims.fleet.urls
        config = RouterConfig(
            port=0,
            prefill=tuple(urls[:PREFILLERS]),
            decode=tuple(urls[PREFILLERS:-1]),
            routing_threshold=50,
            prefill_timeout=20.0,
            first_token_timeout=20.0,
            answer_timeout=0.0,
            stream_idle_timeout=20.0,
            max_fallbacks=20,
            log_level="error",
            **connector_flags(connector, DECODERS),
        )
        client = Client()
        async with running(config, None) as (server, app):
            network.notify = delivery(app)
            while app.fleet.unproved:
                await asyncio.sleep(1)
            tasks_before = len(asyncio.all_tasks())
            run = Soak(sims, f"http://127.0.0.1:{server.port}", client, random.Random(seed))
            kinds = TROUBLE + (LMCACHE_TROUBLE if connector == "lmcache" else ())
            troubles = [asyncio.create_task(run.trouble(kinds)) for _ in range(4)]
            clients = []
            for number in range(requests):
                clients.append(asyncio.create_task(run.request(number)))
                await asyncio.sleep(run.rnd.expovariate(40))
            await asyncio.gather(*clients)
            for task in troubles:
                task.cancel()
            await asyncio.gather(*troubles, return_exceptions=True)
            for i in range(PREFILLERS + DECODERS):
                await sims[i].set_faults("")
            # Leases end, lost engines are proved again, idle connections are given up, and notifications that
            # were lost are waited for no more.
            await asyncio.sleep(300)
            assert app.fleet.unproved == []
            assert left_behind(sims, app) == []
            assert await run.gauges() == {}
            run.ends["a leg failed"] = int(await run.leg_failures())
            await client.aclose()
            await asyncio.sleep(1)
            assert server.connections == 0
            assert len(asyncio.all_tasks()) <= tasks_before
        return run.ends


@pytest.mark.parametrize("connector", ["nixl", "lmcache"])
@pytest.mark.parametrize(
    "requests", [500, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_requests_in_trouble_end_and_leave_nothing(connector: Connector, requests: int) -> None:
    ends = virtual.run(soak(connector, requests, seed=requests))
    print(ends)
    failures = ends.pop("a leg failed")
    assert sum(ends.values()) == requests
    assert failures > 0.02 * requests, "too little went wrong to show anything"
    assert ends["the right answer"] > 0.6 * requests
