"""Troubles that are more than one fault on one leg: clients that leave, engines that die, all of a role down.

Each one is played before two prefillers and two decoders, unless its name says otherwise.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from tandem.http import Request
from tandem.sim import EngineServer, EngineSpec, Fleet, parse, virtual
from tandem.sim.wire import Wire

from .helpers import PROFILE
from .matrix import Connector
from .matrix_bench import ENVIRONMENT, LONG, SHORT, Bench, Recorder, bench, command_lines, counted, kind_of

COUNT = 2
# All legs; health checks go well, else the router would not send any.
FAILING = "status=500,leg=prefill;status=500,leg=decode;status=500,leg=alone"


@dataclass
class Told:
    """What clients got, and what was counted."""

    answers: list[str]
    """As `matrix.Outcome.answer`."""
    counted: Counter[tuple[str, str, str]]
    """Requests by path, reason and outcome."""
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Legs that failed, by role and cause."""
    left: list[str] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Trouble:
    name: str
    play: Callable[[Case], Awaitable[list[str]]]
    told: Told
    lmcache: Told
    """What must come of it, by connector."""
    config: dict[str, Any]
    only: Connector | None

    def expected(self, connector: Connector) -> Told:
        return self.lmcache if connector == "lmcache" else self.told

    def __str__(self) -> str:
        return self.name.replace(" ", "_")


TROUBLES: list[Trouble] = []

Counted = dict[tuple[str, str, str], int]
Failures = dict[tuple[str, str], int]

OK, LEFT, FAILED = "ok", "client_left", "failed"
LONG_OK = ("disaggregated", "threshold", OK)
LONG_LEFT = ("disaggregated", "threshold", LEFT)


def trouble(
    name: str,
    answers: list[str],
    counted: Counted,
    failures: Failures | None = None,
    *,
    lmcache: dict[str, Any] | None = None,
    only: Connector | None = None,
    **config: Any,
) -> Callable[[Callable[[Case], Awaitable[list[str]]]], Callable[[Case], Awaitable[list[str]]]]:
    """Enter a trouble into the list, with what must come of it; `lmcache`: what of that differs there.
    `config`: settings of the router."""

    def enter(play: Callable[[Case], Awaitable[list[str]]]) -> Callable[[Case], Awaitable[list[str]]]:
        told = Told(answers, Counter(counted), Counter(failures or {}))
        TROUBLES.append(Trouble(name, play, told, replace(told, **(lmcache or {})), config, only))
        return play

    return enter


class Case:
    """One trouble at work."""

    def __init__(self, made: Bench, connector: Connector, stack: AsyncExitStack) -> None:
        self.bench = made
        self.connector = connector
        self._stack = stack
        self.before: Counter[str] = Counter()

    async def begin(self) -> None:
        """Count from here on."""
        self.before = await self.bench.counters()
        self.bench.legs.clear()

    @property
    def prefillers(self) -> list[EngineServer]:
        return self.bench.prefillers

    @property
    def decoders(self) -> list[EngineServer]:
        return self.bench.decoders

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.005)

    def started(self, kind: str) -> int:
        """Legs of a kind that have reached engines."""
        return sum(k == kind and "canary-" not in i for i, k in self.bench.legs)

    async def send(self, tokens: int = LONG, *, stream: bool = True) -> str:
        """One request, and how it is answered, with Retry-After where there is one."""
        body = self.bench.request(tokens, stream=stream)
        answer = await self.bench.ask(body)
        told = kind_of(answer, await self.bench.alone(body))
        return f"{told} with Retry-After" if any(n == b"retry-after" for n, _ in answer.headers) else told

    @asynccontextmanager
    async def client(self, tokens: int = LONG, **more: Any) -> AsyncIterator[None]:
        """A request under way in the block, whose client leaves at its end."""
        task = asyncio.create_task(self.bench.ask(self.bench.request(tokens, **{"stream": True, **more})))
        try:
            yield
            assert not task.done(), "it is not under way any more"
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def fault(self, text: str, engines: list[EngineServer]) -> None:
        for engine in engines:
            await engine.set_faults(text)

    async def out_of_use(self, engines: list[EngineServer]) -> None:
        """Wait until the router has noticed by itself."""
        urls = {engine.url for engine in engines}
        fleet = self.bench.app.fleet
        await self.until(lambda: urls <= {e.url for e in fleet.engines if e.state == "waiting"})

    async def in_use(self) -> None:
        await self.until(lambda: not self.bench.app.fleet.unproved)

    async def restart(self, dead: EngineServer) -> None:
        """Run an engine that died again, as another process at the same port."""
        engines = self.bench.sims.fleet.engines
        number = engines.index(dead)
        await dead.close()
        args = parse(command_lines(self.connector, COUNT, COUNT)[number])
        # The first one of a fleet listens for other engines where the first one of the other fleet does.
        apart = number > 0 and self.connector == "nixl"
        spec = EngineSpec(args, port=dead.port, side_channel=("127.0.0.1", 0) if apart else None)
        network = self.bench.sims.fleet.network
        fleet = Fleet([spec], profile=PROFILE, environment=ENVIRONMENT, network=network)
        await self._stack.enter_async_context(fleet)
        engines[number] = fleet.engines[0]
        engines[number].engine.faults = Recorder(self.bench.legs)


