"""What browsers are told: who may use the server, in preflights and with every answer."""

import pytest

from tandem.http import Cors, Headers, Request, Responder, with_cors

from .conftest import Answer, ClientPeer, Connect, StartServer

APP = "https://app.example"
ONE = Cors(frozenset({APP, "http://localhost:3000"}), headers=("authorization", "content-type"))
ALL = Cors(frozenset({"*"}))


async def handler(request: Request, respond: Responder) -> None:
    if request.path == "/fails":
        raise LookupError
    if request.path == "/stream":
        respond.start(200, [])
        respond.write(b"a")
        respond.finish()
        return
    respond.send(404 if request.path == "/missing" else 200, [(b"x-seen", request.method.encode())])


async def peer_of(start: StartServer, connect: Connect, cors: Cors) -> ClientPeer:
    return await connect((await start(with_cors(handler, cors))).port)


def told(answer: Answer) -> dict[bytes, bytes]:
    return {n: v for n, v in answer.headers.items() if n.startswith(b"access-control-") or n == b"vary"}


def asking(origin: str, headers: str | None = None) -> dict[str, str]:
    fields = {"origin": origin, "access-control-request-method": "POST"}
    return fields if headers is None else {**fields, "access-control-request-headers": headers}


async def test_a_preflight_is_answered_without_the_handler(start: StartServer, connect: Connect) -> None:
    peer = await peer_of(start, connect, ONE)
    answer = await peer.request("OPTIONS", "/v1/any", asking(APP, "x-other"))
    assert (answer.status, answer.body) == (204, b"")
    assert b"x-seen" not in answer.headers
    assert told(answer) == {
        b"access-control-allow-origin": APP.encode(),
        b"access-control-allow-methods": b"GET, HEAD, POST",
        b"access-control-allow-headers": b"authorization, content-type",
        b"access-control-expose-headers": b"*",
        b"access-control-max-age": b"600",
        b"vary": b"origin",
    }


async def test_pages_may_set_what_they_ask_for_where_no_headers_are_named(
    start: StartServer, connect: Connect
) -> None:
    peer = await peer_of(start, connect, ALL)
    answer = await peer.request(
        "OPTIONS", "/", asking("https://any.example", "authorization, x-stainless-os")
    )
    assert answer.headers[b"access-control-allow-headers"] == b"authorization, x-stainless-os"
    assert answer.headers[b"access-control-allow-origin"] == b"*"
    assert b"vary" not in answer.headers
    assert b"access-control-allow-headers" not in told(
        await peer.request("OPTIONS", "/", asking("https://b"))
    )


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "https://app.example.evil", "http://app.example", "null", "*", APP + "/", ""],
)
async def test_other_pages_are_not_let_in(start: StartServer, connect: Connect, origin: str) -> None:
    peer = await peer_of(start, connect, ONE)
    answer = await peer.request("OPTIONS", "/", asking(origin))
    assert answer.status == 403
    assert told(answer) == {b"vary": b"origin"}
    answer = await peer.request("POST", "/", {"origin": origin})
    assert (answer.status, told(answer)) == (200, {b"vary": b"origin"})


@pytest.mark.parametrize("path", ["/", "/missing", "/stream", "/fails"])
async def test_every_answer_can_be_read_by_a_page_that_may(
    start: StartServer, connect: Connect, path: str
) -> None:
    peer = await peer_of(start, connect, ONE)
    answer = await peer.request("POST", path, {"origin": "http://localhost:3000"})
    assert told(answer) == {
        b"access-control-allow-origin": b"http://localhost:3000",
        b"access-control-expose-headers": b"*",
        b"vary": b"origin",
    }


async def test_what_is_no_preflight_reaches_the_handler(start: StartServer, connect: Connect) -> None:
    peer = await peer_of(start, connect, ONE)
    requests: list[tuple[str, dict[str, str]]] = [
        ("OPTIONS", {}),
        ("OPTIONS", {"origin": APP}),
        ("OPTIONS", {"access-control-request-method": "POST"}),
        ("GET", asking(APP)),
    ]
    for method, headers in requests:
        assert (await peer.request(method, "/", headers)).headers[b"x-seen"] == method.encode()


def test_two_origins_are_none() -> None:
    fields: Headers = [(b"origin", APP.encode()), (b"origin", b"https://evil.example")]
    request = Request("POST", b"/", "/", b"", fields, b"", "1.1", "")
    assert ONE.answer_fields(request) == [(b"vary", b"origin")]
