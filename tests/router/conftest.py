"""A router in front of fake engines, and a client for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tandem.config import RouterConfig
from tandem.router.app import App, running
from tandem.router.engines import EngineRole

from .fakes import FakeEngine, engines, eventually


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
    """Start a router: `await start(prefill=1, decode=2, routing_threshold=10, …)`."""
    async with AsyncExitStack() as stack:

        async def start_one(
            *, prefill: int = 1, decode: int = 1, wait: bool = True, **options: Any
        ) -> Endpoint:
            prefillers = [FakeEngine(f"p{i}") for i in range(prefill)]
            decoders = [FakeEngine(f"d{i}") for i in range(decode)]
            await stack.enter_async_context(engines(*prefillers, *decoders))
            config = RouterConfig(
                port=0,
                prefill=tuple(e.url for e in prefillers),
                decode=tuple(e.url for e in decoders),
                **{"routing_threshold": 20, "drain_timeout": 1.0, **options},
            )
            server, app = await stack.enter_async_context(running(config, None, waiting_interval=0.01))
            client = await stack.enter_async_context(
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=20.0, trust_env=False)
            )
            endpoint = Endpoint(client, app, prefillers, decoders)
            if wait:
                await endpoint.ready()
            return endpoint

        yield start_one
