"""Clients of a router's admin port, and engines to tell of."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, cast

import httpx

from tandem.http import Request, Responder
from tandem.prompt import PromptCounter, Tokens
from tandem.router.app import App

from .conftest import Endpoint, Start
from .fakes import FakeEngine, engines, eventually

ROUTE = "/admin/route"


class Letters:
    """Counts a token for each letter, another one for each other letter."""

    def completion(self, body: Mapping[str, Any]) -> Tokens:
        return Tokens([ord(c) for c in body["prompt"]])

    def chat(self, body: Mapping[str, Any], most: int = 0) -> Tokens:
        return Tokens([ord(c) for c in str(body["messages"])])


LETTERS = cast(PromptCounter, Letters())


@dataclass
class Patient(FakeEngine):
    """Does not answer canaries while it is told to wait."""

    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, request: Request, responder: Responder) -> None:
        if b"x-tandem-canary" in dict(request.headers):
            await self.go_on.wait()
        await super().__call__(request, responder)


@dataclass
class Administered:
    """A running router and a client of its admin port."""

    endpoint: Endpoint
    client: httpx.AsyncClient
    both: list[FakeEngine]

    async def get(self, path: str) -> Any:
        answer = await self.client.get(path)
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
        return answer.json()

    async def engine(self, fake: FakeEngine) -> dict[str, Any]:
        """What /engines tells of one."""
        (told,) = [e for e in (await self.get("/engines"))["engines"] if e["url"] == fake.url]
        return cast(dict[str, Any], told)

    async def route(self, body: dict[str, Any] | bytes, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.post(
            ROUTE, content=content, headers={"content-type": "application/json", **named}
        )

    async def chosen(self, body: dict[str, Any], **headers: str) -> dict[str, Any]:
        answer = await self.route(body, **headers)
        assert answer.status_code == 200, answer.text
        return cast(dict[str, Any], answer.json())

    async def metrics(self) -> str:
        return (await self.client.get("/metrics")).text

    async def told(self, fake: FakeEngine, **values: Any) -> None:
        """Until /engines tells these values of one."""

        async def tells() -> bool:
            return values.items() <= (await self.engine(fake)).items()

        await eventually(tells)


def admin_client(app: App) -> httpx.AsyncClient:
    assert app.admin is not None
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{app.admin.port}", timeout=20.0, trust_env=False)


Administer = Callable[..., Awaitable[Administered]]


def administering(start: Start, stack: AsyncExitStack) -> Administer:
    """What starts a router with an admin port: `await administer(prefill=2, decode=1, …)`, or before engines
    without a role: `await administer(FakeEngine("a"), FakeEngine("b"), labels=",zone=a", …)`."""

    async def administer(
        *both: FakeEngine,
        labels: str = "",
        prefill: int = 0,
        decode: int = 0,
        before: Callable[[list[FakeEngine], list[FakeEngine]], None] = lambda prefill, decode: None,
        **options: Any,
    ) -> Administered:
        def only_count(prefillers: list[FakeEngine], decoders: list[FakeEngine]) -> None:
            for fake in (*both, *prefillers, *decoders):
                fake.knows_ids = False  # so that `Letters` may have others
            before(prefillers, decoders)

        await stack.enter_async_context(engines(*both))
        endpoint = await start(
            prefill=prefill,
            decode=decode,
            engine=tuple(e.url + labels for e in both),
            admin_port=0,
            before=only_count,
            **options,
        )
        client = await stack.enter_async_context(admin_client(endpoint.app))
        administered = Administered(endpoint, client, list(both))
        if options.get("wait", True):
            for fake in both:
                await administered.told(fake, state="ready")
        return administered

    return administer
