"""The memory that the bodies of all requests take together is bounded, and nobody can keep others out."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.http import Limits, Request, Responder, Server
from tandem.http._body_room import SMALL_BODY, BodyRoom, Share, room_of
from tandem.http._request_parser import Refusal, RequestParser

from .conftest import Connect, StartServer, until
from .messages import CUTS, examples, split

LARGE = 100_000
HEAD = b"POST /%b HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"


async def echo(request: Request, respond: Responder) -> None:
    respond.send(200, [], b"%d" % len(request.body))


class Held:
    """A handler whose answers to /held wait."""

    def __init__(self) -> None:
        self.running = 0
        self.go_on = asyncio.Event()

    async def __call__(self, request: Request, respond: Responder) -> None:
        self.running += 1
        if request.path == "/held":
            await self.go_on.wait()
        respond.send(200, [], b"%d" % len(request.body))


class Watched(BodyRoom):
    """Remembers the most that it has held."""

    highest = 0

    def take(self, share: Share, size: int) -> bool:
        took = super().take(share, size)
        self.highest = max(self.highest, self.held)
        return took


def held(server: Server, size: int) -> bool:
    return server.bodies.held == size


async def test_a_large_body_waits_for_none_but_is_told_to_come_again(
    start: StartServer, connect: Connect
) -> None:
    handler = Held()
    server = await start(handler, held_bytes=LARGE + 10)
    refused: list[int] = []
    server.refused = refused.append
    first, second, third = [await connect(server.port) for _ in range(3)]
    running = asyncio.create_task(first.request("POST", "/held", body=b"a" * LARGE))
    await until(lambda: handler.running == 1)
    answer = await second.request("POST", "/", body=b"a" * (SMALL_BODY + 1))
    assert (answer.status, answer.headers[b"retry-after"]) == (503, b"1")
    assert answer.headers[b"connection"] == b"close"
    assert b"no room for a large request now; try again" in answer.body
    assert refused == [503]
    for size in (0, 1, SMALL_BODY):  # small ones are served all the time
        assert (await third.request("POST", "/", body=b"a" * size)).body == b"%d" % size
    handler.go_on.set()
    assert (await running).body == b"%d" % LARGE
    assert (await third.request("POST", "/", body=b"a" * LARGE)).status == 200
    await until(lambda: held(server, 0))


async def test_a_length_that_does_not_fit_is_refused_before_the_body_is_sent(
    start: StartServer, connect: Connect
) -> None:
    handler = Held()
    server = await start(handler, held_bytes=LARGE)
    first, second = [await connect(server.port) for _ in range(2)]
    running = asyncio.create_task(first.request("POST", "/held", body=b"a" * LARGE))
    await until(lambda: handler.running == 1)
    head = HEAD % (b"", LARGE)
    await second.send(head.replace(b"\r\nhost", b"\r\nexpect: 100-continue\r\nhost"))
    assert (await second.rest()).startswith(b"HTTP/1.1 503 ")
    handler.go_on.set()
    await running


async def test_what_is_only_announced_takes_no_room(start: StartServer, connect: Connect) -> None:
    server = await start(echo, held_bytes=LARGE)
    for _ in range(20):
        await (await connect(server.port)).send(HEAD % (b"", LARGE))
    peer = await connect(server.port)
    assert (await peer.request("POST", "/", body=b"a" * LARGE)).status == 200


@pytest.mark.parametrize("framing", ["length", "chunks"])
async def test_many_half_sent_bodies_take_no_more_than_there_is(
    start: StartServer, connect: Connect, framing: str
) -> None:
    """All that fits is taken, the rest refused, small requests are served, and all is given back."""
    most, size, count = 2_000_000, 400_000, 100
    server = await start(echo)
    room = server.bodies = Watched(most, 30.0)

    async def half(i: int) -> bytes:
        peer = await connect(server.port)
        half = b"a" * (size // 2)
        data = HEAD % (b"", size) + half if framing == "length" else CHUNKED + b"%x\r\n" % size + half
        for start in range(0, len(data), 20_000):
            try:
                await peer.send(data[start : start + 20_000])
            except ConnectionError:
                break
        try:
            return await peer.reader.read(12)
        except ConnectionError:
            return b""

    halves = [asyncio.create_task(half(i)) for i in range(count)]
    small = await connect(server.port)
    for _ in range(20):
        assert (await small.request("POST", "/", body=b"a" * 1000)).status == 200
    await until(lambda: sum(task.done() for task in halves) >= count - most // (size // 2))
    assert {task.result() for task in halves if task.done()} <= {b"HTTP/1.1 503", b""}
    assert most - size < room.highest <= most
    assert room.held > most // 2
    for task in halves:
        task.cancel()
    small.close()
    await server.close()
    assert room.held == 0


async def test_a_body_that_drips_makes_way(start: StartServer, connect: Connect) -> None:
    now = 0.0
    server = await start(echo)
    server.bodies = BodyRoom(LARGE, 30.0, clock=lambda: now)
    slow, quick, third = [await connect(server.port) for _ in range(3)]
    await slow.send(HEAD % (b"", LARGE) + b"a" * (LARGE - 100))
    await until(lambda: server.bodies.held > SMALL_BODY)
    now = 29.0
    await slow.send(b"a" * 50)
    assert (await quick.request("POST", "/", body=b"a" * LARGE)).status == 503
    now = 30.0
    assert (await third.request("POST", "/", body=b"a" * LARGE)).status == 200
    assert (await slow.rest()).startswith(b"HTTP/1.1 503 ")


async def test_one_that_makes_way_behind_a_running_request_is_told_in_its_turn(
    start: StartServer, connect: Connect
) -> None:
    handler = Held()
    server = await start(handler)
    server.bodies = BodyRoom(LARGE, 0.0)
    slow, quick = [await connect(server.port) for _ in range(2)]
    await slow.send(HEAD % (b"held", 0) + HEAD % (b"", LARGE) + b"a" * (LARGE - 100))
    await until(lambda: server.bodies.held > SMALL_BODY)
    assert (await quick.request("POST", "/", body=b"a" * LARGE)).status == 200
    handler.go_on.set()
    first, second = (await slow.rest()).split(b"\r\n\r\n0")
    assert first.startswith(b"HTTP/1.1 200 ")
    assert second.startswith(b"HTTP/1.1 503 ")
    assert server.bodies.held == 0


@pytest.mark.parametrize("sent", ["half", "whole", "whole and half", "ahead", "damaged"])
@pytest.mark.parametrize("leaves", [True, False], ids=["client leaves", "server closes"])
async def test_room_is_given_back_however_a_connection_ends(
    start: StartServer, connect: Connect, sent: str, leaves: bool
) -> None:
    handler = Held()
    server = await start(handler)
    peer = await connect(server.port)
    whole = HEAD % (b"held", LARGE) + b"a" * LARGE
    data = {
        "half": whole[:-10],
        "whole": whole,
        "whole and half": whole + whole[:-10],
        "ahead": whole * 3,
        "damaged": CHUNKED + b"%x\r\n%b" % (LARGE, b"a" * LARGE) + b"no line end",
    }[sent]
    await peer.send(data)
    if sent == "damaged":
        assert (await peer.rest()).startswith(b"HTTP/1.1 400 ")
    else:
        await until(lambda: server.bodies.held > SMALL_BODY)
    if leaves:
        peer.close()
        handler.go_on.set()  # nothing is read, so nobody seen to leave, while requests wait behind one
        await until(lambda: server.connections == 0)
    else:
        await server.close()
    assert server.bodies.held == 0


def test_only_who_has_been_sending_for_long_makes_way_and_the_first_of_them_first() -> None:
    now = 0.0
    room = BodyRoom(100, 30.0, clock=lambda: now)
    ended: list[int] = []

    def make(number: int) -> Share:
        def make_way() -> None:
            ended.append(number)
            shares[number].give(shares[number].held)
            shares[number].whole()

        return Share(room, make_way)

    shares = [make(i) for i in range(5)]
    assert shares[0].take(40)
    now = 10.0
    assert shares[1].take(40)
    now = 29.0
    assert not shares[2].take(40)
    assert shares[2].take(20)
    now = 30.0
    assert shares[3].take(40)
    assert ended == [0]
    shares[1].whole()  # it is served now
    now = 100.0
    assert not shares[2].take(30), "the slowest is itself"
    assert shares[4].take(30)
    assert ended == [0, 2, 3]
    assert room.held == shares[1].held + shares[4].held == 70


SIZES = st.lists(st.sampled_from([0, 10, SMALL_BODY, SMALL_BODY + 1, LARGE]), min_size=1, max_size=5)
MOST = st.sampled_from([10**6, 250_000])


@examples(100)
@given(sizes=SIZES, chunked=st.booleans(), cuts=CUTS, end=st.integers(0), most=MOST)
def test_a_connection_holds_what_it_was_sent(
    sizes: list[int], chunked: bool, cuts: list[int], end: int, most: int
) -> None:
    def message(size: int) -> bytes:
        body = b"a" * size
        if chunked and size:
            return CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (size, body)
        return HEAD % (b"", size) + body

    data = b"".join(map(message, sizes))
    room = BodyRoom(most, 30.0)
    share = Share(room, lambda: None)
    parser = RequestParser(Limits(), "peer", share)
    refused = None
    try:
        for piece in split(data[: end % (len(data) + 1)], cuts):
            parser.feed(piece)
    except Refusal as refusal:
        refused = refusal
    assert refused is None or (refused.status == 503 and not parser.body_size)
    whole, coming = sum(room_of(request.body) for request in parser.ready), parser.body_size
    assert max(0, coming - SMALL_BODY) <= share.held - whole <= coming
    assert share.held == room.held <= most
    parser.drop_body()
    for request in parser.ready:
        share.give(room_of(request.body))
    assert share.held == room.held == 0
