"""The client against origins that speak through h11, or write what no good origin would."""

import asyncio
import socket

import pytest

from tandem.http import (
    BodyTooLarge,
    Client,
    ConnectFailed,
    HeadTimeout,
    HTTPClientError,
    IdleTimeout,
    InvalidHeader,
    Origin,
    UpstreamClosed,
)

from .conftest import FakeOrigin, ServerPeer, StartOrigin, until
from .messages import BROKEN, LIMITS

OK = b"HTTP/1.1 200 OK\r\n"
LIMIT = 1 << 20


def raw(data: bytes, *, close: bool = False) -> object:
    """An origin that answers every request with these bytes."""

    async def script(peer: ServerPeer) -> None:
        while True:
            await peer.request()
            await peer.send(data)
            if close:
                return

    return script


async def get(client: Client, origin: FakeOrigin, method: str = "GET") -> tuple[int, bytes]:
    async with client.stream(origin.origin, method, b"/", []) as response:
        return response.status, await response.read(LIMIT)


async def test_sends_a_request_as_h11_reads_it(client: Client, start_origin: StartOrigin) -> None:
    seen = []

    async def script(peer: ServerPeer) -> None:
        while True:
            head, body = await peer.request()
            seen.append((head.method, head.target, list(head.headers), body))
            await peer.respond(200, [("content-length", "2"), ("x-a", "1"), ("x-a", "2")], b"ok")

    server = await start_origin(script)
    headers = [
        (b"host", b"the client's"),
        (b"content-length", b"999"),
        (b"transfer-encoding", b"chunked"),
        (b"connection", b"x-hop"),
        (b"x-hop", b"1"),
        (b"expect", b"100-continue"),
        (b"x-end", b"1"),
    ]
    for body in (b"", b"abc", b"b" * 500_000):
        async with client.stream(server.origin, "POST", b"/v1?x", headers, body) as response:
            assert (response.status, response.header(b"x-a")) == (200, b"1, 2")
            assert await response.read(LIMIT) == b"ok"
        host, length = server.origin.authority.encode(), str(len(body)).encode()
        fields = [(b"host", host), (b"x-end", b"1"), (b"content-length", length)]
        assert seen.pop() == (b"POST", b"/v1?x", fields, body)
    await get(client, server)
    assert seen.pop() == (b"GET", b"/", [(b"host", host)], b"")
    assert server.connections == 1


CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
BODIES = {
    "length": (OK + b"content-length: 3\r\n\r\nabc", b"abc"),
    "chunked": (CHUNKED + b"1;x=y\r\na\r\n2\r\nbc\r\n0\r\ntrailer: 1\r\n\r\n", b"abc"),
    "empty": (OK + b"content-length: 0\r\n\r\n", b""),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    "not modified": (b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n", b""),
    "interim": (
        b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n"
        + OK
        + b"content-length: 3\r\n\r\nabc",
        b"abc",
    ),
}


@pytest.mark.parametrize(("answer", "body"), BODIES.values(), ids=BODIES.keys())
async def test_reads_a_response_and_keeps_the_connection(
    client: Client, start_origin: StartOrigin, answer: bytes, body: bytes
) -> None:
    server = await start_origin(raw(answer))
    for _ in range(3):
        assert (await get(client, server))[1] == body
    assert server.connections == 1


UNKEPT = {
    "until close": (OK + b"\r\nabc", True),
    "until close, old": (b"HTTP/1.0 200 OK\r\n\r\nabc", True),
    "asked to close": (OK + b"connection: close\r\ncontent-length: 3\r\n\r\nabc", False),
    "old": (b"HTTP/1.0 200 OK\r\ncontent-length: 3\r\n\r\nabc", False),
    "bytes behind": (OK + b"content-length: 3\r\n\r\nabc" + b"X", False),
    "an answer behind": (OK + b"content-length: 3\r\n\r\nabc" + OK + b"content-length: 3\r\n\r\nbad", False),
    "chunk behind": (CHUNKED + b"3\r\nabc\r\n0\r\n\r\n3\r\nbad\r\n", False),
}


@pytest.mark.parametrize(("answer", "close"), UNKEPT.values(), ids=UNKEPT.keys())
async def test_whole_responses_on_connections_that_cannot_be_kept(
    client: Client, start_origin: StartOrigin, answer: bytes, close: bool
) -> None:
    server = await start_origin(raw(answer, close=close))
    for count in (1, 2):
        assert await get(client, server) == (200, b"abc")
        assert server.connections == count


async def test_an_answer_that_nobody_asked_for_is_never_taken_for_the_next(start_origin: StartOrigin) -> None:
    client = Client(keep_alive=3600)  # so that it is not its age that ends the connection
    unasked = asyncio.Event()

    async def script(peer: ServerPeer) -> None:
        await peer.request()
        await peer.send(OK + b"content-length: 4\r\n\r\ngood")
        if server.connections == 1:
            await unasked.wait()
            await peer.send(OK + b"content-length: 3\r\n\r\nbad")
        await peer.left()
        left.set()

    left = asyncio.Event()
    server = await start_origin(script)
    assert await get(client, server) == (200, b"good")
    unasked.set()
    await left.wait()
    assert await get(client, server) == (200, b"good")
    assert server.connections == 2
    await client.aclose()


async def test_head_has_no_body(client: Client, start_origin: StartOrigin) -> None:
    server = await start_origin(raw(OK + b"content-length: 3\r\n\r\n"))
    assert await get(client, server, "HEAD") == (200, b"")
    assert await get(client, server, "HEAD") == (200, b"")


@pytest.mark.parametrize(("answer", "error"), BROKEN.values(), ids=BROKEN.keys())
async def test_broken_responses_say_what_and_where(
    start_origin: StartOrigin, answer: bytes, error: type[HTTPClientError]
) -> None:
    client = Client(head_bytes=LIMITS.head_bytes)
    server = await start_origin(raw(answer, close=True))
    with pytest.raises(error) as caught:
        await get(client, server)
    assert str(server.origin) in str(caught.value)
    if isinstance(caught.value, UpstreamClosed):
        assert caught.value.before_first_byte == (answer == b"")
    assert server.connections == 1  # a fresh connection is not retried
    await client.aclose()


async def test_a_truncated_body_is_handed_over_before_the_error(
    client: Client, start_origin: StartOrigin
) -> None:
    server = await start_origin(raw(CHUNKED + b"3\r\nabc\r\n", close=True))
    got: list[bytes] = []
    async with client.stream(server.origin, "GET", b"/", []) as response:
        with pytest.raises(UpstreamClosed, match="within the body"):
            await response.relay(got.append)
        assert not response.complete
    assert b"".join(got) == b"abc"


async def test_relay_joins_what_came_together(client: Client, start_origin: StartOrigin) -> None:
    more = asyncio.Event()

    async def script(peer: ServerPeer) -> None:
        await peer.request()
        await peer.send(CHUNKED + b"1\r\na\r\n" * 50)
        await more.wait()
        await peer.send(b"1\r\nb\r\n" * 50 + b"0\r\n\r\n")
        await peer.left()

    server = await start_origin(script)
    got: list[bytes] = []

    def sink(data: bytes) -> None:
        got.append(data)
        more.set()

    async with client.stream(server.origin, "GET", b"/", []) as response:
        await response.relay(sink)
    assert got == [b"a" * 50, b"b" * 50]


async def test_what_a_sink_raises_ends_the_exchange(client: Client, start_origin: StartOrigin) -> None:
    left = asyncio.Event()

    async def script(peer: ServerPeer) -> None:
        await peer.request()
        await peer.send(CHUNKED + b"1\r\na\r\n")
        await peer.left()
        left.set()

    def sink(data: bytes) -> None:
        raise LookupError("full")

    server = await start_origin(script)
    async with client.stream(server.origin, "GET", b"/", []) as response:
        with pytest.raises(LookupError, match="full"):
            await response.relay(sink)
        await left.wait()


async def test_read_is_limited(client: Client, start_origin: StartOrigin) -> None:
    server = await start_origin(raw(OK + b"content-length: 10\r\n\r\n0123456789"))
    async with client.stream(server.origin, "GET", b"/", []) as response:
        assert await response.read(10) == b"0123456789"
    async with client.stream(server.origin, "GET", b"/", []) as response:
        with pytest.raises(BodyTooLarge, match="larger than 9 bytes"):
            await response.read(9)


async def test_a_body_that_nobody_takes_stays_with_the_origin(
    client: Client, start_origin: StartOrigin
) -> None:
    size = 30_000_000
    sent = 0

    async def script(peer: ServerPeer) -> None:
        nonlocal sent
        await peer.request()
        await peer.send(OK + b"content-length: %d\r\n\r\n" % size)
        while sent < size:
            await peer.send(b"a" * 100_000)
            sent += 100_000
        await peer.left()

    server = await start_origin(script)
    async with client.stream(server.origin, "GET", b"/", []) as response:
        await until(lambda: response._full)
        response.expired()  # the idle time-out: it must not count while it is we who do not read
        for _ in range(100):
            await asyncio.sleep(0)
        assert sent < size
        assert len(await response.read(size)) == size


async def test_a_paused_response_does_not_time_out(client: Client, start_origin: StartOrigin) -> None:
    paused = asyncio.Event()

    async def script(peer: ServerPeer) -> None:
        await peer.request()
        await peer.send(CHUNKED + b"1\r\na\r\n")
        await paused.wait()
        await peer.send(b"1\r\nb\r\n0\r\n\r\n")
        await peer.left()

    server = await start_origin(script)
    got: list[bytes] = []
    async with client.stream(server.origin, "GET", b"/", []) as response:

        def sink(data: bytes) -> None:
            got.append(data)
            response.pause()
            paused.set()

        relaying = asyncio.create_task(response.relay(sink))
        await paused.wait()
        response.expired()
        for _ in range(100):
            await asyncio.sleep(0)
        assert got == [b"a"]
        response.resume()
        await relaying
    assert got == [b"a", b"b"]


async def test_time_outs_say_which(client: Client, start_origin: StartOrigin) -> None:
    async def script(peer: ServerPeer) -> None:
        head, _ = await peer.request()
        if head.target == b"/body":
            await peer.send(CHUNKED + b"1\r\na\r\n")
        await peer.left()

    server = await start_origin(script)
    with pytest.raises(HeadTimeout, match=r"http://127\.0\.0\.1:\d+: no response within 0.05 s"):
        async with client.stream(server.origin, "GET", b"/", [], head_timeout=0.05):
            pass
    async with client.stream(server.origin, "GET", b"/body", [], idle_timeout=0.05) as response:
        with pytest.raises(IdleTimeout, match=r"paused for 0\.05 s"):
            await response.read(LIMIT)


async def test_no_connection(client: Client) -> None:
    with socket.socket() as bound:  # and not listening
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectFailed, match=r"http://127\.0\.0\.1:\d+: cannot connect"):
            async with client.stream(Origin(*bound.getsockname()), "GET", b"/", []):
                pass


