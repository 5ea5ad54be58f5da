"""Host names: looked up once for all who wait, and one that does not resolve is in nobody's way."""

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable

import pytest

from tandem.http import Client, ConnectFailed, Origin
from tandem.http._names import Names

from .conftest import FakeOrigin, ServerPeer, StartOrigin, until

LIMIT = 100


class Resolver:
    """Stands for the system's, called in threads. `hangs`: names that are silent until `release`."""

    def __init__(self) -> None:
        self.known: dict[str, list[str]] = {}
        self.hangs: Callable[[str], bool] = lambda host: False
        self.released = threading.Event()
        self.asked: Counter[str] = Counter()
        self.now = 0.0

    def __call__(self, host: str) -> list[str]:
        self.asked[host] += 1
        if self.hangs(host):
            self.released.wait()
        if host not in self.known:
            raise socket.gaierror(-2, "Name or service not known")
        return self.known[host]

    def names(self, at_once: int = 8) -> Names:
        return Names(resolve=self, at_once=at_once, clock=lambda: self.now)


@pytest.fixture
async def resolver() -> AsyncIterator[Resolver]:
    resolver = Resolver()
    yield resolver
    resolver.released.set()


async def ok(peer: ServerPeer) -> None:
    await peer.request()
    await peer.send(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok")


async def fetch(client: Client, host: str, server: FakeOrigin, *, connect_timeout: float = 5.0) -> bytes:
    origin = Origin(host, server.origin.port)
    async with client.stream(origin, "GET", b"/", [], connect_timeout=connect_timeout) as response:
        return await response.read(LIMIT)


@pytest.mark.parametrize("healthy", ["127.0.0.1", "good"])
async def test_engines_whose_names_do_not_resolve_keep_nobody_from_the_others(
    start_origin: StartOrigin, resolver: Resolver, healthy: str
) -> None:
    server = await start_origin(ok)
    resolver.known["good"] = ["127.0.0.1"]
    resolver.hangs = lambda host: host.startswith("dead")
    client = Client(names=resolver.names())
    assert await fetch(client, healthy, server) == b"ok"
    resolver.now += 10
    dead = [asyncio.create_task(fetch(client, f"dead{i}", server)) for i in range(6)]
    await until(lambda: all(resolver.asked[f"dead{i}"] for i in range(6)))
    for _ in range(3):
        assert await fetch(client, healthy, server, connect_timeout=1.0) == b"ok"
        resolver.now += 10
    assert not any(task.done() for task in dead)
    for task in dead:
        task.cancel()
    await asyncio.gather(*dead, return_exceptions=True)
    await client.aclose()


async def test_those_who_ask_at_once_share_one_look_up(resolver: Resolver) -> None:
    resolver.known["host"] = ["10.0.0.7", "10.0.0.8"]
    resolver.hangs = lambda host: True
    names = resolver.names()
    asking = [asyncio.create_task(names.addresses("host")) for _ in range(20)]
    await until(lambda: resolver.asked["host"] == 1)
    asking.append(asyncio.create_task(names.addresses("host")))
    resolver.released.set()
    assert await asyncio.gather(*asking) == [["10.0.0.7", "10.0.0.8"]] * 21
    assert resolver.asked["host"] == 1


async def test_one_who_leaves_takes_the_look_up_from_nobody(resolver: Resolver) -> None:
    resolver.known["host"] = ["10.0.0.7"]
    resolver.hangs = lambda host: True
    names = resolver.names()
    leaving, staying = (asyncio.create_task(names.addresses("host")) for _ in range(2))
    await until(lambda: resolver.asked["host"] == 1)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    resolver.released.set()
    assert await staying == ["10.0.0.7"]


async def test_a_name_has_one_thread_however_often_it_is_asked_for_in_vain(
    start_origin: StartOrigin, resolver: Resolver
) -> None:
    """A thread in the resolver cannot be stopped: they must not pile up."""
    server = await start_origin(ok)
    resolver.hangs = lambda host: True
    client = Client(names=resolver.names())
    for _ in range(5):
        with pytest.raises(ConnectFailed, match=r"no connection within 0\.01 s"):
            await fetch(client, "dead", server, connect_timeout=0.01)
    await until(lambda: resolver.asked["dead"] == 1)
    resolver.known["dead"] = ["127.0.0.1"]
    resolver.released.set()
    assert await fetch(client, "dead", server) == b"ok", "it is joined when it comes at last"
    assert resolver.asked["dead"] == 1
    await client.aclose()


async def test_an_answer_counts_for_a_burst_and_not_for_later(resolver: Resolver) -> None:
    names = resolver.names()
    resolver.known["host"] = ["10.0.0.7"]
    assert await names.addresses("host") == await names.addresses("host") == ["10.0.0.7"]
    assert resolver.asked["host"] == 1
    resolver.known["host"] = ["10.0.0.8"]
    resolver.now += 3
    assert await names.addresses("host") == ["10.0.0.8"]


async def test_that_a_name_is_not_known_is_asked_again_later(resolver: Resolver) -> None:
    names = resolver.names()
    for _ in range(2):
        with pytest.raises(OSError, match=r"host cannot be looked up: .*not known"):
            await names.addresses("host")
    assert resolver.asked["host"] == 1
    resolver.known["host"] = ["10.0.0.7"]
    resolver.now += 3
    assert await names.addresses("host") == ["10.0.0.7"]


async def test_look_ups_are_bounded_and_names_that_were_found_go_first(resolver: Resolver) -> None:
    names = resolver.names(at_once=8)
    resolver.known["good"] = ["10.0.0.7"]
    await names.addresses("good")
    for i in range(20):
        with pytest.raises(OSError, match="not known"):
            await names.addresses(f"dead{i}")
    before = resolver.asked.total()
    resolver.now += 3
    resolver.hangs = lambda host: host != "good"
    asking = [asyncio.create_task(names.addresses(f"dead{i}")) for i in range(20)]
    await until(lambda: resolver.asked.total() == before + 4)
    fresh = [asyncio.create_task(names.addresses(f"new{i}")) for i in range(20)]
    await until(lambda: resolver.asked.total() == before + 6)
    assert await names.addresses("good") == ["10.0.0.7"]
    assert resolver.asked.total() == before + 7, "half of them for names not found, a quarter for new ones"
    resolver.released.set()
    await asyncio.gather(*asking, *fresh, return_exceptions=True)
    assert resolver.asked.total() == before + 41, "all get their turn"


async def test_a_name_that_nobody_waits_for_any_more_is_not_looked_up(resolver: Resolver) -> None:
    names = resolver.names(at_once=1)
    resolver.hangs = lambda host: True
    first = asyncio.create_task(names.addresses("first"))
    await until(lambda: resolver.asked.total() == 1)
    second = asyncio.create_task(names.addresses("second"))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    resolver.released.set()
    await asyncio.gather(first, return_exceptions=True)
    assert resolver.asked == {"first": 1}


async def test_each_address_of_a_name_is_tried(start_origin: StartOrigin, resolver: Resolver) -> None:
    server = await start_origin(ok)
    resolver.known["host"] = ["::1", "127.0.0.1"]  # the fake origin listens on IPv4 only
    client = Client(names=resolver.names())
    assert await fetch(client, "host", server) == b"ok"
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        server.origin = Origin("host", unused.getsockname()[1])
        with pytest.raises(ConnectFailed, match=r"cannot connect: .*; .*"):
            await fetch(client, "host", server)
    await client.aclose()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "fe80::1%1"])
async def test_an_address_is_not_looked_up(resolver: Resolver, address: str) -> None:
    assert await resolver.names().addresses(address) == [address]
    assert not resolver.asked


async def test_localhost_is_found_by_the_systems_own_resolver(start_origin: StartOrigin) -> None:
    server = await start_origin(ok)
    client = Client()
    assert await fetch(client, "localhost", server) == b"ok"
    await client.aclose()


@pytest.mark.parametrize("host", ["a..b", "x" * 64 + ".example", "\ud800"])
async def test_what_cannot_be_a_name_is_a_connection_that_failed(client: Client, host: str) -> None:
    with pytest.raises(OSError, match="cannot be looked up"):
        await Names().addresses(host)


async def test_a_system_without_threads_is_an_error_of_that_connection(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    resolver.known["host"] = ["10.0.0.7"]
    names = resolver.names(at_once=1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        with pytest.raises(OSError, match="can't start new thread"):
            await names.addresses("host")
    resolver.now += 3
    assert await names.addresses("host") == ["10.0.0.7"]
