"""Runs cells of the fault matrix: simulated engines, a router in process, and one client, in virtual time."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Any

from tandem.bench.scrape import ROUTER_IN_HAND
from tandem.config import RouterConfig
from tandem.http import Client, HTTPClientError, Origin, Server
from tandem.router.app import App, running
from tandem.sim import EngineServer, faults, virtual
from tandem.sim.handoff import Network
from tandem.sim.lmcache import Settings

from . import matrix
from .helpers import MODEL, PROFILE, Answer, Engines, engines, flags, pair, text_of
from .matrix import Cell, Connector, Outcome

LONG, SHORT = 100, 10
"""Tokens of prompts that are disaggregated, and that are not."""
THRESHOLD = 50
CHUNK = 64
ENVIRONMENT = {"PYTHONHASHSEED": "0"}  # which LMCache's engines have to share
SETTLED_WITHIN = 200.0
"""Seconds after which what is still there counts as left behind: leases, retries and canaries are over, and
notifications are waited for no more."""


class Recorder(faults.Faults):
    """An engine's faults, which also notes who asks: every leg does."""

    def __init__(self, legs: list[tuple[str, str]]) -> None:
        super().__init__()
        self._legs = legs

    def of(self, request_id: str, leg: faults.Leg) -> list[faults.Fault]:
        self._legs.append((request_id, leg))
        return super().of(request_id, leg)


def command_lines(connector: Connector, prefillers: int, decoders: int) -> list[list[str]]:
    """Those of so many of each, and of one engine by itself."""
    if connector == "nixl":
        prefill, decode = pair(lease=5.0)
        return [*[prefill] * prefillers, *[decode] * decoders, flags()]
    size = 100 * CHUNK * PROFILE.kv_bytes_per_token
    sender = Settings(role="sender", buffer_bytes=size, chunk_size=CHUNK, proxy=("127.0.0.1", 1))
    lines = [flags("--kv-transfer-config", json.dumps(sender.transfer_config()))] * prefillers
    for i in range(decoders):
        receiver = Settings(
            role="receiver",
            buffer_bytes=size,
            chunk_size=CHUNK,
            init_ports=(7300 + i,),
            alloc_ports=(7400 + i,),
        )
        config = json.dumps(receiver.transfer_config())
        lines.append(flags("--kv-transfer-config", config, "--no-enable-prefix-caching"))
    return [*lines, flags()]


def router_config(connector: Connector, urls: Sequence[str], count: int, **more: Any) -> RouterConfig:
    given: dict[str, Any] = {
        "port": 0,
        "prefill": tuple(urls[:count]),
        "decode": tuple(urls[count : 2 * count]),
        "routing_threshold": THRESHOLD,
        "prefill_timeout": matrix.PREFILL,
        "first_token_timeout": matrix.FIRST_TOKEN,
        "stream_idle_timeout": matrix.IDLE,
        "notification_timeout": matrix.NOTIFICATION,
        "seconds_per_1000_tokens": 0.0,
        "answer_timeout": 0.0,
        "max_attempts": matrix.MAX_ATTEMPTS,
        # Each cell is to see the engines as the one before it did, and to have its retries.
        "suspect_after": 10_000,
        "retry_ratio": 10.0,
        "explain": True,
        "log_level": "error",
    }
    return RouterConfig(**{**given, **connector_flags(connector, count), **more})


def connector_flags(connector: Connector, decoders: int) -> dict[str, Any]:
    if connector == "nixl":
        return {}
    return {
        "connector": "lmcache",
        "lmcache_receivers": tuple(f"127.0.0.1:{7300 + i}:{7400 + i}" for i in range(decoders)),
        "lmcache_notify": "127.0.0.1:0",
        "lmcache_chunk_size": CHUNK,
        "lmcache_buffer_chunks": 100,
    }


