"""A server that is told to close does so, whatever its clients and handlers are at."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import pytest

from tandem.http import Limits, Request, Responder, Server, serve
from tandem.http import server as server_module

from .conftest import Connect, StartServer, until

SOON = 5.0
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
MUCH = b"x" * 8_000_000


async def closes(server: Server) -> None:
    async with asyncio.timeout(SOON):
        await server.close()
    assert server.connections == 0


@pytest.fixture
async def deaf() -> AsyncIterator[Callable[[int, bytes], socket.socket]]:
    """Clients that send something and read nothing."""
    opened: list[socket.socket] = []

    def open_one(port: int, data: bytes) -> socket.socket:
        opened.append(socket.create_connection(("127.0.0.1", port)))
        opened[-1].sendall(data)
        return opened[-1]

    yield open_one
    for each in opened:
        each.close()


async def whole(request: Request, responder: Responder) -> None:
    responder.send(200, [], MUCH)


async def streamed(request: Request, responder: Responder) -> None:
    responder.start(200, [])
    while True:
        responder.write(MUCH)
        await responder.drained()


async def broken_off(request: Request, responder: Responder) -> None:
    responder.start(200, [])
    responder.write(MUCH)
    responder.abort()


@pytest.mark.parametrize("handler", [whole, streamed, broken_off])
@pytest.mark.parametrize(
    "head", [GET, GET.replace(b"host", b"connection: close\r\nhost"), b"nonsense\r\n\r\n"]
)
@pytest.mark.parametrize("drained", [False, True])
async def test_clients_that_do_not_read_do_not_hold_it_up(
    start: StartServer,
    deaf: Callable[[int, bytes], socket.socket],
    handler: Callable[..., object],
    head: bytes,
    drained: bool,
) -> None:
    asked = 0

    async def counted(request: Request, responder: Responder) -> None:
        nonlocal asked
        asked += 1
        await handler(request, responder)  # type: ignore[misc]

    server = await start(counted)
    for _ in range(3):
        deaf(server.port, head)
    await until(lambda: server.connections == 3 and (asked == 3 or b"nonsense" in head))
    for _ in range(20):
        await asyncio.sleep(0)
    if drained:
        await server.drain(0.05)
    await closes(server)


@pytest.mark.parametrize("data", [b"", b"GET /", GET])
@pytest.mark.parametrize("drained", [False, True])
async def test_a_connection_that_is_accepted_while_it_closes_does_not_hold_it_up(
    start: StartServer, deaf: Callable[[int, bytes], socket.socket], data: bytes, drained: bool
) -> None:
    async def forever(request: Request, responder: Responder) -> None:
        await asyncio.Event().wait()

    server = await start(forever, head_timeout=600.0)
    for turns in range(6):  # it is accepted in some turns of the loop, and closed in one of them
        deaf(server.port, data)
        for _ in range(turns):
            await asyncio.sleep(0)
    if drained:
        await server.drain(0.05)
    await closes(server)


async def test_a_connection_that_begins_after_it_was_closed_ends_at_once(start: StartServer) -> None:
    """As when the event loop had accepted it before."""
    asked = asyncio.Event()

    async def handler(request: Request, responder: Responder) -> None:
        asked.set()

    server = await start(handler)
    await server.close()
    ours, theirs = socket.socketpair()
    await asyncio.get_running_loop().connect_accepted_socket(server._connection, sock=ours)
    theirs.setblocking(False)
    with suppress(ConnectionError):
        await asyncio.get_running_loop().sock_sendall(theirs, GET)
        async with asyncio.timeout(SOON):
            assert await asyncio.get_running_loop().sock_recv(theirs, 100) == b""
    theirs.close()
    await until(lambda: server.connections == 0)
    assert not asked.is_set()


async def test_one_that_begins_while_it_drains_does_not_hold_it_up(
    start: StartServer, connect: Connect
) -> None:
    released, asked = asyncio.Event(), asyncio.Event()

    async def handler(request: Request, responder: Responder) -> None:
        asked.set()
        await released.wait()
        responder.send(200, [], b"ok")

    server = await start(handler, head_timeout=600.0)
    peer = await connect(server.port)
    await peer.send(GET)
    await asked.wait()
    draining = asyncio.create_task(server.drain(SOON))
    await asyncio.sleep(0)
    ours, theirs = socket.socketpair()
    await asyncio.get_running_loop().connect_accepted_socket(server._connection, sock=ours)
    await until(lambda: server.connections == 1)
    theirs.close()
    released.set()
    assert await draining
    assert (await peer.rest()).endswith(b"ok")


async def test_the_last_answer_of_a_drain_is_whole_for_a_client_that_has_sent_ahead(
    start: StartServer, connect: Connect
) -> None:
    """A socket that is closed with unread input resets the connection, and what was sent is lost with it."""
    size = 600_000  # more than the client's kernel takes while the client does not
    asked, go_on, answered = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def handler(request: Request, responder: Responder) -> None:
        asked.set()
        await go_on.wait()
        responder.send(200, [], b"x" * size)
        answered.set()

    server = await start(handler)
    peer = await connect(server.port)
    peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await peer.send(GET * 2)
    await asked.wait()
    (connection,) = server._connections
    await until(lambda: not connection._reading)
    await peer.send(GET)  # which stays in our kernel
    draining = asyncio.create_task(server.drain(SOON))
    go_on.set()
    await answered.wait()
    for _ in range(20):
        await asyncio.sleep(0)
    peer.writer.transport.resume_reading()  # type: ignore[attr-defined]
    answer = await peer.rest()
    assert len(answer.partition(b"\r\n\r\n")[2]) == size
    peer.close()
    assert await draining


async def test_a_client_that_has_sent_ahead_and_is_gone_is_no_error_when_we_drain(
    start: StartServer, deaf: Callable[[int, bytes], socket.socket], caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is read while its requests wait, so it is found gone only when its last answer has ended."""
    answered, go_on = asyncio.Event(), asyncio.Event()

    async def handler(request: Request, responder: Responder) -> None:
        responder.send(200, [])
        answered.set()
        await go_on.wait()

    server = await start(handler)
    client = deaf(server.port, GET * 3)
    await answered.wait()
    draining = asyncio.create_task(server.drain(SOON))
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.close()
    for _ in range(20):
        await asyncio.sleep(0)
    go_on.set()
    assert await draining
    assert not caplog.records


async def test_a_handler_that_will_not_end_is_given_up(
    monkeypatch: pytest.MonkeyPatch, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "_CLOSING", 0.05)
    asked, released = asyncio.Event(), asyncio.Event()

    async def stubborn(request: Request, responder: Responder) -> None:
        asked.set()
        while not released.is_set():
            with suppress(asyncio.CancelledError):
                await released.wait()

    server = await serve(stubborn, "127.0.0.1", 0, limits=Limits())
    peer = await connect(server.port)
    await peer.send(GET)
    await asked.wait()
    async with asyncio.timeout(SOON):
        await server.close()
    assert "1 handlers have not ended" in caplog.text
    released.set()
    await until(lambda: server.connections == 0)
