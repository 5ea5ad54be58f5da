"""Real engines behind a router in this process, with something between the two that tests can act through.

It passes everything on as it comes. It notes every leg, and does to the legs of one kind what a test asks:
holds them before they reach the engine, holds what the engine answers, answers in its place, edits its
answer; or it refuses connections, as the port of a dead engine does.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from inspect import isawaitable
from typing import Any, Literal

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tandem.bench.scrape import ROUTER_IN_HAND
from tandem.config import RouterConfig
from tandem.http import Client, HTTPClientError, Origin, Request, Responder, Server, serve
from tandem.prompt import PromptCounter
from tandem.router.app import App, running
from tandem.router.connectors.lmcache import TAG

from . import contract
from .cases import MODEL

Kind = Literal["prefill", "decode", "alone", "release", "count", "canary", "other"]

PATIENCE_SECONDS = 60.0
"""For what has to happen soon, on a machine that does other things too."""
_OF_REQUESTS: tuple[Kind, ...] = ("prefill", "decode", "alone", "release", "count")
_SILENCE_SECONDS = 600.0
_BODY_BYTES = 64 << 20


@dataclass(eq=False)
class Leg:
    """One request of a router to an engine."""

    kind: Kind
    params: dict[str, Any] | None
    """The kv_transfer_params that it came with."""
    router: object = None
    """The router's end of its connection."""
    answered: bool = False
    """Whether the engine's answer has begun."""


class Between:
    """Stands before one engine, at an address of its own."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.legs: list[Leg] = []
        self.open: list[Leg] = []
        """Those under way."""
        self.holds: set[Kind] = set()
        """Legs that wait for `go_on` before they reach the engine."""
        self.holds_answer: set[Kind] = set()
        """Legs whose answer waits for it, once it has begun."""
        self.go_on = asyncio.Event()
        self.answers: dict[Kind, int] = {}
        """Status codes given in the engine's place."""
        self.edits: Callable[[dict[str, Any]], None] | None = None
        """Changes the engine's answers to prefill legs."""
        self._client = Client()
        self._server: Server
        self.url = ""

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Between]:
        await self.accept(0)
        try:
            yield self
        finally:
            await self._client.aclose()
            await self._server.close()

    async def accept(self, port: int | None = None) -> None:
        """Take connections (again)."""
        self._server = await serve(
            self._answer, "127.0.0.1", Origin.parse(self.url).port if port is None else port
        )
        self.url = f"http://127.0.0.1:{self._server.port}"

    async def refuse(self) -> None:
        """Break off all connections, and take none from now on."""
        await self._server.close()

    @property
    def connections(self) -> int:
        return self._server.connections

    def under_way(self, kind: Kind) -> list[Leg]:
        return [leg for leg in self.open if leg.kind == kind]

    def seen(self, kind: Kind) -> int:
        """How many legs of a kind there have been."""
        return sum(leg.kind == kind for leg in self.legs)

    async def _answer(self, request: Request, responder: Responder) -> None:
        leg = _leg(request)
        leg.router = responder._transport.get_extra_info("peername")
        self.legs.append(leg)
        self.open.append(leg)
        try:
            if leg.kind in self.holds:
                await self.go_on.wait()
            if (status := self.answers.get(leg.kind)) is not None:
                body = json.dumps({"error": {"message": "told to fail", "code": status}}).encode()
                responder.send(status, [(b"content-type", b"application/json")], body)
                return
            with suppress(HTTPClientError):
                await self._pass_on(leg, request, responder)
                return
            responder.abort()  # as the engine has done
        finally:
            self.open.remove(leg)

    async def _pass_on(self, leg: Leg, request: Request, responder: Responder) -> None:
        async with self._client.stream(
            Origin.parse(self.engine),
            request.method,
            request.target,
            request.headers,
            request.body,
            head_timeout=_SILENCE_SECONDS,
            idle_timeout=_SILENCE_SECONDS,
            retry=False,
        ) as answer:
            leg.answered = True
            if leg.kind in self.holds_answer:
                await self.go_on.wait()
            if leg.kind == "prefill" and self.edits is not None:
                told = json.loads(await answer.read(_BODY_BYTES))
                self.edits(told)
                responder.send(answer.status, answer.headers, json.dumps(told).encode())
                return
            responder.start(answer.status, answer.headers)
            await answer.relay(responder.write)
            responder.finish()


