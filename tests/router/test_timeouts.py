"""How long the router waits, and for what. Engines here are silent for ever; each flag's limit ends it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import httpx
import pytest

from tandem.config import RouterConfig
from tandem.http import Responder
from tandem.router.app import running
from tandem.router.engines import State

from .conftest import CHAT, LONG, SHORT, Endpoint, Start
from .fakes import (
    DONE,
    ROLE,
    SSE,
    FakeEngine,
    Seen,
    chunk,
    engines,
    eventually,
    hang,
    local_counter,
    streams,
)

SOON = 0.1
LATE = 300.0

Deafen = Callable[[FakeEngine], Awaitable[None]]


@pytest.fixture
def deafen() -> Iterator[Deafen]:
    """Leave an engine's address where it is, with nobody who takes connections there."""
    with ExitStack() as stack:

        async def deafen_one(engine: FakeEngine) -> None:
            assert engine.server is not None
            await engine.server.close()
            listener = stack.enter_context(socket.socket())
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", engine.server.port))
            listener.listen(0)
            for _ in range(4):  # fill the queue of connections that wait to be taken
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(listener.getsockname())

        yield deafen_one


async def test_connect_timeout_limits_the_wait_for_a_connection(start: Start, deafen: Deafen) -> None:
    endpoint = await start(decode=2, local=local_counter(), connect_timeout=SOON)
    await deafen(endpoint.decode[0])
    for _ in range(2):
        assert (await endpoint.post(SHORT)).status_code == 200
    assert await endpoint.failures() == {("decode", "connect"): 1}
    (lost,) = [e for e in endpoint.app.fleet.engines if e.state is State.WAITING]
    assert lost.url == endpoint.decode[0].url
    assert f"no connection within {SOON:g} s" in lost.why


async def test_prefill_timeout_limits_the_wait_for_the_prefill_legs_answer(start: Start) -> None:
    endpoint = await start(prefill_timeout=SOON, first_token_timeout=LATE)
    endpoint.prefill[0].on_generate = hang
    answer = await endpoint.post(LONG)
    assert (answer.status_code, endpoint.decode[0].requests[0].kv) == (200, None)
    assert await endpoint.failures() == {("prefill", "head_timeout"): 1}
    await eventually(lambda: cancelled(endpoint.prefill[0]))


async def cancelled(engine: FakeEngine) -> bool:
    """The engine was told, by the connection's end, to work no more."""
    return engine.cancelled == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_first_token_timeout_limits_the_wait_for_an_answer_to_begin(start: Start, stream: bool) -> None:
    endpoint = await start(
        first_token_timeout=SOON, prefill_timeout=LATE, stream_idle_timeout=LATE, max_attempts=1
    )
    endpoint.decode[0].on_generate = hang
    answer = await endpoint.post({**SHORT, "stream": stream})
    assert answer.status_code == 502
    assert await endpoint.failures() == {("decode", "head_timeout"): 1}
    await eventually(lambda: cancelled(endpoint.decode[0]))


