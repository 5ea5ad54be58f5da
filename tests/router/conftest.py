"""A router in front of fake engines, and a client for it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tandem.config import RouterConfig
from tandem.prompt import PromptCounter
from tandem.router.app import App, running
from tandem.router.engines import EngineRole

from .fakes import FakeEngine, engines, eventually

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

    async def post(
        self, body: dict[str, Any] | bytes, path: str = "/v1/completions", **headers: str
    ) -> httpx.Response:
        content = body if isinstance(body, bytes) else None
        return await self.client.post(
            path,
            content=content,
            json=None if content is not None else body,
            headers={k.replace("_", "-"): v for k, v in headers.items()},
        )

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
        """Until every engine is in use and every pair proved."""

        async def all_proved() -> bool:
            answer = await self.client.get("/ready")
            fleet = self.app.fleet
            decoders = fleet.ready(EngineRole.DECODE)
            pairs = sum(len(fleet.prefillers_for(d)) for d in decoders)
            return answer.status_code == 200 and pairs == len(self.prefill) * len(self.decode)

        await eventually(all_proved)


Start = Callable[..., Awaitable[Endpoint]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Start a router: `await start(prefill=1, decode=2, routing_threshold=10, …)`.

    `local` counts prompts; `before` may change the fakes before the router sees them; `wait` for all to be
    proved. The rest is the router's configuration."""
    async with AsyncExitStack() as stack:

        async def start_one(
            *,
            prefill: int = 1,
            decode: int = 1,
            wait: bool = True,
            local: PromptCounter | None = None,
            before: Callable[[list[FakeEngine], list[FakeEngine]], None] = lambda prefill, decode: None,
            **options: Any,
        ) -> Endpoint:
            prefillers = [FakeEngine(f"p{i}") for i in range(prefill)]
            decoders = [FakeEngine(f"d{i}") for i in range(decode)]
            before(prefillers, decoders)
            await stack.enter_async_context(engines(*prefillers, *decoders))
            config = RouterConfig(
                port=0,
                prefill=tuple(e.url for e in prefillers),
                decode=tuple(e.url for e in decoders),
                **{"routing_threshold": 20, "drain_timeout": 1.0, **options},
            )
            server, app = await stack.enter_async_context(running(config, local, waiting_interval=0.01))
            client = await stack.enter_async_context(
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=20.0, trust_env=False)
            )
            endpoint = Endpoint(client, app, prefillers, decoders)
            if wait:
                await endpoint.ready()
            return endpoint

        yield start_one