def _leg(request: Request) -> Leg:
    if request.path == "/tokenize":
        return Leg("count", None)
    if request.path not in ("/v1/completions", "/v1/chat/completions"):
        return Leg("other", None)
    params = json.loads(request.body).get("kv_transfer_params")
    return Leg(_kind(request, params), params)


def _kind(request: Request, params: dict[str, Any] | None) -> Kind:
    if (request.header(b"x-request-id") or b"").endswith(b"-release"):
        return "release"
    if request.header(b"x-tandem-canary"):
        return "canary"
    if params is None:
        return "alone"
    return "prefill" if params.get("do_remote_decode") or "disagg_spec" in params else "decode"


@dataclass
class Sent:
    """A request under way, and what its client has got of the answer."""

    task: asyncio.Task[None]
    status: int = 0
    headers: httpx.Headers = field(default_factory=httpx.Headers)
    text: str = ""
    broken: httpx.TransportError | None = None
    """How the connection ended, where the answer did not."""

    @property
    def events(self) -> list[str]:
        """Of a stream, without what has not come whole."""
        return [e.removeprefix("data: ") for e in self.text.split("\n\n")[:-1] if e]

    @property
    def tokens(self) -> int:
        """Events that carry a token."""
        told = (json.loads(event) for event in self.events if event != "[DONE]")
        return sum(bool(event.get("choices")) for event in told)

    @property
    def is_whole(self) -> bool:
        """Whether it is a whole answer, to someone who knows streams."""
        stream = self.headers.get("content-type", "").startswith("text/event-stream")
        return self.status == 200 and self.broken is None and (not stream or self.events[-1:] == ["[DONE]"])


