"""Which connections are kept, which are used again, and what happens when a kept one turns out dead."""

import asyncio

import pytest

from tandem.http import Client, ConnectFailed, UpstreamClosed

from .conftest import ServerPeer, StartOrigin, until

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
LIMIT = 100


async def fetch(client: Client, origin: object, *, retry: bool = True) -> bytes:
    stream = client.stream(origin, "POST", b"/", [], b"body", retry=retry)  # type: ignore[arg-type]
    async with stream as response:
        return await response.read(LIMIT)


async def always_ok(peer: ServerPeer) -> None:
    while True:
        await peer.request()
        await peer.send(OK)


async def dies_on_second_use(peer: ServerPeer) -> None:
    await peer.request()
    await peer.send(OK)
    await peer.request()  # and closes without a byte, as a server does whose idle time has just run out


async def test_a_kept_connection_that_dies_is_replaced_once(
    client: Client, start_origin: StartOrigin
) -> None:
    server = await start_origin(dies_on_second_use)
    for count in (1, 2, 3):
        assert await fetch(client, server.origin) == b"ok"
        assert server.connections == count


async def test_a_request_that_must_go_once_is_not_sent_again(
    client: Client, start_origin: StartOrigin
) -> None:
    server = await start_origin(dies_on_second_use)
    await fetch(client, server.origin, retry=False)
    with pytest.raises(UpstreamClosed) as caught:
        await fetch(client, server.origin, retry=False)
    assert caught.value.before_first_byte
    assert server.connections == 1


async def test_the_replacement_is_not_replaced(client: Client, start_origin: StartOrigin) -> None:
    async def script(peer: ServerPeer) -> None:
        await peer.request()
        if server.connections == 1:
            await peer.send(OK)
            await peer.request()

    server = await start_origin(script)
    await fetch(client, server.origin)
    with pytest.raises(UpstreamClosed):
        await fetch(client, server.origin)
    assert server.connections == 2


async def test_no_second_try_once_the_origin_has_begun_to_answer(
    client: Client, start_origin: StartOrigin
) -> None:
    async def script(peer: ServerPeer) -> None:
        await peer.request()
        await peer.send(OK)
        await peer.request()
        await peer.send(b"H")

    server = await start_origin(script)
    await fetch(client, server.origin)
    with pytest.raises(UpstreamClosed) as caught:
        await fetch(client, server.origin)
    assert not caught.value.before_first_byte
    assert server.connections == 1


async def test_a_connection_that_the_origin_closed_while_idle_is_not_used(
    client: Client, start_origin: StartOrigin
) -> None:
    async def script(peer: ServerPeer) -> None:
        await peer.request()
        await peer.send(OK)

    server = await start_origin(script)
    await fetch(client, server.origin, retry=False)
    await until(lambda: not client._pool._open)
    assert await fetch(client, server.origin, retry=False) == b"ok"


async def test_idle_connections_are_closed_before_the_origin_would(start_origin: StartOrigin) -> None:
    left = asyncio.Event()

    async def script(peer: ServerPeer) -> None:
        await peer.request()
        await peer.send(OK)
        await peer.left()
        left.set()

    server = await start_origin(script)
    client = Client(keep_alive=0.05)
    await fetch(client, server.origin)
    await left.wait()
    assert not client._pool._idle
    await client.aclose()


async def test_connections_that_are_not_to_be_kept_are_none_the_less_used_again_at_once(
    start_origin: StartOrigin,
) -> None:
    server = await start_origin(always_ok)
    client = Client(keep_alive=0)
    for _ in range(3):
        assert await fetch(client, server.origin) == b"ok"
    await until(lambda: not client._pool._open)
    await client.aclose()


async def test_only_so_many_idle_connections_are_kept(start_origin: StartOrigin) -> None:
    everyone = asyncio.Barrier(5)

    async def script(peer: ServerPeer) -> None:
        await peer.request()
        await everyone.wait()
        await peer.send(OK)
        await peer.left()

    server = await start_origin(script)
    client = Client(idle_per_origin=2)
    await asyncio.gather(*(fetch(client, server.origin) for _ in range(5)))
    assert server.connections == 5
    assert len(client._pool._idle[server.origin]) == 2
    await client.aclose()


@pytest.mark.parametrize("leave", ["cancel within", "cancel before the head", "leave early", "raise early"])
async def test_an_unfinished_exchange_closes_its_connection(
    client: Client, start_origin: StartOrigin, leave: str
) -> None:
    arrived, left = asyncio.Event(), asyncio.Event()

    async def script(peer: ServerPeer) -> None:
        await peer.request()
        if leave != "cancel before the head":
            await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")
        else:
            arrived.set()
        await peer.left()
        left.set()

    server = await start_origin(script)

    async def use() -> None:
        async with client.stream(server.origin, "GET", b"/", []) as response:
            arrived.set()
            if leave == "cancel within":
                await response.read(LIMIT)
            if leave == "raise early":
                raise LookupError

    task = asyncio.create_task(use())
    await arrived.wait()
    if leave.startswith("cancel"):
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await left.wait()
    assert not client._pool._idle


async def test_a_cancelled_exchange_is_not_kept_even_if_whole(
    client: Client, start_origin: StartOrigin
) -> None:
    server = await start_origin(always_ok)

    async def use() -> None:
        async with client.stream(server.origin, "GET", b"/", []) as response:
            await response.read(LIMIT)
            whole.set()
            await asyncio.Event().wait()

    whole = asyncio.Event()
    task = asyncio.create_task(use())
    await whole.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not client._pool._idle


@pytest.mark.parametrize("steps", range(12))
async def test_cancelling_at_any_moment_leaves_nothing_behind(start_origin: StartOrigin, steps: int) -> None:
    server = await start_origin(always_ok)
    client = Client()
    task = asyncio.create_task(fetch(client, server.origin))
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    kept = 0 if task.cancelled() else 1
    await until(lambda: len(client._pool._open) == kept)
    assert sum(map(len, client._pool._idle.values())) == kept
    await client.aclose()


async def test_closing_the_client_ends_what_is_under_way(start_origin: StartOrigin) -> None:
    arrived = asyncio.Event()

    async def script(peer: ServerPeer) -> None:
        await peer.request()
        arrived.set()
        await peer.left()

    server = await start_origin(script)
    client = Client()
    task = asyncio.create_task(fetch(client, server.origin))
    await arrived.wait()
    await client.aclose()
    with pytest.raises(UpstreamClosed):
        await task
    with pytest.raises(RuntimeError, match="closed"):
        client.stream(server.origin, "GET", b"/", [])


async def test_closing_the_client_while_it_connects(start_origin: StartOrigin) -> None:
    server = await start_origin(always_ok)
    client = Client()
    task = asyncio.create_task(fetch(client, server.origin))
    await asyncio.sleep(0)
    await client.aclose()
    with pytest.raises(ConnectFailed, match="the client was closed"):
        await task
    assert not client._pool._open


async def test_an_answer_before_the_request_is_read_does_not_leave_a_half_sent_request_in_the_pool(
    client: Client, start_origin: StartOrigin
) -> None:
    async def script(peer: ServerPeer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.send(OK)
        await answered.wait()

    answered = asyncio.Event()
    server = await start_origin(script)
    async with client.stream(server.origin, "POST", b"/", [], b"x" * 30_000_000) as response:
        assert await response.read(LIMIT) == b"ok"
    assert not client._pool._idle
    answered.set()
