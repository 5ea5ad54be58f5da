"""The server as its clients see it: framing, keep-alive, errors, time-outs, limits, shutdown."""

import asyncio
import json

import h11
import pytest

from tandem.http import InvalidHeader, Request, Responder

from .conftest import ClientPeer, Connect, StartServer, until

PLAIN = [(b"content-type", b"text/plain")]


async def echo(request: Request, respond: Responder) -> None:
    respond.send(200, PLAIN, request.body)


async def stream(request: Request, respond: Responder) -> None:
    respond.start(200, PLAIN)
    for piece in (b"one", b"", b"two"):
        respond.write(piece)
    respond.finish()


def error_of(body: bytes) -> dict[str, object]:
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "code"}
    return error  # type: ignore[no-any-return]


async def test_one_connection_carries_many_requests(start: StartServer, connect: Connect) -> None:
    server = await start(echo)
    peer = await connect(server.port)
    for body in (b"", b"a", b"b" * 100_000):
        answer = await peer.request("POST", "/", body=body)
        assert (answer.status, answer.body) == (200, body)
    assert server.connections == 1


async def test_chunked_request_body(start: StartServer, connect: Connect) -> None:
    peer = await connect((await start(echo)).port)
    answer = await peer.request("POST", "/", {"transfer-encoding": "chunked"}, b"a" * 5000)
    assert answer.body == b"a" * 5000