# Clients that leave


@trouble("The client leaves while its prompt is counted", [], {("none", "undecided", LEFT): 1})
async def leaves_while_counted(case: Case) -> list[str]:
    asked = asyncio.Event()

    async def never(request: Request, wire: Wire) -> None:
        asked.set()
        await asyncio.Event().wait()

    pages = [decoder._pages for decoder in case.decoders]
    tokenize = [page["/tokenize"] for page in pages]
    for page in pages:
        page["/tokenize"] = ("POST", never)
    async with case.client(chat=True):
        await asked.wait()
    for page, as_before in zip(pages, tokenize, strict=True):
        page["/tokenize"] = as_before
    return []


@trouble(
    "The client leaves while it waits for its turn",
    ["whole", "whole"],
    {("none", "queue", LEFT): 1, LONG_OK: 2},
    max_concurrent_requests=1,
    max_queue_size=5,
)
async def leaves_the_queue(case: Case) -> list[str]:
    await case.fault("delay=2,leg=prefill", case.prefillers)
    others = [asyncio.create_task(case.send()) for _ in case.decoders]
    await case.until(lambda: case.started("prefill") == len(others))
    async with case.client():
        await asyncio.sleep(0.5)
        assert case.started("prefill") == len(others)
    return await asyncio.gather(*others)


@trouble(
    "The client leaves while it waits for room in a receive buffer",
    ["whole", "whole"],
    {LONG_LEFT: 1, LONG_OK: 2},
    only="lmcache",
    lmcache_buffer_chunks=2,
)
async def leaves_the_line(case: Case) -> list[str]:
    await case.fault("delay=2,leg=prefill", case.prefillers)
    others = [asyncio.create_task(case.send()) for _ in case.decoders]
    await case.until(lambda: case.started("prefill") == len(others))
    async with case.client():
        await asyncio.sleep(0.5)
        assert case.started("prefill") == len(others)
    return await asyncio.gather(*others)


@trouble("The client leaves during the prefill leg", [], {LONG_LEFT: 1})
async def leaves_in_prefill(case: Case) -> list[str]:
    async with case.client():
        await case.until(lambda: case.started("prefill"))
        await case.until(lambda: any(p.engine.state()["running"] for p in case.prefillers))
    return []


@trouble("The client leaves between the legs", [], {LONG_LEFT: 1}, only="lmcache")
async def leaves_between(case: Case) -> list[str]:
    await case.fault("late-notification=2", case.prefillers)
    async with case.client():
        await case.until(lambda: case.started("prefill"))
        await asyncio.sleep(1)
        assert not case.started("decode")
    return []


@trouble("The client leaves while the decoder reads the KV", [], {LONG_LEFT: 1}, only="nixl")
async def leaves_while_kv_is_read(case: Case) -> list[str]:
    async with case.client():
        await case.until(lambda: any(d.engine.state()["loading"] for d in case.decoders))
    return []


@trouble("The client leaves before the first token", [], {LONG_LEFT: 1})
async def leaves_before_the_first_token(case: Case) -> list[str]:
    await case.fault("delay=2,leg=decode", case.decoders)
    async with case.client():
        await case.until(lambda: case.started("decode"))
        await asyncio.sleep(0.5)
    return []


@trouble("The client leaves in the middle of a stream", [], {LONG_LEFT: 1})
async def leaves_mid_stream(case: Case) -> list[str]:
    await case.fault("delay=2@2", case.decoders)
    async with case.client():
        await case.until(lambda: case.started("decode"))
        await asyncio.sleep(1)
    return []


