"""requestLimits: so many requests at once for each decode engine, so many more wait their turn, the rest are
told when to come back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from tandem.config import RouterConfig
from tandem.http import Origin, Responder, serve
from tandem.router.engines import Engine, EngineRole
from tandem.router.errors import TooManyRequests
from tandem.router.fleet import Fleet
from tandem.router.gate import Gate
from tandem.sim import virtual

from ..sim.helpers import in_virtual_time
from .conftest import LONG, SHORT, Endpoint, Start
from .fakes import DONE, FakeEngine, Seen, broken, chunk, eventually, local_counter, streams_slowly

SOON = 0.05


# The gate alone


def decoders(count: int, *, ready: int) -> tuple[Fleet, list[Engine]]:
    fleet = Fleet()
    engines = [Engine(f"http://d{i}:1", EngineRole.DECODE, Origin(f"d{i}", 1)) for i in range(count)]
    for engine in engines:
        fleet.add(engine)
    for engine in engines[:ready]:
        fleet.prove(engine, [])
    return fleet, engines


def gate(fleet: Fleet, limit: int, queue: int, **more: Any) -> Gate:
    options = {name: more.pop(name) for name in ("clock",) if name in more}
    config = RouterConfig(decode=("http://d:1",), max_concurrent_requests=limit, max_queue_size=queue, **more)
    return Gate(config, fleet, **options)


class Visitor:
    """Somebody who goes through a gate and stays until told to go."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.inside = asyncio.Event()
        self._leave = asyncio.Event()
        self.task = asyncio.create_task(self._visit())

    async def _visit(self) -> None:
        async with self._gate.passing():
            self.inside.set()
            await self._leave.wait()

    async def leave(self) -> None:
        self._leave.set()
        await self.task


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@in_virtual_time
async def test_the_wait_in_the_queue_ends_after_a_minute_at_most() -> None:
    fleet, _ = decoders(1, ready=1)
    full = gate(fleet, 1, 5)
    first = Visitor(full)
    await settled()
    with pytest.raises(TooManyRequests):
        async with full.passing():
            pytest.fail("there was no room")
    assert asyncio.get_running_loop().time() == pytest.approx(60.0)
    assert (full.running, full.waiting) == (1, 0)
    await first.leave()
    assert full.running == 0


@in_virtual_time
async def test_a_decoder_that_comes_into_use_lets_in_who_waits() -> None:
    fleet, engines = decoders(3, ready=1)
    shared = gate(fleet, 2, 10)
    visitors = [Visitor(shared) for _ in range(7)]
    await settled()
    assert [v.inside.is_set() for v in visitors] == [True] * 2 + [False] * 5
    fleet.prove(engines[1], [])
    await settled()
    assert [v.inside.is_set() for v in visitors] == [True] * 4 + [False] * 3
    fleet.prove(engines[2], [])
    await settled()
    assert [v.inside.is_set() for v in visitors] == [True] * 6 + [False]
    for visitor in visitors:
        await visitor.leave()
    assert (shared.running, shared.waiting) == (0, 0)


@in_virtual_time
async def test_when_a_decoder_is_lost_nobody_is_thrown_out_and_nobody_let_in_until_there_is_room() -> None:
    fleet, engines = decoders(2, ready=2)
    shared = gate(fleet, 1, 10)
    first, second, third = (Visitor(shared) for _ in range(3))
    await settled()
    fleet.lost(engines[0], "gone")
    await first.leave()
    await settled()
    assert (shared.running, third.inside.is_set()) == (1, False)
    await second.leave()
    await settled()
    assert third.inside.is_set()
    await third.leave()


@in_virtual_time
async def test_without_a_decoder_the_limits_are_those_of_one() -> None:
    """Requests are told that the endpoint is not ready, and not that they are too many."""
    fleet, _ = decoders(2, ready=0)
    shared = gate(fleet, 1, 0)
    async with shared.passing():
        assert shared.running == 1
        with pytest.raises(TooManyRequests):
            async with shared.passing():
                pytest.fail("there was no room")


