"""Peers on real sockets. h11, an independent implementation, speaks for the other side."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import h11
import pytest
import uvloop

from tandem.http import Client, Handler, Limits, Origin, Server, serve


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Every test here runs on both event loops."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop run until this holds. If it never does, the test hangs until its time-out."""
    while not condition():
        await asyncio.sleep(0)


@dataclass
class Answer:
    """A response as h11 read it."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes
    http_version: bytes


class ClientPeer:
    """A client's end of a connection: writes bytes, reads what h11 makes of the answers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.h11 = h11.Connection(h11.CLIENT)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def request(
        self, method: str, target: str, headers: dict[str, str] | None = None, body: bytes = b""
    ) -> Answer:
        """One request and its answer, over and over on the same connection."""
        if self.h11.our_state is h11.DONE:
            self.h11.start_next_cycle()
        fields = {"host": "test", **(headers or {})}
        if body and "transfer-encoding" not in fields:
            fields["content-length"] = str(len(body))
        await self.send(
            self.h11.send(h11.Request(method=method, target=target, headers=list(fields.items())))
        )
        for piece in (body[i : i + 1000] for i in range(0, len(body), 1000)):
            await self.send(self.h11.send(h11.Data(data=piece)))
        await self.send(self.h11.send(h11.EndOfMessage()))
        return await self.answer()

    async def event(self) -> Any:
        while (event := self.h11.next_event()) is h11.NEED_DATA:
            self.h11.receive_data(await self.reader.read(65536))
        return event

    async def answer(self) -> Answer:
        """The next answer. Raises `h11.RemoteProtocolError` if it is not whole."""
        head = await self.event()
        while isinstance(head, h11.InformationalResponse):
            head = await self.event()
        assert isinstance(head, h11.Response), head
        body = b""
        while isinstance(event := await self.event(), h11.Data):
            body += event.data
        assert isinstance(event, h11.EndOfMessage)
        return Answer(head.status_code, dict(head.headers), body, head.http_version)

    async def rest(self) -> bytes:
        """All bytes up to the end of the connection."""
        return await self.reader.read(-1)

    def close(self) -> None:
        self.writer.close()


class ServerPeer:
    """A server's end of a connection: h11 reads the requests, the test writes what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.h11 = h11.Connection(h11.SERVER)

    async def request(self) -> tuple[h11.Request, bytes]:
        """The next request. Raises `EOFError` when the client has closed."""
        if self.h11.our_state is h11.SEND_RESPONSE:  # the last answer was written past h11
            self.h11 = h11.Connection(h11.SERVER)
        elif self.h11.our_state is h11.DONE:
            self.h11.start_next_cycle()
        head = await self.event()
        if not isinstance(head, h11.Request):
            raise EOFError
        body = b""
        while isinstance(event := await self.event(), h11.Data):
            body += event.data
        return head, body

    async def event(self) -> Any:
        while (event := self.h11.next_event()) is h11.NEED_DATA:
            self.h11.receive_data(await self.reader.read(65536))
        return event

    async def respond(self, status: int, headers: list[tuple[str, str]], *pieces: bytes) -> None:
        """A whole response, in h11's framing."""
        self.writer.write(self.h11.send(h11.Response(status_code=status, headers=headers)) or b"")
        for piece in pieces:
            self.writer.write(self.h11.send(h11.Data(data=piece)) or b"")
        self.writer.write(self.h11.send(h11.EndOfMessage()) or b"")
        await self.writer.drain()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def left(self) -> None:
        """Return when the client has closed the connection."""
        try:
            while await self.reader.read(65536):
                pass
        except ConnectionError:
            pass


@dataclass
class FakeOrigin:
    """A server that runs `script` once a connection."""

    script: Callable[[ServerPeer], Awaitable[None]]
    connections: int = 0
    errors: list[BaseException] = field(default_factory=list)
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    origin: Origin = field(init=False)

    async def serve(self) -> asyncio.Server:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.origin = Origin("127.0.0.1", server.sockets[0].getsockname()[1])
        return server

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        self.connections += 1
        try:
            await self.script(ServerPeer(reader, writer))
        except (EOFError, ConnectionError, asyncio.CancelledError):
            pass
        except Exception as error:
            self.errors.append(error)
        finally:
            self.tasks.discard(task)
            writer.close()


StartServer = Callable[..., Awaitable[Server]]
Connect = Callable[[int], Awaitable[ClientPeer]]
StartOrigin = Callable[[Callable[[ServerPeer], Awaitable[None]]], Awaitable[FakeOrigin]]


@pytest.fixture
async def start() -> AsyncIterator[StartServer]:
    """Start our server with a handler and limits."""
    servers: list[Server] = []

    async def start(handler: Handler, **limits: Any) -> Server:
        servers.append(await serve(handler, "127.0.0.1", 0, limits=Limits(**limits)))
        return servers[-1]

    yield start
    for server in servers:
        await server.close()


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Open a client's end to a port."""
    peers: list[ClientPeer] = []

    async def connect(port: int) -> ClientPeer:
        peers.append(ClientPeer(*await asyncio.open_connection("127.0.0.1", port)))
        return peers[-1]

    yield connect
    for peer in peers:
        peer.close()


@pytest.fixture
async def start_origin() -> AsyncIterator[StartOrigin]:
    """Start a scripted origin; a script that fails fails the test."""
    running: list[tuple[asyncio.Server, FakeOrigin]] = []

    async def start_origin(script: Callable[[ServerPeer], Awaitable[None]]) -> FakeOrigin:
        origin = FakeOrigin(script)
        running.append((await origin.serve(), origin))
        return origin

    yield start_origin
    for server, origin in running:
        server.close()
        for task in list(origin.tasks):
            task.cancel()
        await asyncio.gather(*origin.tasks, return_exceptions=True)
        assert not origin.errors, origin.errors


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    client = Client()
    yield client
    await client.aclose()
