"""The server's parser and h11, an independent one, on requests that are valid, damaged, or anything at all.

Smuggling needs two parsers that disagree about where a message ends, or what is in it.
"""

from http import HTTPStatus
from typing import Any

import h11
from hypothesis import given
from hypothesis import strategies as st

from tandem.http import Limits, Request
from tandem.http._wire import encode_fields, encode_request_line

from .messages import CUTS, REFUSED, TAKEN, damaged, examples, parse

ROOMY = Limits()
TOKEN = st.text(alphabet="abcdefgh-XYZ", min_size=1, max_size=8)
VALUE = st.text(alphabet='abc ,;=/"\t\x80ÿ', max_size=12).map(lambda text: text.strip(" \t"))


@st.composite
def valid(draw: st.DrawFn) -> bytes:
    """A request as h11 writes it, with a body of known length, chunked, or none."""
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


KNOWN = st.sampled_from(sorted({*TAKEN.values(), *(data for data, _ in REFUSED.values() if len(data) < 500)}))
DAMAGED = damaged(valid() | KNOWN)

Read = tuple[bytes, bytes, list[tuple[bytes, bytes]], bytes]
"""Method, target, header fields and body."""


def read_by_h11(data: bytes) -> tuple[list[Read], str | None]:
    """The requests in `data` as h11 reads them, up to the first that it cannot read, and why it cannot (None:
    the rest has not come, or the last asked for the connection to be closed)."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    connection.receive_data(data)
    requests: list[Read] = []
    try:
        while isinstance(head := connection.next_event(), h11.Request):
            body = b""
            while isinstance(event := connection.next_event(), h11.Data):
                body += event.data
            if not isinstance(event, h11.EndOfMessage):
                break
            requests.append((head.method, head.target, list(head.headers), body))
            connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
            if connection.our_state is h11.SWITCHED_PROTOCOL:  # by CONNECT
                break
            connection.send(h11.EndOfMessage())
            if connection.our_state is not h11.DONE:
                break
            connection.start_next_cycle()
    except h11.RemoteProtocolError as error:
        return requests, str(error)
    return requests, None


def comparable(read: Read) -> Read:
    """Without what both parsers may change: h11 writes `chunked` in lower case, and ours forgets an upgrade
    that it declines."""
    method, target, headers, body = read
    kept = [(n, v.lower() if n == b"transfer-encoding" else v) for n, v in headers if n != b"upgrade"]
    return method, target, kept, body


def as_h11_would(request: Request) -> Read:
    return comparable((request.method.encode(), request.target, request.headers, request.body))


@examples(200)
@given(st.lists(valid(), min_size=1, max_size=3).map(b"".join), CUTS)
def test_reads_what_h11_reads_however_it_is_split(data: bytes, cuts: list[int]) -> None:
    requests, refusal = parse(data, cuts, ROOMY)
    assert refusal is None
    assert ([as_h11_would(request) for request in requests], None) == read_by_h11(data)


@examples(400)
@given(DAMAGED)
def test_never_reads_a_damaged_request_differently_from_h11(data: bytes) -> None:
    ours, _ = parse(data, limits=ROOMY)
    theirs, error = read_by_h11(data)
    for our, their in zip(ours, theirs, strict=False):
        assert as_h11_would(our) == comparable(their)
    if error is not None and len(ours) > len(theirs):
        # llhttp passes over blank lines before a request and a second space in its first line, and takes RTSP
        # and ICE for HTTP/1.0. In all else h11 is the more lenient.
        assert error.startswith(("no request line", "illegal request line"))


@examples(200)
@given(DAMAGED, CUTS)
def test_splits_change_nothing(data: bytes, cuts: list[int]) -> None:
    ours, refusal = parse(data, limits=ROOMY)
    again, refusal_again = parse(data, cuts, ROOMY)
    assert again == ours
    assert (refusal_again and refusal_again.status) == (refusal and refusal.status)


@examples(200)
@given(DAMAGED)
def test_what_is_taken_is_one_request_when_it_is_sent_on(data: bytes) -> None:
    """Nothing that a client sends can become more than it was on the way to an engine."""
    for request in parse(data, limits=ROOMY)[0]:
        fields = [(n, v) for n, v in request.headers if n not in (b"content-length", b"transfer-encoding")]
        fields.append((b"content-length", b"%d" % len(request.body)))
        line = encode_request_line(request.method, request.target)
        sent = line + encode_fields(fields) + b"\r\n" + request.body
        if not any(name == b"host" for name, _ in fields):
            continue  # of HTTP/1.0; a client of ours sends its own
        read, error = read_by_h11(sent)
        assert error is None
        assert read == [(request.method.encode(), request.target, fields, request.body)]


@examples(200)
@given(st.binary(max_size=300), CUTS)
def test_any_bytes_end_in_requests_or_a_refusal(data: bytes, cuts: list[int]) -> None:
    head = b"POST / HTTP/1.1\r\nhost: a\r\n"
    for prefix in (b"", head, head + b"transfer-encoding: chunked\r\n\r\n"):
        _, refusal = parse(prefix + data, cuts)
        assert refusal is None or isinstance(refusal.status, HTTPStatus)