async def test_answer_timeout_is_what_an_answer_that_comes_whole_may_take_beyond_that(start: Start) -> None:
    endpoint = await start(first_token_timeout=SOON, answer_timeout=LATE)

    async def takes_its_time(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        await asyncio.sleep(5 * SOON)
        return False

    endpoint.decode[0].on_generate = takes_its_time
    assert (await endpoint.post(SHORT)).status_code == 200
    assert await endpoint.failures() == {}


@pytest.mark.parametrize("pieces", [[], [b": ping\n\n"], [ROLE]], ids=["head", "comment", "role"])
async def test_first_token_timeout_holds_for_a_stream_that_is_silent_behind_its_head(
    start: Start, pieces: list[bytes]
) -> None:
    endpoint = await start(first_token_timeout=SOON, stream_idle_timeout=LATE, max_attempts=1)
    endpoint.decode[0].on_generate = streams(*pieces, then_hangs=True)
    answer = await endpoint.post({**CHAT, "stream": True, "n": 2}, "/v1/chat/completions")
    assert answer.status_code == 502
    assert await endpoint.failures() == {("decode", "idle_timeout"): 1}


async def test_stream_idle_timeout_limits_a_silence_in_the_middle_of_an_answer(start: Start) -> None:
    endpoint = await start(first_token_timeout=LATE, stream_idle_timeout=SOON)
    endpoint.decode[0].on_generate = streams(chunk("a"), chunk("b"), then_hangs=True)
    received, whole = await endpoint.stream(SHORT)
    assert received.startswith(chunk("a") + chunk("b"))
    assert b"idle_timeout" in received
    assert not whole
    assert await endpoint.failures() == {("decode", "idle_timeout"): 1}


async def test_stream_idle_timeout_is_not_for_the_wait_for_the_first_token(start: Start) -> None:
    """It may be long: the KV is fetched, and the engine may have others to serve."""
    endpoint = await start(first_token_timeout=LATE, stream_idle_timeout=SOON)

    async def thinks(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        responder.start(200, SSE)
        responder.write(ROLE)
        await asyncio.sleep(3 * SOON)
        responder.write(chunk("a") + DONE)
        responder.finish()
        return True

    endpoint.decode[0].on_generate = thinks
    received, whole = await endpoint.stream({**CHAT, "n": 2}, "/v1/chat/completions")
    assert (received, whole) == (ROLE + chunk("a") + DONE, True)


class Drained:
    """A router that a test tells to end, in front of one decoder."""

    def __init__(self, endpoint: Endpoint, stop: asyncio.Event, ended: asyncio.Task[None]) -> None:
        self.endpoint = endpoint
        self.stop = stop
        self.ended = ended


@pytest.fixture
async def drained() -> AsyncIterator[Any]:
    async with AsyncExitStack() as stack:

        async def start_one(**options: Any) -> Drained:
            decoder = FakeEngine("d")
            await stack.enter_async_context(engines(decoder))
            config = RouterConfig(port=0, decode=(decoder.url,), **options)
            up: asyncio.Future[tuple[Any, Any]] = asyncio.get_running_loop().create_future()
            stop = asyncio.Event()

            async def live() -> None:
                async with running(config, None, waiting_interval=0.01) as router:
                    up.set_result(router)
                    await stop.wait()

            ended = asyncio.create_task(live())
            server, app = await up
            client = await stack.enter_async_context(
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", trust_env=False)
            )
            endpoint = Endpoint(client, app, [], [decoder])
            await endpoint.ready()
            return Drained(endpoint, stop, ended)

        yield start_one


async def test_drain_delay_takes_requests_while_ready_says_no(
    drained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    delay = asyncio.Event()
    sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda s, *a: delay.wait() if s == 77.0 else sleep(s, *a))
    router = await drained(drain_delay=77.0, drain_timeout=LATE)
    client = router.endpoint.client
    router.stop.set()

    async def says_no() -> bool:
        answer = await client.get("/ready")
        return answer.status_code == 503 and answer.json()["reason"] == "draining"

    await eventually(says_no)
    for _ in range(3):
        assert (await router.endpoint.post(SHORT, connection="close")).status_code == 200
    assert not router.ended.done()
    delay.set()
    await router.ended


async def held(router: Drained) -> tuple[asyncio.Event, asyncio.Task[tuple[bytes, bool]]]:
    """A stream that has begun, goes on when told, and is under way when the router is stopped."""
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        responder.start(200, SSE)
        responder.write(chunk("a"))
        begun.set()
        await go_on.wait()
        responder.write(DONE)
        responder.finish()
        return True

    router.endpoint.decode[0].on_generate = slowly
    stream = asyncio.create_task(router.endpoint.stream(SHORT))
    await begun.wait()
    router.stop.set()

    async def draining() -> bool:
        return router.endpoint.app.draining

    await eventually(draining)
    return go_on, stream


async def test_a_running_answer_is_finished_before_the_router_ends(drained: Any) -> None:
    router = await drained(drain_timeout=LATE)
    go_on, stream = await held(router)
    go_on.set()
    assert await stream == (chunk("a") + DONE, True)
    await router.ended


async def test_drain_timeout_limits_the_wait_for_running_answers(
    drained: Any, caplog: pytest.LogCaptureFixture
) -> None:
    router = await drained(drain_timeout=SOON)
    _, stream = await held(router)
    await router.ended
    assert f"not every answer was finished within {SOON:g} s" in caplog.text
    received, whole = await stream
    assert received in (b"", chunk("a"))
    assert not whole