async def test_connecting_is_limited_in_time(client: Client, start_origin: StartOrigin) -> None:
    server = await start_origin(raw(b""))
    with pytest.raises(ConnectFailed, match="no connection within 0 s"):
        async with client.stream(server.origin, "GET", b"/", [], connect_timeout=0):
            pass


@pytest.mark.parametrize(
    ("method", "target", "headers"),
    [
        ("GET", b"/", [(b"a", b"b\r\nc: d")]),
        ("GET", b"/", [(b"a", b"b\nc: d")]),
        ("GET", b"/", [(b"a\r\nb", b"c")]),
        ("GET", b"/", [(b"a:b", b"c")]),
        ("GET", b"/", [(b"Content-Length", b"3")]),
        ("GET", b"/", [(b"a", b"\0")]),
        ("GET", b"/ HTTP/1.1\r\na: b\r\n", []),
        ("GET", b"/a b", []),
        ("GET", b"", []),
        ("GET /admin HTTP/1.1\r\n", b"/", []),
    ],
)
async def test_nothing_can_be_injected(
    client: Client, method: str, target: bytes, headers: list[tuple[bytes, bytes]]
) -> None:
    with pytest.raises(InvalidHeader):
        client.stream(Origin("127.0.0.1", 1), method, target, headers)


@pytest.mark.parametrize(
    ("url", "origin", "authority"),
    [
        ("http://a:1", Origin("a", 1), "a:1"),
        ("http://a/", Origin("a", 80), "a:80"),
        ("http://[::1]:8000", Origin("::1", 8000), "[::1]:8000"),
    ],
)
def test_origins(url: str, origin: Origin, authority: str) -> None:
    assert Origin.parse(url) == origin
    assert origin.authority == authority
    assert Origin.parse(str(origin)) == origin


@pytest.mark.parametrize(
    "url",
    ["https://a", "a:1", "http://", "http://a/b", "http://u@a", "http://a:x", "http://a?b", "http://a#b"],
)
def test_not_origins(url: str) -> None:
    with pytest.raises(ValueError, match=r"http|port"):
        Origin.parse(url)