class Endpoint:
    """A router in this process before real engines, with a `Between` for each."""

    def __init__(
        self, prefill: Sequence[Between], decode: Sequence[Between], app: App, server: Server
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        self.app = app
        self.server = server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    @property
    def between(self) -> list[Between]:
        return [*self.prefill, *self.decode]

    # Clients

    @asynccontextmanager
    async def sending(self, body: dict[str, Any]) -> AsyncIterator[Sent]:
        """A request that is under way in the block; its client leaves at the block's end."""

        async def send() -> None:
            async with (
                httpx.AsyncClient(timeout=_SILENCE_SECONDS, trust_env=False) as client,
                client.stream(
                    "POST",
                    f"{self.url}/v1/completions",
                    json={"model": MODEL, "temperature": 0, "ignore_eos": True, **body},
                    headers={"x-tandem-explain": "1"},
                ) as answer,
            ):
                sent.status, sent.headers = answer.status_code, answer.headers
                try:
                    async for piece in answer.aiter_text():
                        sent.text += piece
                except httpx.TransportError as error:
                    sent.broken = error

        sent = Sent(asyncio.create_task(send()))
        try:
            yield sent
        finally:
            sent.task.cancel()
            with suppress(asyncio.CancelledError):
                await sent.task

    async def ask(self, body: dict[str, Any]) -> Sent:
        """A request, until its answer has ended."""
        async with self.sending(body) as sent:
            await sent.task
        return sent

    # What is seen

    async def counted(self) -> Counter[tuple[str, ...]]:
        """Requests by path, reason and outcome, and legs that failed by role and cause, so far."""
        labels = {
            "tandem_requests_total": ("path", "reason", "outcome"),
            "tandem_leg_failures_total": ("role", "cause"),
        }
        found: Counter[tuple[str, ...]] = Counter()
        for name, told, value in await self._samples():
            if name in labels and value:
                found[tuple(told[label] for label in labels[name])] = int(value)
        return found

    async def in_hand(self) -> list[str]:
        """What the router holds of requests, its clients' connections, and the legs under way."""
        left = [
            f"{name}{told} is {value:g}"
            for name, told, value in await self._samples()
            if name in ROUTER_IN_HAND and value
        ]
        legs = ((each, leg) for each in self.between for leg in each.open if leg.kind in _OF_REQUESTS)
        left += [f"{each.engine}: {leg.kind} leg" for each, leg in legs]
        if (clients := self.server.connections) > 0:
            left.append(f"{clients} connections of clients")
        return left

    async def queued(self) -> bool:
        """Whether a request waits for its turn."""
        samples = await self._samples()
        return any(name == "tandem_requests_waiting" and value for name, _, value in samples)

    async def _samples(self) -> list[tuple[str, dict[str, str], float]]:
        """(name, labels, value) of all that the router tells."""
        async with httpx.AsyncClient(trust_env=False) as client:
            page = (await client.get(f"{self.url}/metrics", headers={"connection": "close"})).text
        samples = [s for family in text_string_to_metric_families(page) for s in family.samples]
        return [(s.name, dict(s.labels), s.value) for s in samples]

    async def proved(self) -> None:
        """Wait until a canary has gone through every engine and every pair."""
        fleet = self.app.fleet
        await until(lambda: len(fleet.engines) == len(self.between) and not fleet.unproved)

    def lose_patience(self, leg: Leg) -> None:
        """Have the router's time-out for a leg pass now."""
        for connection in self.app._flow._decoding._legs._client._pool._open:
            transport = connection._transport
            if transport is not None and transport.get_extra_info("sockname") == leg.router:
                connection.watchdog.set(0)

    def params_used(self) -> Counter[tuple[str, ...]]:
        """How often each hand-off's parameters reached a decoder: NIXL's (engine id, request id), LMCache's
        (tag,). A release reads what nobody else has read, and may be tried again."""
        legs = (leg for each in self.decode for leg in each.legs if leg.kind != "release")
        sent = (leg.params for leg in legs if leg.params is not None)
        return Counter(
            (p[TAG],) if TAG in p else (p["remote_engine_id"], p["remote_request_id"]) for p in sent
        )


@asynccontextmanager
async def behind(
    prefill: Sequence[str], decode: Sequence[str], counter: PromptCounter | None, **flags: Any
) -> AsyncIterator[Endpoint]:
    """A router before engines, all of them proved. `counter` counts its prompts (None: engines do).

    At the end no hand-off's parameters may have been used twice."""
    async with AsyncExitStack() as stack:
        stands = [await stack.enter_async_context(Between(url).listening()) for url in (*prefill, *decode)]
        before = tuple(stand.url for stand in stands)
        given: dict[str, Any] = {
            "port": 0,
            "prefill": before[: len(prefill)],
            "decode": before[len(prefill) :],
            "routing_strategy": "roundrobin",
            "ramp_up": 0.0,
            "drain_timeout": 0.0,
            "explain": True,
        }
        config = RouterConfig(**{**given, **flags})
        async with running(config, counter) as (server, app):
            endpoint = Endpoint(stands[: len(prefill)], stands[len(prefill) :], app, server)
            await endpoint.proved()
            yield endpoint
            assert [used for used in endpoint.params_used().values() if used > 1] == []


async def until(
    condition: Callable[[], object] | Callable[[], Awaitable[object]], within: float = PATIENCE_SECONDS
) -> None:
    async with asyncio.timeout(within):
        while not (await met if isawaitable(met := condition()) else met):
            await asyncio.sleep(0.02)


async def engine_gauges(url: str) -> dict[str, float]:
    """What an engine has in hand, as far as it has anything: requests, and a part of its KV cache."""
    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_SECONDS) as client:
        return contract.busy((await client.get(f"{url}/metrics")).text)


async def is_running(url: str) -> bool:
    """Whether an engine computes a request, by what it tells after each of its steps."""
    return bool((await engine_gauges(url)).get("vllm:num_requests_running"))


async def at_rest(urls: Sequence[str], *, within: float, kv: bool = True) -> None:
    """Wait until engines have no request in hand, and (`kv`) no block of their KV caches is in use."""

    def left(url: str, gauges: dict[str, float]) -> Iterator[str]:
        return (f"{url}: {name} {value:g}" for name, value in gauges.items() if kv or "kv" not in name)

    found = ["not asked"]
    with suppress(TimeoutError):
        async with asyncio.timeout(within):
            while found := [text for url in urls for text in left(url, await engine_gauges(url))]:
                await asyncio.sleep(0.1)
    assert found == []