@trouble("The client leaves before an answer that is not streamed", [], {LONG_LEFT: 1})
async def leaves_before_a_whole_answer(case: Case) -> list[str]:
    async with case.client(stream=False):
        await case.until(lambda: any(d.engine.state()["running"] for d in case.decoders))
    return []


# Engines that are down, fail at everything, or are slow


@trouble("No prefiller can be reached", ["whole"], {("decode_only", "no_prefiller", OK): 1})
async def no_prefiller(case: Case) -> list[str]:
    await case.fault("refuse", case.prefillers)
    await case.out_of_use(case.prefillers)
    return [await case.send()]


@trouble("No decoder can be reached", ["503 with Retry-After"], {("none", "undecided", FAILED): 1})
async def no_decoder(case: Case) -> list[str]:
    await case.fault("refuse", case.decoders)
    await case.out_of_use(case.decoders)
    return [await case.send()]


@trouble("No engine can be reached", ["503 with Retry-After"] * 2, {("none", "undecided", FAILED): 2})
async def nothing(case: Case) -> list[str]:
    everything = [*case.prefillers, *case.decoders]
    await case.fault("refuse", everything)
    await case.out_of_use(case.decoders)
    return [await case.send(), await case.send(SHORT, stream=False)]


@trouble(
    "Every decoder answers 500, with and without a hand-off",
    ["500", "500"],
    {("decode_only", "handoff_failed", FAILED): 1, ("decode_only", "short", FAILED): 1},
    {("decode", "status"): 5},
)
async def sick_decoders(case: Case) -> list[str]:
    await case.fault(FAILING, case.decoders)
    return [await case.send(), await case.send(SHORT)]


@trouble(
    "Every engine answers 500",
    ["500"],
    {("decode_only", "prefill_failed", FAILED): 1},
    {("prefill", "status"): 2, ("decode", "status"): 2},
)
async def sick_engines(case: Case) -> list[str]:
    await case.fault(FAILING, [*case.prefillers, *case.decoders])
    return [await case.send()]


@trouble(
    "Every prefiller answers 500, with one prompt more on decoders than may be (`--max-fallbacks`)",
    ["whole", "503 with Retry-After"],
    {("decode_only", "prefill_failed", OK): 1, ("decode_only", "prefill_failed", FAILED): 1},
    {("prefill", "status"): 4},
    max_fallbacks=1,
)
async def too_many_fallbacks(case: Case) -> list[str]:
    await case.fault(FAILING, case.prefillers)
    return sorted(await asyncio.gather(case.send(), case.send()), reverse=True)


@trouble(
    "The retry budget is spent, and a prefiller fails",
    ["whole"],
    {("decode_only", "prefill_failed", OK): 1},
    {("prefill", "status"): 1},
    retry_ratio=0.0,
)
async def no_retry_of_a_prefill(case: Case) -> list[str]:
    await spend_retries(case)
    await case.fault(FAILING, case.prefillers)
    return [await case.send()]


@trouble(
    "The retry budget is spent, and a decoder fails",
    ["500", "500"],
    {("disaggregated", "threshold", FAILED): 1, ("decode_only", "short", FAILED): 1},
    {("decode", "status"): 2},
    retry_ratio=0.0,
)
async def no_retry_of_a_decode(case: Case) -> list[str]:
    await spend_retries(case)
    await case.fault(FAILING, case.decoders)
    return [await case.send(), await case.send(SHORT)]


async def spend_retries(case: Case) -> None:
    """Let short requests fail until one is not tried again."""
    await case.fault(FAILING, case.decoders)
    legs = 2
    while legs > 1:
        before = case.started("alone")
        await case.send(SHORT, stream=False)
        legs = case.started("alone") - before
    await case.fault("", case.decoders)
    await case.bench.settle()
    await case.begin()


@trouble("A prefiller is slow, within the deadline", ["whole"], {LONG_OK: 1})
async def slow_prefillers(case: Case) -> list[str]:
    await case.fault("slow=20", case.prefillers)
    return [await case.send()]


@trouble(
    "Prefillers are too slow for the deadline",
    ["whole"],
    {("decode_only", "prefill_failed", OK): 1},
    {("prefill", "head_timeout"): 2},
)
async def too_slow_prefillers(case: Case) -> list[str]:
    await case.fault("slow=100", case.prefillers)
    return [await case.send()]


