"""The server's parser, without sockets: what it takes, what it refuses, and that splits change nothing."""

import pytest

from tandem.http import Limits, Request

from .messages import REFUSED, TAKEN, parse

CHUNKED = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
SENT_AHEAD = "too-many-sent-ahead"


@pytest.mark.parametrize(("data", "status"), REFUSED.values(), ids=REFUSED.keys())
def test_refuses(data: bytes, status: int) -> None:
    requests, refusal = parse(data)
    assert len(requests) == (128 if data == REFUSED[SENT_AHEAD][0] else 0)
    assert refusal is not None
    assert refusal.status == status


@pytest.mark.parametrize("name", [name for name in REFUSED if name != SENT_AHEAD])
def test_refuses_when_it_comes_byte_by_byte(name: str) -> None:
    data, status = REFUSED[name]
    requests, refusal = parse(data, range(len(data)))
    assert not requests
    assert refusal is not None
    assert refusal.status == status


@pytest.mark.parametrize("data", TAKEN.values(), ids=TAKEN.keys())
def test_takes(data: bytes) -> None:
    requests, refusal = parse(data)
    assert requests
    assert refusal is None
    assert parse(data, range(len(data))) == (requests, None)


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
    for cuts in (range(0), range(len(data) * 2)):
        requests, refusal = parse(data * 2, cuts)
        assert refusal is None
        assert [request.body for request in requests] == [b"abcde", b"abcde"]


def test_requests_before_a_bad_one_are_kept() -> None:
    requests, refusal = parse(b"GET /1 HTTP/1.1\r\nhost: a\r\n\r\nGARBAGE\r\n\r\n")
    assert [request.path for request in requests] == ["/1"]
    assert refusal is not None


@pytest.mark.parametrize("size", [300, 100_000])
@pytest.mark.parametrize("into", range(0, 90, 10))
def test_a_request_sent_ahead_does_not_pay_for_those_before(size: int, into: int) -> None:
    """Reads end where they like: what one brings of the next request may have come behind several, or behind
    the end of a large one."""
    message = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % size + b"a" * size
    limits = Limits(head_bytes=1000, body_bytes=size)
    requests, refusal = parse(message * 5, [len(message) // 2, 4 * len(message) + into], limits)
    assert refusal is None
    assert [len(request.body) for request in requests] == [size] * 5


def test_the_rest_of_a_request_sent_ahead_is_limited_all_the_same() -> None:
    before = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
    requests, refusal = parse(before + CHUNKED + b"1;" + b"x" * 3000, [len(before + CHUNKED)])
    assert [request.method for request in requests] == ["GET"]
    assert refusal is not None
    assert refusal.status == 400


def test_small_chunks_are_not_taken_for_abuse() -> None:
    body = b"1\r\na\r\n" * 900
    assert one(CHUNKED + body + b"0\r\n\r\n").body == b"a" * 900
