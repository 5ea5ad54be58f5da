"""A router in front of fake engines, and a client for it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import httpx
import pytest

from tandem.config import RouterConfig
from tandem.prompt import PromptCounter
from tandem.router.app import App, running
from tandem.router.budgets import Budgets
from tandem.router.engines import Engine, EngineRole, State
from tandem.router.handover import Handovers, Pace
from tandem.router.waiting import Line

from ..api.conftest import bare_api_server
from .fakes import FakeEngine, engines, eventually, local_counter
from .lmcache_fakes import CHUNK, FakeDecoder, FakePrefiller, Lab, Members, Watched

__all__ = ["bare_api_server"]

SHORT = {"model": "m", "prompt": "hi", "max_tokens": 8}
LONG = {"model": "m", "prompt": "a prompt that is longer than the threshold", "max_tokens": 8}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "a question longer than the threshold"}]}


@dataclass
class Endpoint:
    """A running router, its engines, and an HTTP client of it."""

    client: httpx.AsyncClient
    app: App
    prefill: list[FakeEngine]
    decode: list[FakeEngine]
    roleless: list[FakeEngine] = field(default_factory=list)
    """Those without a role."""

    def of(self, fake: FakeEngine) -> Engine:
        """A fake as the router knows it."""
        return next(e for e in self.app.fleet.engines if e.url == fake.url)

    def named(self, name: str) -> FakeEngine:
        return next(e for e in (*self.prefill, *self.decode, *self.roleless) if e.name == name)

    async def look_at(self, fake: FakeEngine, holds: Callable[[Engine], object]) -> None:
        """Have the router visit an engine, until it knows what it should."""
        engine = self.of(fake)

        async def seen() -> bool:
            if not holds(engine):
                engine.doubt()
            return bool(holds(engine))

        await eventually(seen)

    async def post(
        self, body: dict[str, Any] | bytes, path: str = "/v1/completions", **headers: str
    ) -> httpx.Response:
        content = body if isinstance(body, bytes) else None
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.post(
            path,
            content=content,
            json=None if content is not None else body,
            headers={"content-type": "application/json", **named},
        )

    async def raw(self, *pieces: bytes) -> bytes:
        """All that the router sends on a connection of its own, on which it receives these pieces and then
        nothing."""
        reader, writer = await asyncio.open_connection(self.client.base_url.host, self.client.base_url.port)
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            return await reader.read(-1)
        finally:
            writer.close()

    async def metric(self, line: str) -> float:
        """The value of one sample of the router's /metrics; 0 when it is not there."""
        text = (await self.client.get("/metrics")).text
        return next((float(t.rsplit(" ", 1)[1]) for t in text.splitlines() if t.startswith(line + " ")), 0.0)

    async def samples(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """All samples of a metric of the router, by the values of these labels."""
        found = {}
        text = (await self.client.get("/metrics")).text
        for told, value in re.findall(rf"(?m)^{name}\{{(.*)\}} (\S+)$", text):
            named = dict(re.findall(r'(\w+)="([^"]*)"', told))
            found[tuple(named[label] for label in labels)] = float(value)
        return found

    async def outcomes(self) -> dict[tuple[str, ...], float]:
        """How many requests there were by path, reason and outcome."""
        return await self.samples("tandem_requests_total", "path", "reason", "outcome")

    async def failures(self) -> dict[tuple[str, ...], float]:
        """How many legs failed by role and cause."""
        return await self.samples("tandem_leg_failures_total", "role", "cause")

    async def stream(self, body: dict[str, Any], path: str = "/v1/completions") -> tuple[bytes, bool]:
        """The bytes of a streamed answer, and whether it was whole."""
        received = b""
        try:
            async with self.client.stream("POST", path, json={**body, "stream": True}) as answer:
                assert answer.status_code == 200
                async for part in answer.aiter_bytes():
                    received += part
        except (httpx.RemoteProtocolError, httpx.ReadError):
            return received, False
        return received, True

    async def ready(self) -> None:
        """Until every engine is in use, and every pair proved that may be."""

        async def all_proved() -> bool:
            answer = await self.client.get("/ready")
            fleet = self.app.fleet
            ours = {fake.url for fake in (*self.prefill, *self.decode, *self.roleless)}
            known = [e for e in fleet.engines if e.url in ours and e.models]
            ready = all(e.state is State.READY for e in known if e.answers)
            prefillers, decoders = fleet.of(EngineRole.PREFILL), fleet.of(EngineRole.DECODE)
            pairs = [(p, d) for p in prefillers for d in decoders if fleet.may_pair(p, d)]
            proved = all(p in fleet.prefillers_for(d).all for p, d in pairs)
            return answer.status_code == 200 and len(known) == len(ours) and ready and proved

        await eventually(all_proved)


Start = Callable[..., Awaitable[Endpoint]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Start a router: `await start(prefill=1, decode=2, routing_threshold=10, …)`.

    `roleless`: how many engines without a role. `knows_ids`: see `FakeEngine`. `serves`: the names of models
    by an engine's name (p0, d1, e0), an adapter as `name:base`. `labels`: what follows its URL, by its name.
    `local` counts prompts; `before` may change the fakes before the router sees them; `wait` for all to be
    proved. The rest is the router's configuration."""
    async with AsyncExitStack() as stack:

        async def start_one(
            *,
            prefill: int = 1,
            decode: int = 1,
            roleless: int = 0,
            wait: bool = True,
            local: PromptCounter | None = None,
            before: Callable[[list[FakeEngine], list[FakeEngine]], None] = lambda prefill, decode: None,
            knows_ids: bool = True,
            serves: Mapping[str, Sequence[str]] | None = None,
            labels: Mapping[str, str] | None = None,
            **options: Any,
        ) -> Endpoint:
            prefillers = [FakeEngine(f"p{i}") for i in range(prefill)]
            decoders = [FakeEngine(f"d{i}") for i in range(decode)]
            others = [FakeEngine(f"e{i}") for i in range(roleless)]
            before(prefillers, decoders)
            for fake in (*prefillers, *decoders, *others):
                fake.knows_ids &= knows_ids
                if serves is not None:
                    fake.cards = [_card(name, fake.max_model_len) for name in serves[fake.name]]
            await stack.enter_async_context(engines(*prefillers, *decoders, *others))

            def urls(fakes: list[FakeEngine]) -> tuple[str, ...]:
                return tuple(",".join(filter(None, (e.url, (labels or {}).get(e.name)))) for e in fakes)

            config = RouterConfig(
                port=0,
                prefill=urls(prefillers),
                decode=urls(decoders),
                # How deadlines grow, with prompts and where an answer is not streamed, has tests of its own.
                # Engines in turn, so that tests know whose turn it is.
                **{
                    "engine": urls(others),
                    "routing_threshold": 20,
                    "routing_strategy": "roundrobin",
                    "drain_timeout": 1.0,
                    "answer_timeout": 0.0,
                    "seconds_per_1000_tokens": 0.0,
                    "ramp_up": 0.0,
                    **options,
                },
            )
            server, app = await stack.enter_async_context(running(config, local, waiting_interval=0.01))
            client = await stack.enter_async_context(
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=20.0, trust_env=False)
            )
            endpoint = Endpoint(client, app, prefillers, decoders, others)
            if wait:
                await endpoint.ready()
            return endpoint

        yield start_one


def _card(name: str, max_model_len: int) -> dict[str, Any]:
    name, _, base = name.partition(":")
    card = {"id": name, "object": "model", "max_model_len": max_model_len}
    return {**card, "parent": base} if base else card


@pytest.fixture
async def no_task_left() -> AsyncIterator[None]:
    yield
    assert asyncio.all_tasks() - {asyncio.current_task()} == set()


PACE = Pace(settle=0.03, retries=(0.03,), release=5.0, late=0.3, shutdown=0.2)

StartLab = Callable[..., Awaitable[Lab]]


@pytest.fixture
async def lab(no_task_left: None, start: Start, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[StartLab]:
    """Start a router with the lmcache connector: `await lab(prefill=2, ranks=4, buffer=3, …)`.

    `buffer`: chunks of each decoder; `pace`: of clean-ups; `before`: changes engines before the router sees
    them. The rest is the router's configuration. At the end nothing may be left on either side, and no engine
    may have died; a test that ends otherwise sets `lab.explained`."""
    begun: list[Lab] = []

    async def start_one(
        *,
        prefill: int = 1,
        decode: int = 1,
        ranks: int = 1,
        buffer: int = 3,
        pace: Pace = PACE,
        before: Callable[[Lab], None] = lambda lab: None,
        **options: Any,
    ) -> Lab:
        made = Lab()
        begun.append(made)

        def keep(name: str, replaced: str, kind: Callable[..., Any], **more: Any) -> None:
            def make(*args: Any, **named: Any) -> Any:
                thing = kind(*args, **named, **more)
                setattr(made, name, thing)
                return thing

            monkeypatch.setattr(f"tandem.router.app.{replaced}", make)

        keep("notifications", "Notifications", Watched)
        keep("handovers", "Handovers", Handovers, pace=pace)
        keep("budgets", "Budgets", Budgets)
        keep("line", "Line", Line)
        keep("members", "discovery_of", Members)

        def replace(prefillers: list[FakeEngine], decoders: list[FakeEngine]) -> None:
            made.decode = [
                FakeDecoder(d.name, alloc_port=7400 + 10 * i, capacity=buffer) for i, d in enumerate(decoders)
            ]
            made.prefill = [
                FakePrefiller(
                    p.name, ranks=ranks, decoders=made.decode, router=lambda: made.notifications.address
                )
                for p in prefillers
            ]
            before(made)
            prefillers[:], decoders[:] = made.prefill, made.decode

        made.endpoint = await start(
            prefill=prefill,
            decode=decode,
            before=replace,
            **{
                "connector": "lmcache",
                "lmcache_buffer_chunks": buffer,
                "lmcache_chunk_size": CHUNK,
                "lmcache_ranks": ranks,
                "lmcache_notify": "127.0.0.1:0",
                "lmcache_receivers": tuple(_receiver(i, ranks) for i in range(decode)),
                "local": local_counter(),
                "notification_timeout": 5.0,
                **options,
            },
        )
        return made

    yield start_one
    try:
        for made in begun:
            if not made.explained:
                await made.idle()
            assert [d.dead_of for d in made.decode] == [None] * len(made.decode)
    finally:
        for prefiller in chain.from_iterable(made.prefill for made in begun):
            prefiller.close()


def _receiver(decoder: int, ranks: int) -> str:
    init, alloc = (",".join(str(first + 10 * decoder + r) for r in range(ranks)) for first in (7300, 7400))
    return f"127.0.0.1:{init}:{alloc}"
