"""Fake engines with LMCache PD, as far as a router notices: the decoder's buffer of chunks, the prefiller's
writes into it, and its notifications over a real ZMQ socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from tandem.config import RouterConfig
from tandem.http import Request, Responder, serve
from tandem.router.budgets import Budgets
from tandem.router.discovery import Discovery, Member
from tandem.router.engines import Engine, EngineRole
from tandem.router.handover import Handovers
from tandem.router.notifications import Notifications
from tandem.router.waiting import Line

from .fakes import JSON, FakeEngine, Seen, eventually

if TYPE_CHECKING:
    from .conftest import Endpoint

CHUNK = 64  # tokens: a canary's prompt fits one
RIGHT = "Hello"
GARBAGE = "garbage"
TAG = "lmcache.tag.req"


def prompt(chunks: int, of: str = "x") -> dict[str, Any]:
    """A request whose prompt takes so many chunks; the fakes count a token for each character."""
    return {"model": "m", "prompt": of * (chunks * CHUNK - 4), "max_tokens": 8}


def notification(tag: str) -> bytes:
    return msgspec.msgpack.encode({"type": "ProxyNotif", "req_id": tag})


class Watched(Notifications):
    """Notifications that tell a test where they are taken, and how many were."""

    address = ""
    taken = 0

    def received(self, message: bytes) -> None:
        super().received(message)
        self.taken += 1

    @asynccontextmanager
    async def listening(self, address: str) -> AsyncIterator[str]:
        async with super().listening(address) as self.address:
            yield self.address


class Members(Discovery):
    """Discovery that finds all engines until a test takes some away."""

    def __init__(self, config: RouterConfig) -> None:
        members = [Member(url, EngineRole.PREFILL) for url in config.prefill]
        members += [Member(url, EngineRole.DECODE) for url in config.decode]
        self.known = frozenset(members)
        self._changed = asyncio.Event()

    def remove(self, url: str) -> None:
        self.known = frozenset(m for m in self.known if m.url != url)
        self._changed.set()

    async def watch(self) -> AsyncIterator[frozenset[Member]]:
        while True:
            yield self.known
            await self._changed.wait()
            self._changed.clear()


class Hold:
    """An `on_generate` that keeps requests until told to go on; then the engine answers as it would."""

    def __init__(self, then: Callable[[FakeEngine, Seen, Responder], Any] | None = None) -> None:
        self.go_on = asyncio.Event()
        self.held = 0
        self._then = then

    async def __call__(self, engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        self.held += 1
        try:
            await self.go_on.wait()
        finally:
            self.held -= 1
        return self._then is not None and bool(self._then(engine, seen, responder))

    async def holds(self, requests: int = 1) -> None:
        """Until it keeps so many."""

        async def enough() -> bool:
            return self.held >= requests

        await eventually(enough)


@dataclass
class FakeLMCache(FakeEngine):
    """What both roles have: a process that can be restarted, and says when it was started."""

    started: float | None = 1000.0

    async def _answer(self, request: Request, responder: Responder) -> None:
        if request.path == "/metrics":
            line = "" if self.started is None else f"process_start_time_seconds {self.started}\n"
            responder.send(200, [], b"# HELP x\n" + line.encode() + b"up 1\n")
        else:
            await super()._answer(request, responder)

    async def cut_off(self) -> None:
        """It cannot be reached."""
        assert self.server is not None
        await self.server.close()

    async def come_back(self) -> None:
        """The same process, at the same address."""
        assert self.server is not None
        self.server = await serve(self, "127.0.0.1", self.server.port)

    async def restart(self) -> None:
        """Another process at the same address."""
        await self.cut_off()
        self.renew()
        await self.come_back()

    def renew(self) -> None:
        if self.started is not None:
            self.started += 100


@dataclass
class Kept:
    """What lies in a decoder's buffer under one tag."""

    chunks: int
    written: bool = False