@trouble("Decoders take a second for each token", ["whole", "whole"], {LONG_OK: 2})
async def slow_decoders(case: Case) -> list[str]:
    await case.fault("slow=50", case.decoders)
    return [await case.send(), await case.send(stream=False)]


# Engines that die and are started again


@trouble(
    "A prefiller dies during its leg, and is started again",
    ["whole", "whole"],
    {LONG_OK: 2},
    {("prefill", "status"): 1},
)
async def prefiller_dies(case: Case) -> list[str]:
    request = asyncio.create_task(case.send())
    await case.until(lambda: at_work(case.prefillers))
    (victim,) = at_work(case.prefillers)
    await victim.set_faults("crash")
    await case.out_of_use([victim])
    await case.restart(victim)
    await case.in_use()
    return [await request, await case.send()]


@trouble(
    "A prefiller dies between the legs, and is started again",
    ["whole", "whole"],
    {LONG_OK: 2},
    # The KV is gone with it; what LMCache has sent is not.
    {("decode", "in_band_error"): 1},
    lmcache={"failures": Counter()},
)
async def prefiller_dies_between(case: Case) -> list[str]:
    request = asyncio.create_task(case.send())
    await case.until(lambda: at_work(case.prefillers))
    (victim,) = at_work(case.prefillers)
    await case.until(lambda: case.started("decode"))
    await victim.set_faults("crash")
    await case.out_of_use([victim])
    await case.restart(victim)
    await case.in_use()
    return [await request, await case.send()]


@trouble(
    "A decoder dies before the first token, and is started again",
    ["whole", "whole"],
    {LONG_OK: 2},
    {("decode", "in_band_error"): 1},
)
async def decoder_dies(case: Case) -> list[str]:
    await case.fault("slow=20", case.decoders)  # so that there is a time between the KV and the token
    request = asyncio.create_task(case.send())
    await case.until(lambda: at_work(case.decoders))
    return [await decoder_is_replaced(case, request), await case.send()]


@trouble(
    "A decoder dies in the middle of a stream, and is started again",
    ["error event", "whole"],
    {LONG_OK: 1, ("disaggregated", "threshold", FAILED): 1},
    {("decode", "in_band_error"): 1},
)
async def decoder_dies_mid_stream(case: Case) -> list[str]:
    await case.fault("slow=20", case.decoders)
    request = asyncio.create_task(case.send())
    requests = lambda: [r for d in case.decoders for r in d.engine.requests.values()]  # noqa: E731
    await case.until(lambda: any(r.generated > 2 for r in requests()))
    return [await decoder_is_replaced(case, request), await case.send()]


async def decoder_is_replaced(case: Case, request: asyncio.Task[str]) -> str:
    """The one that is at work dies. With LMCache, prefillers that wrote to it are started again, too."""
    (victim,) = at_work(case.decoders)
    await victim.set_faults("crash")
    await case.fault("", [d for d in case.decoders if d is not victim])
    answer = await request
    await case.out_of_use([victim])
    await case.restart(victim)
    if case.connector == "lmcache":
        unproved = case.bench.app.fleet
        await case.until(lambda: sum("restart the prefill engine" in u for u in unproved.unproved) == COUNT)
        for prefiller in case.prefillers:
            await prefiller.set_faults("refuse")
            await case.out_of_use([prefiller])
            await case.restart(prefiller)
    await case.in_use()
    return answer


def at_work(engines: list[EngineServer]) -> list[EngineServer]:
    return [e for e in engines if e.engine.state()["running"] or e.engine.state()["loading"]]


def play(trouble: Trouble, connector: Connector) -> Told:
    """What comes of a trouble."""

    async def run() -> Told:
        async with bench(connector, COUNT, **trouble.config) as made, AsyncExitStack() as stack:
            case = Case(made, connector, stack)
            await case.begin()
            answers = await trouble.play(case)
            requests, failures = counted((await made.counters()) - case.before)
            await made.heal()
            left = []
            if not made.app.fleet.unproved:
                left += [told for _ in range(COUNT) for told in await made.next_one(LONG)]
            left += [*await made.settle(), *await made.end()]
            return Told(answers, requests, failures, left)

    return virtual.run(run())