@pytest.mark.parametrize("seconds", [0.01, 4.0, 10.0, 500.0])
def test_retry_after_is_about_the_time_until_there_is_room(seconds: float) -> None:
    """As long as requests have taken lately, for each that waits already; a minute at most."""

    async def full_twice() -> tuple[int, int]:
        now = 0.0
        fleet, _ = decoders(1, ready=1)
        shared = gate(fleet, 2, 2, clock=lambda: now)
        for _ in range(60):
            async with shared.passing():
                now += seconds
        told = []
        visitors = [Visitor(shared) for _ in range(2)]
        await settled()
        shared_queue = [Visitor(shared) for _ in range(2)]
        await settled()
        for _ in range(2):
            with pytest.raises(TooManyRequests) as error:
                async with shared.passing():
                    pytest.fail("there was no room")
            assert error.value.retry_after_s is not None
            told.append(error.value.retry_after_s)
        for visitor in visitors + shared_queue:
            await visitor.leave()
        return told[0], told[1]

    first, second = virtual.run(full_twice())
    assert first == second
    assert first == min(60, max(1, -(-3 * round(seconds, 2) // 2)))


# The gate in a router


class Desk:
    """Requests to a router whose decoders hold them until told; named by their prompts."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.served: list[str] = []
        self._go_on: dict[str, asyncio.Event] = {}
        self._status = 200
        for decoder in endpoint.decode:
            decoder.on_generate = self._answer

    async def _answer(self, engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        name = seen.body["prompt"]
        self.served.append(name)
        await self._go_on.setdefault(name, asyncio.Event()).wait()
        return self._status != 200 and bool(broken(self._status)(engine, seen, responder))

    def send(self, name: str) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(self.endpoint.post({**SHORT, "prompt": name}))

    async def at_work(self, *names: str) -> list[asyncio.Task[httpx.Response]]:
        """Requests that a decoder has in hand."""
        tasks = [self.send(name) for name in names]
        await self.until(lambda: set(names) <= set(self.served))
        return tasks

    async def waiting(self, *names: str) -> list[asyncio.Task[httpx.Response]]:
        """Requests that stand in the queue, in this order."""
        tasks = []
        for name in names:
            before = await self.count()
            tasks.append(self.send(name))

            async def stands(before: float = before) -> bool:
                return await self.count() == before + 1

            await eventually(stands)
        return tasks

    async def count(self) -> float:
        return await self.endpoint.metric('tandem_requests_waiting{queue="admission"}')

    def finish(self, *names: str, status: int = 200) -> None:
        self._status = status
        for name in names:
            self._go_on.setdefault(name, asyncio.Event()).set()

    async def until(self, holds: Callable[[], bool]) -> None:
        async def now() -> bool:
            return holds()

        await eventually(now)

    async def empty(self) -> bool:
        gauges = ("tandem_requests_running", 'tandem_requests_waiting{queue="admission"}')
        return [await self.endpoint.metric(g) for g in gauges] == [0, 0]


@pytest.mark.parametrize("status", [429, 503, 400, 599])
async def test_one_too_many_is_told_in_hyperpods_words(start: Start, status: int) -> None:
    options = {} if status == 429 else {"overflow_status_code": status}
    endpoint = await start(max_concurrent_requests=2, **options)
    desk = Desk(endpoint)
    tasks = await desk.at_work("a", "b")
    answer = await endpoint.post(SHORT, x_request_id="mine")
    assert answer.status_code == status
    assert answer.content == (
        b'{"error":"Too many concurrent requests","max_concurrent":2,"max_queue_size":0,"current":2}'
    )
    assert answer.headers["content-type"] == "application/json"
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert answer.headers["x-request-id"] == "mine"
    desk.finish("a", "b")
    assert [(await t).status_code for t in tasks] == [200, 200]
    assert await endpoint.outcomes() == {
        ("decode_only", "short", "ok"): 2,
        ("none", "queue", "rejected"): 1,
    }


async def test_who_waits_is_served_in_order_of_arrival_and_the_queue_is_bounded(start: Start) -> None:
    endpoint = await start(max_concurrent_requests=1, max_queue_size=3)
    desk = Desk(endpoint)
    tasks = await desk.at_work("a") + await desk.waiting("b", "c", "d")
    over = await endpoint.post(SHORT)
    assert (over.status_code, over.json()["max_queue_size"], over.json()["current"]) == (429, 3, 1)
    assert await endpoint.metric("tandem_requests_running") == 1
    for n, name in enumerate("abcd"):
        assert desk.served == list("abcd")[: n + 1], "one at a time"
        desk.finish(name)
        assert (await tasks[n]).status_code == 200
        await desk.until(lambda n=n: len(desk.served) > min(n + 1, 3))
    await eventually(desk.empty)
    assert await endpoint.outcomes() == {
        ("decode_only", "short", "ok"): 4,
        ("none", "queue", "rejected"): 1,
    }


async def test_a_client_that_leaves_the_queue_makes_room_in_it_and_is_told_apart(start: Start) -> None:
    endpoint = await start(max_concurrent_requests=1, max_queue_size=2)
    desk = Desk(endpoint)
    (first,) = await desk.at_work("a")
    impatient, patient = await desk.waiting("b", "c")
    impatient.cancel()

    async def one_is_left() -> bool:
        return await desk.count() == 1

    await eventually(one_is_left)
    (late,) = await desk.waiting("d")
    desk.finish("a", "c", "d")
    assert [(await t).status_code for t in (first, patient, late)] == [200] * 3
    assert desk.served == ["a", "c", "d"], "nobody works for a client that has left"
    assert await endpoint.outcomes() == {
        ("decode_only", "short", "ok"): 3,
        ("none", "queue", "client_left"): 1,
    }


async def test_queue_timeout_limits_the_wait_in_the_queue(start: Start) -> None:
    endpoint = await start(max_concurrent_requests=1, max_queue_size=5, queue_timeout=SOON)
    desk = Desk(endpoint)
    (first,) = await desk.at_work("a")
    answer = await desk.send("b")
    assert answer.status_code == 429
    assert answer.json() == {
        "error": "Too many concurrent requests",
        "max_concurrent": 1,
        "max_queue_size": 5,
        "current": 1,
    }
    assert int(answer.headers["retry-after"]) >= 1
    desk.finish("a")
    assert (await first).status_code == 200
    assert desk.served == ["a"]
    assert await endpoint.outcomes() == {
        ("decode_only", "short", "ok"): 1,
        ("none", "queue", "rejected"): 1,
    }


async def test_limits_are_for_each_decode_engine_in_use(start: Start) -> None:
    endpoint = await start(decode=2, max_concurrent_requests=1, max_queue_size=1)
    desk = Desk(endpoint)
    tasks = await desk.at_work("a", "b") + await desk.waiting("c", "d")
    over = await endpoint.post(SHORT)
    assert over.json() | {"error": ""} == {
        "error": "",
        "max_concurrent": 2,
        "max_queue_size": 2,
        "current": 2,
    }
    desk.finish(*"abcd")
    assert [(await t).status_code for t in tasks] == [200] * 4


async def test_a_decode_engine_that_comes_back_takes_those_who_wait(start: Start) -> None:
    endpoint = await start(decode=2, max_concurrent_requests=1, max_queue_size=5, local=local_counter())
    gone = endpoint.decode[0]
    assert gone.server is not None
    await gone.server.close()
    for _ in range(2):
        assert (await endpoint.post(SHORT)).status_code == 200  # one of them finds out
    desk = Desk(endpoint)
    tasks = await desk.at_work("a") + await desk.waiting("b")
    gone.server = await serve(gone, "127.0.0.1", gone.server.port)
    await desk.until(lambda: desk.served == ["a", "b"])
    desk.finish("a", "b")
    assert [(await t).status_code for t in tasks] == [200, 200]


@pytest.mark.parametrize("how", ["answered", "rejected", "failed", "client left"])
async def test_however_a_request_ends_the_next_one_is_let_in(start: Start, how: str) -> None:
    endpoint = await start(max_concurrent_requests=1, max_queue_size=1, max_attempts=1)
    desk = Desk(endpoint)
    (first,) = await desk.at_work("a")
    (second,) = await desk.waiting("b")
    if how == "client left":
        first.cancel()
    else:
        desk.finish("a", status={"answered": 200, "rejected": 400, "failed": 500}[how])
    await desk.until(lambda: desk.served == ["a", "b"])
    desk.finish("b")
    assert (await second).status_code == 200
    await asyncio.gather(first, return_exceptions=True)
    await eventually(desk.empty)


async def test_a_stream_keeps_its_place_until_its_end(start: Start) -> None:
    endpoint = await start(max_concurrent_requests=1)
    go_on = asyncio.Event()
    endpoint.decode[0].on_generate = streams_slowly(go_on)
    async with AsyncExitStack() as stack:
        request = endpoint.client.stream("POST", "/v1/completions", json={**SHORT, "stream": True})
        answer = await stack.enter_async_context(request)
        parts = answer.aiter_bytes()
        assert await anext(parts) == chunk("a")
        assert (await endpoint.post(SHORT)).status_code == 429
        go_on.set()
        assert [part async for part in parts] == [DONE]
    endpoint.decode[0].on_generate = None
    assert (await endpoint.post(SHORT)).status_code == 200


async def test_what_is_no_generation_is_not_limited_nor_is_what_is_refused_anyway(start: Start) -> None:
    endpoint = await start(max_concurrent_requests=1)
    desk = Desk(endpoint)
    (first,) = await desk.at_work("a")
    for path in ("/health", "/ready", "/metrics", "/v1/models"):
        assert (await endpoint.client.get(path)).status_code == 200
    assert (await endpoint.post(b"{")).status_code == 400
    assert (await endpoint.post({"model": "other"})).status_code == 404
    desk.finish("a")
    assert (await first).status_code == 200


async def test_a_disaggregated_request_is_one_request_and_its_prompt_is_counted_when_it_is_served(
    start: Start,
) -> None:
    endpoint = await start(max_concurrent_requests=1, max_queue_size=1)
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def when_told(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        begun.set()
        await go_on.wait()
        return False

    endpoint.prefill[0].on_generate = when_told
    desk = Desk(endpoint)
    desk.finish(LONG["prompt"])
    first = asyncio.create_task(endpoint.post(LONG))
    await begun.wait()
    (second,) = await desk.waiting(LONG["prompt"])
    assert (await endpoint.post(LONG)).status_code == 429
    assert len(endpoint.decode[0].tokenized) == 1
    go_on.set()
    assert [(await t).status_code for t in (first, second)] == [200, 200]
    assert await endpoint.outcomes() == {
        ("disaggregated", "threshold", "ok"): 2,
        ("none", "queue", "rejected"): 1,
    }
    assert await endpoint.samples("tandem_prompt_tokens_total", "path") == {
        ("disaggregated",): 2 * len(LONG["prompt"])
    }


async def test_without_limits_all_are_served_at_once(start: Start) -> None:
    endpoint = await start()
    desk = Desk(endpoint)
    names = [str(n) for n in range(20)]
    tasks = await desk.at_work(*names)
    assert await endpoint.metric("tandem_requests_running") == 20
    desk.finish(*names)
    assert {(await t).status_code for t in tasks} == {200}
    await eventually(desk.empty)