@dataclass
class FakeDecoder(FakeLMCache):
    """A decode leg with a tag takes its chunks: right text if they were written, else garbage; without a tag,
    or with nothing under it, the prompt is computed and the text right."""

    alloc_port: int = 7400
    capacity: int = 3
    buffer: dict[str, Kept] = field(default_factory=dict)
    most: int = 0
    """The most chunks there were at once."""
    computed: list[Seen] = field(default_factory=list)
    freed: set[str] = field(default_factory=set)
    looked_up: set[str] = field(default_factory=set)
    dead_of: str | None = None

    @property
    def used(self) -> int:
        return sum(kept.chunks for kept in self.buffer.values())

    def renew(self) -> None:
        super().renew()
        self.buffer.clear()
        self.computed.clear()

    def allocate(self, tag: str, chunks: int) -> None:
        if tag in self.buffer or tag in self.freed:
            self.dead_of = f"the tag {tag} was used twice"
        self.buffer[tag] = Kept(chunks)
        self.most = max(self.most, self.used)
        if self.used > self.capacity:
            self.dead_of = f"{self.used} chunks for {self.capacity}: every prefiller stands still"

    async def _generate(self, request: Request, responder: Responder) -> None:
        tag = tag_of(msgspec.json.decode(request.body))
        if tag is None or tag not in self.buffer:
            await super()._generate(request, responder)
            return
        if tag in self.looked_up:
            self.dead_of = f"two requests looked {tag} up before one had read it"
        self.looked_up.add(tag)
        try:
            await super()._generate(request, responder)
        finally:
            # A cancelled request is noticed between two steps.
            asyncio.get_running_loop().call_later(0.01, self.looked_up.discard, tag)

    def take(self, seen: Seen) -> str:
        """Run the first step of a request: its chunks are read and freed. Returns the text that follows."""
        tag = tag_of(seen.body)
        if tag is None or (kept := self.buffer.pop(tag, None)) is None:
            self.computed.append(seen)
            return RIGHT
        self.looked_up.discard(tag)
        self.freed.add(tag)
        return RIGHT if kept.written else GARBAGE

    def answer(self, seen: Seen, responder: Responder) -> None:
        if self.refuses(seen):
            responder.send(500, JSON, b'{"error":{"message":"cannot"}}')
            return
        text = self.take(seen)
        self.say(seen, responder, (text[:2], text[2:]))

    @property
    def tagged(self) -> list[Seen]:
        """Requests of clients and the router that name a hand-off, releases included."""
        return [s for s in self.requests if tag_of(s.body)]

    @property
    def releases(self) -> list[Seen]:
        return [s for s in self.tagged if s.headers["x-request-id"].endswith("-release")]


