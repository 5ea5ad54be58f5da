"""A router with kvaware before simulated engines that publish KV events, in real time: ZMQ has threads of its
own."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tandem.config import RouterConfig
from tandem.http import Client, Headers, Origin
from tandem.router.app import App, running
from tandem.router.discovery import Discovery
from tandem.router.engines import State
from tandem.router.knowledge import Knowledge

from .helpers import MODEL, Answer, Engines, flags

QUICK = {"time_scale": 50}
_JSON: Headers = [(b"content-type", b"application/json")]


@dataclass
class Routed(Answer):
    """An answer that came through the router, and how the router explains it."""

    explained: dict[str, str] = field(default_factory=dict)

    @property
    def cached(self) -> int:
        """What the engine found in its cache."""
        usage = self.json["usage"]
        return int((usage["prompt_tokens_details"] or {}).get("cached_tokens", 0))

    @property
    def expected(self) -> int:
        return int(self.explained["decode-expected-hit"])

    @property
    def engine(self) -> str:
        return self.explained["decode-url"]

    @property
    def why(self) -> str:
        return self.explained["decode-why"]


@dataclass
class Router:
    """A running router, a client of its ports, and what it knows."""

    app: App
    port: int
    client: Client
    knowledge: Knowledge
    sims: list[Engines]

    async def post(self, path: str, body: dict[str, Any]) -> Routed:
        headers: Headers = [*_JSON, (b"x-tandem-explain", b"1")]
        status, fields, data = await self._ask(self.port, "POST", path, headers, json.dumps(body).encode())
        assert status == 200, data
        named = {k.decode(): v.decode() for k, v in fields}
        told = {k.removeprefix("x-tandem-"): v for k, v in named.items() if k.startswith("x-tandem-")}
        return Routed(status, fields, data, 0.0, explained=told)

    async def complete(self, prompt: Any, **more: Any) -> Routed:
        body = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 4, **more}
        return await self.post("/v1/completions", body)

    async def agreed(self, prompt: Any, **more: Any) -> Routed:
        """A completion that finds in the cache what the router expects there, all being known."""
        await self.caught_up()
        answer = await self.complete(prompt, **more)
        assert answer.expected == answer.cached
        return answer

    async def chosen(self, prompt: Any, **more: Any) -> dict[str, Any]:
        """What the admin port says would be chosen."""
        body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 4, **more}).encode()
        assert self.app.admin is not None
        status, _, data = await self._ask(self.app.admin.port, "POST", "/admin/route", _JSON, body)
        assert status == 200, data
        told: dict[str, Any] = json.loads(data)["decode"]
        return told

    async def engines(self) -> dict[str, dict[str, Any]]:
        """What the admin port tells of engines, by URL."""
        assert self.app.admin is not None
        _, _, data = await self._ask(self.app.admin.port, "GET", "/engines")
        return {engine["url"]: engine for engine in json.loads(data)["engines"]}

    async def metrics(self) -> dict[str, float]:
        """All tandem_kv… samples."""
        assert self.app.admin is not None
        _, _, data = await self._ask(self.app.admin.port, "GET", "/metrics")
        found = re.findall(r"(?m)^(tandem_kv\S*) (\S+)$", data.decode())
        return {name: float(value) for name, value in found if "_created" not in name}

    async def caught_up(self) -> None:
        """All that engines have published since they are followed is in the index."""
        subscriber = self.knowledge.subscriber
        published = sum(p.engine.publisher._sequence for e in self.sims for p in e.fleet.engines
                        if p.engine.publisher is not None)  # fmt: skip
        await until(lambda: subscriber.idle and subscriber.batches >= published)

    async def ready(self, count: int) -> None:
        await until(lambda: sum(e.state is State.READY for e in self.app.fleet.engines) == count)

    def look(self) -> None:
        """Have every engine looked at now, not in a few seconds."""
        for engine in self.app.fleet.engines:
            engine.doubt()

    async def _ask(
        self, port: int, method: str, path: str, headers: Headers | None = None, body: bytes = b""
    ) -> tuple[int, Headers, bytes]:
        origin = Origin("127.0.0.1", port)
        async with self.client.stream(origin, method, path.encode(), headers or [], body) as response:
            data = await response.read(1 << 24)
            return response.status, response.headers, data


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await condition():
            await asyncio.sleep(0.005)


Start = Callable[..., Any]


def starting(monkeypatch: pytest.MonkeyPatch) -> Start:
    """What starts a router: `async with start(sims, …) as r`, before all engines of `sims` or before `specs`.
    `wait` for so many to be in use. The rest is its configuration."""
    made: list[Knowledge] = []

    def make(*args: Any) -> Knowledge:
        made.append(Knowledge(*args))
        return made[-1]

    monkeypatch.setattr("tandem.router.app.Knowledge", make)

    @asynccontextmanager
    async def start(
        *sims: Engines,
        specs: tuple[str, ...] | None = None,
        wait: int | None = None,
        discovery: Discovery | None = None,
        **options: Any,
    ) -> AsyncIterator[Router]:
        given = specs if specs is not None else tuple(spec(e, i) for e in sims for i in range(count(e)))
        options = {"engine": given, "routing_strategy": "kvaware", "ramp_up": 0.0, **options}
        config = RouterConfig(port=0, admin_port=0, explain=True, drain_timeout=1.0, **options)
        client = Client()
        async with running(config, None, discovery=discovery, waiting_interval=0.01) as (server, app):
            made_router = Router(app, server.port, client, made[-1], list(sims))
            await made_router.ready(len(given) if wait is None else wait)
            yield made_router
            await client.aclose()

    return start


def count(sims: Engines) -> int:
    return len(sims.fleet.engines)


def spec(sims: Engines, number: int, *, replay: bool = True) -> str:
    """An engine as `--engine` takes it, with the endpoints that it publishes on."""
    engine = sims[number]
    publisher = engine.engine.publisher
    assert publisher is not None
    text = f"{engine.url},kv-events={publisher.endpoint}"
    return f"{text},kv-replay={publisher.replay_endpoint}" if replay else text


def publishing(
    folder: Path, number: int, *more: str, blocks: int = 200, tcp: bool = False, base: list[str] | None = None
) -> list[str]:
    """A command line of an engine that publishes KV events at sockets in a folder, or at free ports."""
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://127.0.0.1:*" if tcp else f"ipc://{folder}/e{number}",
        "replay_endpoint": "tcp://127.0.0.1:*" if tcp else f"ipc://{folder}/r{number}",
    }
    line = base or flags("--num-gpu-blocks-override", str(blocks))
    return [*line, "--kv-events-config", json.dumps(config), *more]


def ids(seed: int, length: int) -> list[int]:
    """A prompt that shares nothing with another seed's."""
    return [1000 * seed + i for i in range(length)]
