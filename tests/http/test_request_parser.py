"""The server's parser, without sockets: what it takes, what it refuses, and that splits change nothing."""

from http import HTTPStatus
from itertools import pairwise
from typing import Any

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.http import Limits, Request
from tandem.http._request_parser import Refusal, RequestParser

LIMITS = Limits(head_bytes=2000, body_bytes=1000)

CHUNKED = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"

# Requests that two parsers could read differently, or that this server declines.
REFUSED = {
    "two lengths": (
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nabcde",
        400,
    ),
    "the same length twice": (
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ncontent-length: 5\r\n\r\nabcde",
        400,
    ),
    "list of lengths": (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5, 5\r\n\r\nabcde", 400),
    "signed length": (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: +5\r\n\r\nabcde", 400),
    "empty length": (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length:\r\n\r\nabcde", 400),
    "length, then chunked": (
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    "chunked, then length": (
        b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
        400,
    ),
    "chunked twice": (
        b"POST / HTTP/1.1\r\nhost: a\r\n" + b"transfer-encoding: chunked\r\n" * 2 + b"\r\n0\r\n\r\n",
        400,
    ),
    "chunked not last": (
        b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        400,
    ),
    "other coding": (
        b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        501,
    ),
    "hidden coding": (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: xchunked\r\n\r\n0\r\n\r\n", 501),
    "vertical tab before coding": (
        b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    "chunked in HTTP/1.0": (b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "space before colon": (
        b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding : chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    "bare LF": (b"GET / HTTP/1.1\nhost: a\n\n", 400),
    "bare LF after a field": (b"GET / HTTP/1.1\r\nhost: a\nb: c\r\n\r\n", 400),
    "bare CR in a value": (b"GET / HTTP/1.1\r\nhost: a\r\nb: c\rd\r\n\r\n", 400),
    "NUL in a value": (b"GET / HTTP/1.1\r\nhost: a\r\nb: c\0d\r\n\r\n", 400),
    "obs-fold": (b"GET / HTTP/1.1\r\nhost: a\r\nb: c\r\n d\r\n\r\n", 400),
    "space in a name": (b"GET / HTTP/1.1\r\nhost: a\r\nb c: d\r\n\r\n", 400),
    "no name": (b"GET / HTTP/1.1\r\nhost: a\r\n: d\r\n\r\n", 400),
    "bare LF in chunk framing": (CHUNKED + b"1\na\n0\n\n", 400),
    "chunk longer than told": (CHUNKED + b"1\r\nab\r\n0\r\n\r\n", 400),
    "chunk size overflow": (CHUNKED + b"10000000000000001\r\na\r\n0\r\n\r\n", 400),
    "signed chunk size": (CHUNKED + b"-1\r\na\r\n0\r\n\r\n", 400),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "two hosts": (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400),
    "fragment": (b"GET /a#b HTTP/1.1\r\nhost: a\r\n\r\n", 400),
    "bytes beyond ASCII in the target": (b"GET /\xff HTTP/1.1\r\nhost: a\r\n\r\n", 400),
    "path that is not UTF-8": (b"GET /%ff HTTP/1.1\r\nhost: a\r\n\r\n", 400),
    "foreign scheme": (b"GET ftp://a/b HTTP/1.1\r\nhost: a\r\n\r\n", 400),
    "unknown method": (b"BREW / HTTP/1.1\r\nhost: a\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "HTTP/2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "HTTP/2.0": (b"GET / HTTP/2.0\r\nhost: a\r\n\r\n", 505),
    "HTTP/0.9": (b"GET / HTTP/0.9\r\nhost: a\r\n\r\n", 505),
    "CONNECT": (b"CONNECT a:80 HTTP/1.1\r\nhost: a\r\n\r\n", 501),
    "unknown expectation": (b"POST / HTTP/1.1\r\nhost: a\r\nexpect: tea\r\ncontent-length: 1\r\n\r\na", 417),
    "large head": (b"GET / HTTP/1.1\r\nhost: a\r\nb: " + b"c" * 2000 + b"\r\n\r\n", 431),
    "large target": (b"GET /" + b"a" * 2000 + b" HTTP/1.1\r\nhost: a\r\n\r\n", 431),
    "endless head": (b"GET / HTTP/1.1\r\nhost: a\r\nb: " + b"c" * 2000, 431),
    "many fields": (b"GET / HTTP/1.1\r\nhost: a\r\n" + b"b:\r\n" * 500 + b"\r\n", 431),
    "large body told": (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1001\r\n\r\n", 413),
    "large body sent": (CHUNKED + b"1f4\r\n" + b"a" * 500 + b"\r\n1f5\r\n" + b"a" * 501 + b"\r\n", 413),
    "chunk extension without end": (CHUNKED + b"1;" + b"a" * 2000, 400),
    "chunk extensions beyond measure": (CHUNKED + (b"1;" + b"a" * 500 + b"\r\na\r\n") * 9, 400),
    "trailers without end": (CHUNKED + b"0\r\n" + b"a: b\r\n" * 400, 400),
    "too many sent ahead": (b"GET / HTTP/1.1\r\nhost: a\r\n\r\n" * 129, 400),
}


def parse(data: bytes, *cuts: int, limits: Limits = LIMITS) -> tuple[list[Request], Refusal | None]:
    """Feed `data`, cut at `cuts`; the requests, and the refusal that ended it."""
    parser = RequestParser(limits, "peer")
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    try:
        for start, end in pairwise(edges):
            parser.feed(data[start:end])
    except Refusal as refusal:
        return list(parser.ready), refusal
    return list(parser.ready), None


@pytest.mark.parametrize(("data", "status"), REFUSED.values(), ids=REFUSED.keys())
def test_refuses(data: bytes, status: int) -> None:
    _, refusal = parse(data)
    assert refusal is not None
    assert refusal.status == status


@pytest.mark.parametrize("name", [name for name in REFUSED if name != "too many sent ahead"])
def test_refuses_when_it_comes_byte_by_byte(name: str) -> None:
    data, status = REFUSED[name]
    requests, refusal = parse(data, *range(len(data)))
    assert not requests
    assert refusal is not None
    assert refusal.status == status


def one(data: bytes) -> Request:
    requests, refusal = parse(data)
    assert refusal is None
    (request,) = requests
    return request


def test_reads_a_request() -> None:
    request = one(b"POST /v1/a%20b?x=%31&y HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nX-Y:  z \r\n\r\nabc")
    assert request == Request(
        method="POST",
        target=b"/v1/a%20b?x=%31&y",
        path="/v1/a b",
        query=b"x=%31&y",
        headers=[(b"host", b"a"), (b"content-length", b"3"), (b"x-y", b"z")],
        body=b"abc",
        http_version="1.1",
        client="peer",
        keep_alive=True,
    )


def test_joins_chunks_and_leaves_trailers_out() -> None:
    request = one(CHUNKED + b"1;name=value\r\na\r\n2\r\nbc\r\n0\r\nx-late: 1\r\n\r\n")
    assert request.body == b"abc"
    assert request.header(b"x-late") is None


def test_a_repeated_field_is_seen_as_one_list() -> None:
    request = one(b"GET / HTTP/1.1\r\nhost: a\r\nauthorization: x\r\nAuthorization: y\r\n\r\n")
    assert request.header(b"authorization") == b"x, y"
    assert request.header(b"cookie") is None


@pytest.mark.parametrize(
    ("target", "path"), [(b"http://a:1/b?c", "/b"), (b"HTTPS://a", "/"), (b"*", "*"), (b"/%e2%82%ac", "/€")]
)
def test_forms_of_the_target(target: bytes, path: str) -> None:
    assert one(b"OPTIONS " + target + b" HTTP/1.1\r\nhost: a\r\n\r\n").path == path


@pytest.mark.parametrize(
    ("head", "kept"),
    [
        (b"GET / HTTP/1.1\r\nhost: a", True),
        (b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close", False),
        (b"GET / HTTP/1.0", False),
        (b"GET / HTTP/1.0\r\nconnection: keep-alive", False),
    ],
)
def test_what_follows_a_last_request_is_ignored(head: bytes, kept: bool) -> None:
    requests, refusal = parse(head + b"\r\n\r\n" + b"GET /2 HTTP/1.1\r\nhost: a\r\n\r\n")
    assert refusal is None
    assert [request.keep_alive for request in requests] == ([True, True] if kept else [False])


@pytest.mark.parametrize(
    ("framing", "body"),
    [
        (b"content-length: 5\r\n", b"abcde"),
        (b"transfer-encoding: chunked\r\n", b"5\r\nabcde\r\n0\r\n\r\n"),
    ],
)
def test_declines_an_upgrade_without_losing_the_body(framing: bytes, body: bytes) -> None:
    """Java's client offers HTTP/2 with its first request; llhttp then leaves the body to whoever upgrades."""
    offer = b"connection: upgrade, http2-settings\r\nhttp2-settings: AAMAA\r\nupgrade: h2c\r\n"
    data = b"POST /a HTTP/1.1\r\nhost: a\r\n" + offer + framing + b"\r\n" + body
    for cuts in ((), range(len(data) * 2)):
        requests, refusal = parse(data * 2, *cuts)
        assert refusal is None
        assert [request.body for request in requests] == [b"abcde", b"abcde"]


def test_requests_before_a_bad_one_are_kept() -> None:
    requests, refusal = parse(b"GET /1 HTTP/1.1\r\nhost: a\r\n\r\nGARBAGE\r\n\r\n")
    assert [request.path for request in requests] == ["/1"]
    assert refusal is not None


def test_small_chunks_are_not_taken_for_abuse() -> None:
    body = b"1\r\na\r\n" * 900
    assert one(CHUNKED + body + b"0\r\n\r\n").body == b"a" * 900


TOKEN = st.text(alphabet="abcdefgh-XYZ", min_size=1, max_size=8)
VALUE = st.text(alphabet='abc ,;=/"\t\x80ÿ', max_size=12).map(lambda text: text.strip(" \t"))


@st.composite
def request_bytes(draw: st.DrawFn) -> bytes:
    """A valid request as h11 writes it, with a body of known length, chunked, or none."""
    names = st.lists(st.tuples(TOKEN.map(lambda name: "x-" + name), VALUE.map(lambda v: v.encode("latin-1"))))
    headers: list[Any] = [("host", "a"), *draw(names)]
    body = draw(st.lists(st.binary(min_size=1, max_size=50), max_size=4))
    framing = draw(st.sampled_from(["length", "chunked"])) if body else "none"
    if framing == "length":
        headers.append(("content-length", str(sum(map(len, body)))))
    elif framing == "chunked":
        headers.append(("transfer-encoding", "chunked"))
    connection = h11.Connection(h11.CLIENT)
    target = draw(st.sampled_from(["/", "/v1/completions", "/a%2fb?c=d", "/?"]))
    method = draw(st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"]))
    data = connection.send(h11.Request(method=method, target=target, headers=headers)) or b""
    for piece in body:
        data += connection.send(h11.Data(data=piece)) or b""
    return data + (connection.send(h11.EndOfMessage()) or b"")


def read_by_h11(data: bytes) -> list[tuple[bytes, bytes, list[tuple[bytes, bytes]], bytes]]:
    """The requests in `data` as h11 reads them, up to the first it cannot read whole."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    connection.receive_data(data)
    requests = []
    try:
        while isinstance(head := connection.next_event(), h11.Request):
            body = b""
            while isinstance(event := connection.next_event(), h11.Data):
                body += event.data
            if not isinstance(event, h11.EndOfMessage):
                break
            requests.append((head.method, head.target, list(head.headers), body))
            connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
            connection.send(h11.EndOfMessage())
            connection.start_next_cycle()
    except (h11.RemoteProtocolError, h11.LocalProtocolError):
        pass
    return requests


def as_h11_would(request: Request) -> tuple[bytes, bytes, list[tuple[bytes, bytes]], bytes]:
    return request.method.encode(), request.target, request.headers, request.body


@settings(max_examples=200, deadline=None)
@given(st.lists(request_bytes(), min_size=1, max_size=3).map(b"".join), st.lists(st.integers(0), max_size=8))
def test_reads_what_h11_reads_however_it_is_split(data: bytes, cuts: list[int]) -> None:
    requests, refusal = parse(data, *cuts, limits=Limits())
    assert refusal is None
    assert [as_h11_would(request) for request in requests] == read_by_h11(data)


@settings(max_examples=400, deadline=None)
@given(
    request_bytes(),
    request_bytes(),
    st.integers(0),
    st.integers(0, 3),
    st.sampled_from(
        [b"", b"\r", b"\n", b"\r\n", b"\0", b" ", b":", b"0", b"\x0b", b"\r\n\r\n", b"chunked", b","]
    ),
)
def test_never_reads_a_damaged_request_differently_from_h11(
    first: bytes, second: bytes, at: int, removed: int, inserted: bytes
) -> None:
    """Smuggling needs two parsers that disagree about where a message ends. What both take must be equal."""
    at %= len(first) + 1
    data = first[:at] + inserted + first[at + removed :] + second
    ours, _ = parse(data, limits=Limits())
    theirs = read_by_h11(data)
    for our, their in zip(ours, theirs, strict=False):
        assert as_h11_would(our)[3] == their[3]
        assert our.method.encode() == their[0]


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300), st.lists(st.integers(0), max_size=4))
def test_any_bytes_end_in_requests_or_a_refusal(data: bytes, cuts: list[int]) -> None:
    for prefix in (b"", b"POST / HTTP/1.1\r\nhost: a\r\n", CHUNKED):
        _, refusal = parse(prefix + data, *cuts)
        assert refusal is None or isinstance(refusal.status, HTTPStatus)