@dataclass
class FakePrefiller(FakeLMCache):
    """Writes to the decoder that its request names, and notifies the router, once for each rank."""

    decoders: list[FakeDecoder] = field(default_factory=list)
    router: Callable[[], str] = lambda: ""
    """Where notifications go, as host:port."""
    ranks: int = 1
    silent_ranks: int = 0
    """How many of them lose their notification."""
    write_fails: bool = False
    sent: set[str] = field(default_factory=set)
    met: dict[int, float | None] = field(default_factory=dict)
    _context: zmq.Context[Any] | None = None
    _sockets: list[zmq.Socket[Any]] = field(default_factory=list)

    def renew(self) -> None:
        super().renew()
        self.met.clear()

    def answer(self, seen: Seen, responder: Responder) -> None:
        if self.refuses(seen):
            responder.send(500, JSON, b'{"error":{"message":"cannot"}}')
            return
        self.write(seen)
        self.say(seen, responder, ("x",))

    def write(self, seen: Seen) -> None:
        """Write a request's KV, unless that was done, and notify the router."""
        if self.allocate(seen):
            tag = tag_of(seen.body)
            assert tag is not None
            for rank in range(self.ranks - self.silent_ranks):
                self.notify(notification(tag), rank)

    def allocate(self, seen: Seen) -> bool:
        """Write without a notification. False: it failed, or was done before."""
        spec = (seen.kv or {})["disagg_spec"]
        tag = spec["req_id"]
        assert tag == tag_of(seen.body)
        assert len(spec["receiver_init_port"]) == len(spec["receiver_alloc_port"]) == self.ranks
        if tag in self.sent:
            return False
        self.sent.add(tag)
        (decoder,) = [d for d in self.decoders if d.alloc_port == spec["receiver_alloc_port"][0]]
        if self.met.setdefault(decoder.alloc_port, decoder.started) != decoder.started:
            return False  # it shakes hands once only
        decoder.allocate(tag, -(-self.tokens(seen.body) // CHUNK))
        decoder.buffer[tag].written = not self.write_fails
        return not self.write_fails

    def notify(self, message: bytes, rank: int = 0) -> None:
        if self._context is None:
            self._context = zmq.Context()
            for _ in range(self.ranks):
                socket = self._context.socket(zmq.PUSH)
                socket.setsockopt(zmq.LINGER, 0)
                socket.connect(f"tcp://{self.router()}")
                self._sockets.append(socket)
        self._sockets[rank].send(message, zmq.NOBLOCK)

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()
        if self._context is not None:
            self._context.term()


class Lab:
    """A router with the lmcache connector, its engines, and what it holds."""

    def __init__(self) -> None:
        self.endpoint: Endpoint
        self.prefill: list[FakePrefiller] = []
        self.decode: list[FakeDecoder] = []
        self.notifications: Watched
        self.handovers: Handovers
        self.budgets: Budgets
        self.line: Line
        self.members: Members
        self.explained = False
        """Something is left at the end, and the test says why."""

    @property
    def prefiller(self) -> FakePrefiller:
        (only,) = self.prefill
        return only

    @property
    def decoder(self) -> FakeDecoder:
        (only,) = self.decode
        return only

    def of(self, fake: FakeEngine) -> Engine:
        (engine,) = [e for e in self.endpoint.app.fleet.engines if e.url == fake.url]
        return engine

    def pairs(self) -> set[tuple[str, str]]:
        """Prefiller and decoder of each pair that may be used."""
        names = {fake.url: fake.name for fake in (*self.prefill, *self.decode)}
        fleet = self.endpoint.app.fleet
        ready = fleet.ready(EngineRole.DECODE)
        return {(names[p.url], names[d.url]) for d in ready for p in fleet.prefillers_for(d).all}

    @property
    def reserved(self) -> int:
        """Chunks, on all decoders."""
        return sum(self.budgets.used.values())

    def left(self) -> dict[str, object]:
        """What is held now, on either side."""
        held = {
            "reserved chunks": self.reserved,
            "hand-offs that wait for notifications": self.notifications.expected,
            "hand-offs being cleaned up": self.handovers.cleaning_up,
            "requests that wait for room": len(self.line),
            "requests on engines": sum(e.in_flight for e in self.endpoint.app.fleet.engines),
            "tokens on engines": sum(e.pending_tokens for e in self.endpoint.app.fleet.engines),
            "chunks in buffers": sum(d.used for d in self.decode),
        }
        return {what: amount for what, amount in held.items() if amount}

    async def idle(self) -> None:
        """Until nothing is left; AssertionError when something stays."""
        try:
            async with asyncio.timeout(5):
                await until(lambda: not self.left())
        except TimeoutError:
            raise AssertionError(f"left: {self.left()}") from None


async def until(holds: Callable[[], object]) -> None:
    async def now() -> bool:
        return bool(holds())

    await eventually(now)


def tag_of(body: dict[str, Any]) -> str | None:
    tag = (body.get("kv_transfer_params") or {}).get(TAG)
    assert isinstance(tag, str | None)
    return tag
