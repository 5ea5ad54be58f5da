"""Slow clients and clients that leave."""

import asyncio
import socket
from contextlib import suppress

import pytest

from tandem.http import Client, Origin, Request, Responder

from .conftest import Connect, StartServer, until


async def test_a_client_that_leaves_cancels_its_request(start: StartServer, connect: Connect) -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def handler(request: Request, respond: Responder) -> None:
        respond.start(200, [])
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            respond.write(b"to nobody")  # must not raise: clean-up code may not know that the client is gone
            cancelled.set()
            raise

    server = await start(handler)
    peer = await connect(server.port)
    await peer.send(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    await started.wait()
    peer.close()
    await cancelled.wait()
    assert await server.drain(60)


async def test_a_client_that_sent_ahead_and_leaves_cancels_its_last_request(
    start: StartServer, connect: Connect
) -> None:
    """Reading stops while requests wait; it must go on for the last, or nobody would see the client leave."""
    last, cancelled, go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def handler(request: Request, respond: Responder) -> None:
        await go_on.wait()
        if request.path == "/last":
            last.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
        respond.send(200, [])

    server = await start(handler)
    peer = await connect(server.port)
    await peer.send(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    await until(lambda: any(connection.task for connection in server._connections))
    await peer.send(b"GET /last HTTP/1.1\r\nhost: a\r\n\r\n")
    await until(lambda: not any(connection._reading for connection in server._connections))
    go_on.set()
    await last.wait()
    peer.close()
    await cancelled.wait()


async def test_a_client_that_leaves_after_its_answer_cancels_nothing(
    start: StartServer, connect: Connect
) -> None:
    """What a handler does after the last byte (accounts, metrics) is not lost when a client closes early."""
    gone, done = asyncio.Event(), asyncio.Event()

    async def handler(request: Request, respond: Responder) -> None:
        respond.send(200, [])
        await gone.wait()
        await asyncio.sleep(0)
        done.set()

    server = await start(handler)
    peer = await connect(server.port)
    await peer.request("GET", "/")
    peer.close()
    await peer.writer.wait_closed()
    gone.set()
    await done.wait()
    assert await server.drain(60)


async def test_leaving_before_the_handler_runs_is_no_leak(start: StartServer) -> None:
    async def handler(request: Request, respond: Responder) -> None:
        await asyncio.Event().wait()

    server = await start(handler)
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    assert await server.drain(60)


class Recorder:
    """A source that remembers what it was told."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")


async def test_a_slow_reader_pauses_the_source_and_drains(start: StartServer, connect: Connect) -> None:
    source = Recorder()
    total = 0

    async def handler(request: Request, respond: Responder) -> None:
        nonlocal total
        respond.start(200, [])
        respond.attach(source)
        for _ in range(10_000):
            if source.calls:
                break
            respond.write(b"a" * 10_000)
        late = Recorder()
        respond.attach(late)  # as when a second upstream takes over
        assert late.calls == ["pause"]
        respond.attach(source)
        await respond.drained()
        respond.write(b"end")
        respond.finish()
        total = respond.bytes_sent

    peer = await connect((await start(handler)).port)
    answer = await peer.request("GET", "/")
    assert answer.body == b"a" * (total - 3) + b"end"
    assert source.calls[:3] == ["pause", "pause", "resume"]


async def test_a_client_that_takes_nothing_is_dropped(start: StartServer, connect: Connect) -> None:
    cancelled = asyncio.Event()

    async def handler(request: Request, respond: Responder) -> None:
        respond.start(200, [])
        try:
            while True:
                respond.write(b"a" * 100_000)
                await respond.drained()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    server = await start(handler, write_timeout=0.05)
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        await cancelled.wait()


async def test_pipelining_without_reading_does_not_pile_up_answers(start: StartServer) -> None:
    answered = 0
    waiting = asyncio.Event()

    async def handler(request: Request, respond: Responder) -> None:
        nonlocal answered
        answered += 1
        respond.send(200, [], b"a" * 1_000_000)
        if answered == 1:
            waiting.set()

    server = await start(handler)
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n" * 100)
        await waiting.wait()
        for _ in range(200):
            await asyncio.sleep(0)
        assert answered < 20  # what the kernel's buffers hold, not 100


async def test_a_client_that_sends_much_lets_others_have_their_turn(start: StartServer) -> None:
    """uvloop reads on as long as there is something, up to 8 MiB."""

    async def handler(request: Request, respond: Responder) -> None:
        respond.send(200, [])

    server = await start(handler)
    data = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 300_000
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.setblocking(False)
        sent = 0
        with suppress(BlockingIOError):  # as much as the socket's buffers take before the loop sees any of it
            while sent < len(data):
                sent += client.send(data[sent:])
        await until(lambda: server.connections == 1)
        (connection,) = server._connections
        seen = {0}
        while max(seen) < sent // 6 - 100:
            seen.add(connection._parser.body_size)
            await asyncio.sleep(0)
        assert len(seen) > sent // 300_000
        await server.close()


class Watched:
    """Passes pause and resume on to a response, and remembers that they came."""

    def __init__(self, source: object) -> None:
        self.source = source
        self.is_paused = False
        self.pauses = asyncio.Event()

    def pause(self) -> None:
        self.is_paused = True
        self.pauses.set()
        self.source.pause()  # type: ignore[attr-defined]

    def resume(self) -> None:
        self.is_paused = False
        self.source.resume()  # type: ignore[attr-defined]


async def test_relay_holds_a_bounded_buffer_for_a_slow_reader(
    start: StartServer, connect: Connect, client: Client
) -> None:
    """Reader slower than engine: the router stops reading from the engine, which then has to wait itself."""
    size, piece = 32_000_000, b"a" * 50_000
    watched: list[Watched] = []
    too_much: list[int] = []
    reading = asyncio.Event()

    async def engine(request: Request, respond: Responder) -> None:
        respond.start(200, [])
        for _ in range(size // len(piece)):
            await respond.drained()
            respond.write(piece)
        respond.finish()

    upstream = Origin("127.0.0.1", (await start(engine)).port)

    async def route(request: Request, respond: Responder) -> None:
        async with client.stream(upstream, "GET", b"/", []) as response:
            source = Watched(response)
            watched.append(source)
            respond.start(response.status, response.headers)
            respond.attach(source)

            def sink(data: bytes) -> None:
                if source.is_paused:
                    too_much.append(len(data))
                respond.write(data)

            reading.set()
            await response.relay(sink)
        respond.finish()

    peer = await connect((await start(route)).port)
    answer = asyncio.create_task(peer.request("GET", "/"))
    await reading.wait()
    await watched[0].pauses.wait()
    assert len((await answer).body) == size
    assert too_much == []


@pytest.mark.parametrize("whole", [True, False])
async def test_a_client_that_leaves_closes_the_upstream_connection(
    start: StartServer, connect: Connect, client: Client, whole: bool
) -> None:
    engine_cancelled, relaying, finish = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def engine(request: Request, respond: Responder) -> None:
        respond.start(200, [])
        respond.write(b"a")
        try:
            await finish.wait()
            respond.finish()
        except asyncio.CancelledError:
            engine_cancelled.set()
            raise

    engines = await start(engine)
    upstream = Origin("127.0.0.1", engines.port)

    async def route(request: Request, respond: Responder) -> None:
        async with client.stream(upstream, "GET", b"/", []) as response:
            respond.start(response.status, response.headers)

            def sink(data: bytes) -> None:
                respond.write(data)
                relaying.set()

            await response.relay(sink)
        respond.finish()

    router = await start(route)
    peer = await connect(router.port)
    answer = asyncio.create_task(peer.request("GET", "/"))
    await relaying.wait()
    if whole:
        finish.set()
        assert (await answer).body == b"a"
        assert engines.connections == 1  # kept
    else:
        answer.cancel()
        peer.close()
        await engine_cancelled.wait()
        assert await router.drain(60)
        assert await engines.drain(60)