@dataclass
class Bench:
    """Engines with a router before them."""

    sims: Engines
    app: App
    server: Server
    client: Client
    count: int
    legs: list[tuple[str, str]]
    """(request id, kind) of every leg that an engine saw."""
    prompts: int = 0
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    """Those that were there from the beginning."""

    @property
    def prefillers(self) -> list[EngineServer]:
        return self.sims.fleet.engines[: self.count]

    @property
    def decoders(self) -> list[EngineServer]:
        return self.sims.fleet.engines[self.count : 2 * self.count]

    def prompt(self, tokens: int) -> list[int]:
        """One that was never sent before."""
        self.prompts += 1
        return [10 + self.prompts // 900, 10 + self.prompts % 900, *range(10, 8 + tokens)]

    def request(self, tokens: int, *, stream: bool = False, chat: bool = False) -> dict[str, Any]:
        body = {"model": MODEL, "temperature": 0, "max_tokens": 8, "stream": stream}
        prompt = self.prompt(tokens)
        if chat:
            return {**body, "messages": [{"role": "user", "content": " ".join(map(str, prompt))}]}
        return {**body, "prompt": prompt}

    async def ask(self, body: dict[str, Any], path: str = "") -> Answer:
        """One request to the router; the path is that of the body's API unless it is given."""
        path = path or ("/v1/chat/completions" if "messages" in body else "/v1/completions")
        fields = [(b"content-type", b"application/json"), (b"x-tandem-explain", b"1")]
        started, pieces, answer = self.sims.now(), [], Answer(0, [], b"", 0.0)
        origin = Origin.parse(f"http://127.0.0.1:{self.server.port}")
        try:
            async with self.client.stream(
                origin, "POST", path.encode(), fields, json.dumps(body).encode(),
                head_timeout=3600, idle_timeout=3600, retry=False,
            ) as response:  # fmt: skip
                answer.status, answer.headers = response.status, response.headers
                await response.relay(pieces.append)
        except HTTPClientError as error:
            answer.broken = f"{type(error).__name__}: {error}"
        answer.body, answer.seconds = b"".join(pieces), self.sims.now() - started
        return answer

    async def alone(self, body: dict[str, Any]) -> str:
        """The text that an engine gives which is behind no router."""
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        return (await self.sims.ask(2 * self.count, path, {**body, "stream": False})).text

    async def counters(self) -> Counter[str]:
        """The router's counters and gauges, as it tells them."""
        pieces: list[bytes] = []
        origin = Origin.parse(f"http://127.0.0.1:{self.server.port}")
        async with self.client.stream(origin, "GET", b"/metrics", []) as response:
            await response.relay(pieces.append)
        found: Counter[str] = Counter()
        for line in b"".join(pieces).decode().splitlines():
            name, _, value = line.rpartition(" ")
            if name.startswith(_COUNTERS + ROUTER_IN_HAND) and float(value):
                found[name] = float(value)  # type: ignore[assignment]
        return found

    # Faults

    async def strike(self, cell: Cell, tokens: int) -> None:
        """Have the engines of a cell's role misbehave, for a prompt of so many tokens."""
        role = self.prefillers if cell.leg == "prefill" else self.decoders
        if cell.whole_engine:
            # Whose turn is it?
            answer = await self.ask(self.request(tokens))
            last = _header(answer, f"x-tandem-{'prefill' if cell.leg == 'prefill' else 'decode'}-url")
            await self._between_looks(role)
            for engine in role if cell.extent == "always" else [_next(role, last)]:
                await engine.set_faults(cell.text)
            await asyncio.sleep(0.01)  # kept connections are seen to be closed
            return
        times = ",times=1" if cell.extent == "once" else ""
        # The same fault for all of them: whichever engine is chosen, the first one is struck.
        shared = faults.parse(f"{cell.text}{times},leg={cell.leg}", whole_engine=True)
        for engine in role:
            engine.engine.faults.engine = shared

    async def _between_looks(self, role: Sequence[EngineServer]) -> None:
        """Wait until the router's prober has looked at each of them and will not do so again for a second,
        so that it is the request that finds out. It looks every 5 s, and its connection is kept for 4 s."""
        seen = dict.fromkeys(role, -inf)
        idle: set[EngineServer] = set()
        while min(seen.values()) < self.sims.now() - 3.9:
            seen |= {e: self.sims.now() for e in idle if e.connections}
            idle = {e for e in role if not e.connections}
            await asyncio.sleep(0.02)

    async def heal(self) -> None:
        for engine in self.sims.fleet.engines:
            if engine.engine.faults.engine:
                await engine.set_faults("")

    # What is left

    async def settle(self) -> list[str]:
        """Wait until nothing is left of any request. Returns what still is after a long time."""
        deadline = self.sims.now() + SETTLED_WITHIN
        busy = set(self.sims.fleet.engines)
        while True:
            # The prober keeps a connection for a while after each look, so one sight of none is enough.
            busy = {e for e in busy if e.connections}
            left = [f"{e.url} has {e.connections} connections" for e in busy]
            left += [
                f"engine {i}: {e.engine.state()}"
                for i, e in enumerate(self.sims.fleet.engines)
                if not self.sims.idle(i)
            ]
            left += self.app.fleet.unproved
            left += self._tasks_left()
            if not left:
                gauges = {k: v for k, v in (await self.counters()).items() if k.startswith(ROUTER_IN_HAND)}
                left = [f"{name} is {value:g}" for name, value in gauges.items()]
            if not left or self.sims.now() > deadline:
                return left
            await asyncio.sleep(0.25)

    def _tasks_left(self) -> list[str]:
        names = [t.get_coro().__qualname__ for t in asyncio.all_tasks() - self.tasks] if self.tasks else []
        return [f"task {name}" for name in names]

    async def end(self) -> list[str]:
        """What is left when all has had its time."""
        expected = self.app._flow._handovers.notifications.expected
        waiting = [f"{expected} hand-offs wait for notifications"] if expected else []
        return [*await self.settle(), *waiting]

    # A cell

    async def run(self, cell: Cell) -> Outcome:
        tokens = SHORT if cell.leg == "alone" else LONG
        body = self.request(tokens, stream=cell.stream, chat=cell.chat)
        reference = await self.alone(body)
        await self.strike(cell, tokens)
        before, self.legs[:] = await self.counters(), []
        answer = await self.ask(body)
        legs, after = list(self.legs), await self.counters()
        await self.heal()
        requests, failures = counted(after - before)
        (ended,) = requests.elements()
        left = [] if cell.whole_engine else await self.next_one(tokens)
        left += await self.settle()
        return Outcome(kind_of(answer, reference), _kinds(legs), failures, ended, answer.seconds, left)

    async def next_one(self, tokens: int) -> list[str]:
        """A request that comes at once, while nothing is broken: what it still suffers from."""
        body, before = self.request(tokens), await self.counters()
        answer = await self.ask(body)
        told = kind_of(answer, await self.alone(body))
        _, failures = counted((await self.counters()) - before)
        suffered = [] if told == "whole" else [f"the next request is answered with {told}: {answer}"]
        return suffered + [f"the next request has a {role} leg fail: {why}" for role, why in failures]


_COUNTERS = ("tandem_requests_total", "tandem_leg_failures_total")
_FAILED = re.compile(r'tandem_leg_failures_total\{cause="(?P<cause>\w+)",role="(?P<role>\w+)"\}')
_ENDED = re.compile(
    r'tandem_requests_total\{outcome="(?P<outcome>\w+)",path="(?P<path>\w+)",reason="(?P<reason>\w+)"\}'
)


def counted(added: Counter[str]) -> tuple[Counter[tuple[str, str, str]], Counter[tuple[str, str]]]:
    """Requests by path, reason and outcome, and legs that failed by role and cause, in what was added to the
    router's counters."""
    requests, failures = Counter[tuple[str, str, str]](), Counter[tuple[str, str]]()
    for name, value in added.items():
        if ended := _ENDED.match(name):
            requests[ended["path"], ended["reason"], ended["outcome"]] += int(value)
        elif failed := _FAILED.match(name):
            failures[failed["role"], failed["cause"]] += int(value)
    return requests, failures


def _header(answer: Answer, name: str) -> str:
    return next((v.decode() for n, v in answer.headers if n == name.encode()), "")


def _next(role: Sequence[EngineServer], last: str) -> EngineServer:
    """Engines are taken in turn, by URL."""
    in_order = sorted(role, key=lambda e: e.url)
    return next((e for e in in_order if e.url > last), in_order[0])


def _kinds(legs: Sequence[tuple[str, str]]) -> list[str]:
    """Without canaries, and without what only releases a buffer. A leg that a dead connection made be sent
    again counts once, unless it takes a hand-off: that may reach an engine once only."""
    of_clients = [(i, kind) for i, kind in legs if "canary-" not in i and not i.endswith("-release")]
    seen = set()
    kinds = []
    for leg in of_clients:
        if leg not in seen or leg[1] == "decode":
            kinds.append(leg[1])
        seen.add(leg)
    return kinds


def kind_of(answer: Answer, reference: str) -> str:
    """As `Outcome.answer` names it."""
    if answer.status != 200:
        assert not answer.broken
        assert answer.json["error"]["message"]
        return str(answer.status)
    if not answer.body.startswith(b"data: "):
        if answer.broken:
            return "broken off"
        return _compared(answer.text, reference) if answer.body.startswith(b"{") else "garbled"
    text, events = "", answer.body.split(b"\n\n")
    for event in events:
        try:
            text += "".join(map(text_of, json.loads(event.removeprefix(b"data: ")).get("choices", ())))
        except ValueError:
            break
    if answer.broken:
        if not reference.startswith(text):
            return "wrong text"
        # An engine says that it is done after its own error, too.
        last = events[-3] if answer.done else events[-2]
        return "error event" if last.startswith(b'data: {"error":') else "broken off"
    if not answer.done:
        return "unfinished"
    return _compared(text, reference) if events[-2:] == [event, b""] else "garbled"


def _compared(text: str, reference: str) -> str:
    return "whole" if text == reference else "wrong text"


@asynccontextmanager
async def bench(connector: Connector, count: int, **config: Any) -> AsyncIterator[Bench]:
    """A router with `count` engines of each role, all proved."""
    legs: list[tuple[str, str]] = []
    network = Network()
    async with engines(
        *command_lines(connector, count, count), environment=ENVIRONMENT, network=network
    ) as sims:
        for engine in sims.fleet.engines[: 2 * count]:
            engine.engine.faults = Recorder(legs)
        settings = router_config(connector, sims.fleet.urls, count, **config)
        async with running(settings, None) as (server, app):
            network.notify = delivery(app)
            client = Client()
            made = Bench(sims, app, server, client, count, legs)
            left = await made.settle()
            assert not left, left
            made.tasks = asyncio.all_tasks()
            yield made
            await client.aclose()
        await network.close()


def delivery(app: App) -> Any:
    """Where engines send notifications: straight to the router, since ZMQ knows no virtual time."""
    notifications = app._flow._handovers.notifications

    def deliver(url: str, message: bytes) -> None:
        asyncio.get_running_loop().call_soon(notifications.received, message)

    return deliver


def run(cells: Sequence[Cell]) -> dict[Cell, Outcome]:
    """What comes of cells that share connector and number of engines, one after the other."""

    async def all_of_them() -> dict[Cell, Outcome]:
        async with bench(cells[0].connector, cells[0].engines) as made:
            outcomes = {cell: await made.run(cell) for cell in cells}
            left = await made.end()
            assert not left, left
            return outcomes

    return virtual.run(all_of_them())