async def test_streamed_response_is_chunked_one_chunk_a_write(start: StartServer, connect: Connect) -> None:
    peer = await connect((await start(stream)).port)
    await peer.send(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
    head, _, body = (await peer.rest()).partition(b"\r\n\r\n")
    assert b"\r\ntransfer-encoding: chunked\r\n" in head
    assert body == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"


async def test_http_1_0_bodies_end_with_the_connection(start: StartServer, connect: Connect) -> None:
    peer = await connect((await start(stream)).port)
    await peer.send(b"GET / HTTP/1.0\r\n\r\n")
    head, _, body = (await peer.rest()).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"\r\nconnection: close" in head
    assert body == b"onetwo"


@pytest.mark.parametrize("handler", [echo, stream])
async def test_head_gets_no_body(start: StartServer, connect: Connect, handler: object) -> None:
    server = await start(handler)
    peer = await connect(server.port)
    for _ in range(2):  # a body would be read as the start of the second answer
        answer = await peer.request("HEAD", "/")
        assert (answer.status, answer.body) == (200, b"")


@pytest.mark.parametrize("status", [204, 304])
async def test_bodiless_statuses_have_no_framing(start: StartServer, connect: Connect, status: int) -> None:
    async def handler(request: Request, respond: Responder) -> None:
        if request.path == "/send":
            respond.send(status, [], b"dropped")
        else:
            respond.start(status, [])
            respond.write(b"dropped")
            respond.finish()

    peer = await connect((await start(handler)).port)
    for path in ("/send", "/start"):
        answer = await peer.request("GET", path)
        assert (answer.status, answer.body) == (status, b"")
        assert not answer.headers.keys() & {b"content-length", b"transfer-encoding"}


async def test_an_upstreams_framing_and_hop_by_hop_fields_are_dropped(
    start: StartServer, connect: Connect
) -> None:
    async def handler(request: Request, respond: Responder) -> None:
        upstream = [
            (b"content-length", b"999"),
            (b"connection", b"x-hop, close"),
            (b"x-hop", b"1"),
            (b"keep-alive", b"timeout=5"),
            (b"date", b"yesterday"),
            (b"x-end", b"1"),
        ]
        respond.send(200, upstream, b"abc")

    peer = await connect((await start(handler)).port)
    for _ in range(2):
        answer = await peer.request("GET", "/")
        assert answer.body == b"abc"
        assert answer.headers == {b"date": b"yesterday", b"x-end": b"1", b"content-length": b"3"}


async def test_expect_100_continue(start: StartServer, connect: Connect) -> None:
    peer = await connect((await start(echo)).port)
    await peer.send(b"POST / HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\n")
    assert await peer.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    await peer.send(b"abc")
    peer.h11.send(h11.Request(method="POST", target="/", headers=[("host", "a"), ("content-length", "0")]))
    assert (await peer.answer()).body == b"abc"


async def test_100_continue_waits_for_the_answer_before(start: StartServer, connect: Connect) -> None:
    release = asyncio.Event()

    async def handler(request: Request, respond: Responder) -> None:
        if request.path == "/first":
            respond.start(200, [])
            respond.write(b"first")
            await release.wait()
            respond.finish()
        else:
            respond.send(200, [], request.body)

    peer = await connect((await start(handler)).port)
    await peer.send(b"GET /first HTTP/1.1\r\nhost: a\r\n\r\n")
    await peer.reader.readuntil(b"first\r\n")
    await peer.send(b"POST / HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\n")
    release.set()
    assert (await peer.reader.readuntil(b"0\r\n\r\n")) == b"0\r\n\r\n"
    assert await peer.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"


async def test_pipelined_requests_are_answered_in_order_one_at_a_time(
    start: StartServer, connect: Connect
) -> None:
    running = 0

    async def handler(request: Request, respond: Responder) -> None:
        nonlocal running
        running += 1
        assert running == 1
        respond.start(200, [])
        for _ in range(3):
            await asyncio.sleep(0)
            respond.write(request.target)
        respond.finish()
        running -= 1

    peer = await connect((await start(handler)).port)
    requests = [b"GET /%d HTTP/1.1\r\nhost: a\r\n\r\n" % i for i in range(100)]
    await peer.send(b"".join(requests[:60]))
    await peer.send(b"".join(requests[60:]))
    for i in range(100):
        peer.h11.send(h11.Request(method="GET", target="/", headers=[("host", "a")]))
        peer.h11.send(h11.EndOfMessage())
        assert (await peer.answer()).body == b"/%d" % i * 3
        peer.h11.start_next_cycle()


async def test_a_bad_request_behind_a_good_one_waits_its_turn(start: StartServer, connect: Connect) -> None:
    async def handler(request: Request, respond: Responder) -> None:
        respond.start(200, [])
        await asyncio.sleep(0)
        respond.write(b"good")
        respond.finish()

    peer = await connect((await start(handler)).port)
    await peer.send(b"GET / HTTP/1.1\r\nhost: a\r\n\r\nBAD\r\n\r\n")
    first, second = (await peer.rest()).split(b"0\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 200 ")
    assert second.startswith(b"HTTP/1.1 400 ")


async def refused(peer: ClientPeer, data: bytes) -> tuple[int, str]:
    """Status and message of the error that ends the connection."""
    await peer.send(data)
    head, _, body = (await peer.rest()).partition(b"\r\n\r\n")
    assert b"\r\nconnection: close" in head
    error = error_of(body)
    assert error["code"] == int(head.split()[1])
    return int(head.split()[1]), str(error["message"])


async def test_a_refusal_says_why_and_closes(start: StartServer, connect: Connect) -> None:
    peer = await connect((await start(echo)).port)
    smuggling = (
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    )
    status, message = await refused(peer, smuggling)
    assert status == 400
    assert "Content-Length" in message


async def test_a_client_that_is_still_sending_sees_why_its_body_is_refused(
    start: StartServer, connect: Connect
) -> None:
    """A server that closes with unread input resets the connection, and the answer is lost with it."""
    peer = await connect((await start(echo, body_bytes=1000)).port)
    head = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    status, message = await refused(peer, head + b"100000\r\n" + b"a" * 0x100000)
    assert (status, message) == (413, "request body is larger than 1000 bytes")


async def test_too_many_connections(start: StartServer, connect: Connect) -> None:
    server = await start(echo, connections=2)
    first, second, third = [await connect(server.port) for _ in range(3)]
    assert (await first.request("GET", "/")).status == 200
    assert (await second.request("GET", "/")).status == 200
    assert (await refused(third, b"")) == (503, "too many connections")


async def test_a_flood_of_connections_is_closed_without_a_word_and_leaves_room_when_it_ends(
    start: StartServer, connect: Connect
) -> None:
    server = await start(echo, connections=1)
    refused: list[int] = []
    server.refused = refused.append
    first = await connect(server.port)
    assert (await first.request("GET", "/")).status == 200
    flood = [await connect(server.port) for _ in range(100)]

    async def last_words(peer: ClientPeer) -> bytes:
        try:
            return await peer.rest()
        except ConnectionResetError:
            return b""

    told = await asyncio.gather(*map(last_words, flood))
    assert [b"too many connections" in words for words in told].count(True) == 64
    assert [words for words in told if not words] == [b""] * 36
    assert refused == [503] * 100
    # Those that are still told do not keep others out.
    first.close()
    await until(lambda: server.connections <= 64)
    assert (await (await connect(server.port)).request("GET", "/")).status == 200


@pytest.mark.parametrize(
    ("sent", "answered"),
    [
        (b"", False),
        (b"GET / HTTP/1.1\r\nho", True),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\nabc", True),
    ],
    ids=["nothing", "half a head", "half a body"],
)
async def test_slow_requests_are_ended(
    start: StartServer, connect: Connect, sent: bytes, answered: bool
) -> None:
    peer = await connect((await start(echo, head_timeout=0.05, body_timeout=0.05)).port)
    await peer.send(sent)
    answer = await peer.rest()
    assert answer.startswith(b"HTTP/1.1 408 ") if answered else answer == b""


async def test_dripping_a_head_does_not_earn_time(start: StartServer, connect: Connect) -> None:
    peer = await connect((await start(echo, head_timeout=0.1)).port)

    async def drip() -> None:
        await peer.send(b"GET / HTTP/1.1\r\n")
        while True:
            await peer.send(b"a: b\r\n")
            await asyncio.sleep(0.01)

    dripping = asyncio.create_task(drip())
    answer = await peer.rest()
    dripping.cancel()
    await asyncio.gather(dripping, return_exceptions=True)
    assert answer.startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("framing", ["length", "chunks", "extensions"])
async def test_dripping_a_body_earns_only_the_time_that_its_bytes_are_worth(
    start: StartServer, connect: Connect, framing: str
) -> None:
    peer = await connect((await start(echo, body_timeout=0.2, body_rate=1000.0)).port)
    head = b"content-length: 900000" if framing == "length" else b"transfer-encoding: chunked"

    async def drip() -> None:
        await peer.send(b"POST / HTTP/1.1\r\nhost: a\r\n" + head + b"\r\n\r\n")
        await peer.send(b"1;" if framing == "extensions" else b"")
        while True:
            await peer.send(b"1\r\na\r\n" if framing == "chunks" else b"a")
            await asyncio.sleep(0.02)

    dripping = asyncio.create_task(drip())
    answer = await peer.rest()
    dripping.cancel()
    await asyncio.gather(dripping, return_exceptions=True)
    assert answer.startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("rate", [0.0, 1000.0])
async def test_a_body_that_comes_fast_enough_may_take_longer_than_one_pause(
    start: StartServer, connect: Connect, rate: float
) -> None:
    peer = await connect((await start(echo, body_timeout=1.0, body_rate=rate)).port)
    await peer.send(b"POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 3000\r\n\r\n")
    for _ in range(10):
        await peer.send(b"a" * 300)
        await asyncio.sleep(0.13)
    assert (await peer.rest()).endswith(b"\r\n\r\n" + b"a" * 3000)


async def test_idle_connections_are_closed(start: StartServer, connect: Connect) -> None:
    peer = await connect((await start(echo, keep_alive_timeout=0.05)).port)
    assert (await peer.request("GET", "/")).status == 200
    assert await peer.rest() == b""


async def test_a_failing_handler_is_a_500_and_a_traceback(
    start: StartServer, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(request: Request, respond: Responder) -> None:
        if request.path == "/silent":
            return
        if request.path == "/cancelled":
            raise asyncio.CancelledError
        raise LookupError("the cause")

    peer = await connect((await start(handler)).port)
    for path in ("/raises", "/silent", "/cancelled"):
        answer = await peer.request("GET", path)
        assert answer.status == 500
        assert error_of(answer.body)["type"] == "server_error"
    assert "the cause" in caplog.text
    assert "GET /silent failed" in caplog.text


async def test_a_handler_that_fails_midway_leaves_no_whole_response(
    start: StartServer, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(request: Request, respond: Responder) -> None:
        respond.start(200, [])
        respond.write(b"half")
        raise LookupError("the cause")

    peer = await connect((await start(handler)).port)
    with pytest.raises(h11.RemoteProtocolError, match="incomplete chunked read"):
        await peer.request("GET", "/")
    assert "the cause" in caplog.text


async def test_abort_never_looks_whole(start: StartServer, connect: Connect) -> None:
    async def handler(request: Request, respond: Responder) -> None:
        respond.start(200, [])
        respond.write(b'data: {"error": {}}\n\n')
        respond.abort()

    server = await start(handler)
    peer = await connect(server.port)
    await peer.send(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    assert (await peer.rest()).endswith(b'data: {"error": {}}\n\n\r\n')  # the last words, and no final chunk
    old = await connect(server.port)
    await old.send(b"GET / HTTP/1.0\r\n\r\n")
    with pytest.raises(ConnectionResetError):  # an orderly end would end the body
        await old.rest()


async def test_headers_cannot_be_injected(start: StartServer, connect: Connect) -> None:
    refusals = []

    async def handler(request: Request, respond: Responder) -> None:
        for pair in [(b"a", b"b\r\nc: d"), (b"a\r\nb", b"c"), (b"a", b"b\0"), (b"a b", b"c"), (b"Set", b"c")]:
            try:
                respond.send(200, [pair])
            except InvalidHeader as error:
                refusals.append(str(error))
        assert not respond.started
        respond.send(200, [])

    peer = await connect((await start(handler)).port)
    assert (await peer.request("GET", "/")).status == 200
    assert len(refusals) == 5


async def test_responses_out_of_order_are_programming_errors(start: StartServer, connect: Connect) -> None:
    async def handler(request: Request, respond: Responder) -> None:
        for misuse in (lambda: respond.write(b"a"), respond.finish):
            with pytest.raises(RuntimeError):
                misuse()
        respond.send(200, [], b"abc")
        for misuse in (lambda: respond.write(b"a"), respond.finish, lambda: respond.start(200, [])):
            with pytest.raises(RuntimeError):
                misuse()
        assert (respond.status, respond.bytes_sent, respond.finished) == (200, 3, True)

    peer = await connect((await start(handler)).port)
    assert (await peer.request("GET", "/")).body == b"abc"


async def test_drain_lets_running_requests_finish_and_closes_the_rest(
    start: StartServer, connect: Connect
) -> None:
    running, release = asyncio.Event(), asyncio.Event()

    async def handler(request: Request, respond: Responder) -> None:
        if request.path == "/long":
            running.set()
            await release.wait()
        respond.send(200, [], b"done")

    server = await start(handler)
    fresh, idle, busy = [await connect(server.port) for _ in range(3)]
    await idle.request("GET", "/")
    answer = asyncio.create_task(busy.request("GET", "/long"))
    await running.wait()
    drained = asyncio.create_task(server.drain(60))
    assert await idle.rest() == await fresh.rest() == b""
    with pytest.raises(ConnectionRefusedError):
        await connect(server.port)
    assert not drained.done()
    release.set()
    assert (await answer).headers[b"connection"] == b"close"
    assert await drained


async def test_drain_gives_up_at_its_deadline(start: StartServer, connect: Connect) -> None:
    running, ended = asyncio.Event(), asyncio.Event()

    async def handler(request: Request, respond: Responder) -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    server = await start(handler)
    peer = await connect(server.port)
    await peer.send(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    await running.wait()
    assert not await server.drain(0.05)
    await server.close()
    assert ended.is_set()
    assert server.connections == 0
    assert await peer.rest() == b""
