"""The client's parser and h11, an independent one, on answers that are valid, damaged, or anything at all."""

from typing import Any

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.http import HTTPClientError, UpstreamClosed
from tandem.http._response import Response
from tandem.http._wire import encode_fields, status_line

from .messages import BROKEN, CUTS, LIMITS, WHOLE, damaged, examples, split


class NoConnection:
    """Carries nothing: what comes is the test's."""

    class watchdog:
        @staticmethod
        def set(seconds: float) -> None: ...

        @staticmethod
        def clear() -> None: ...

    def set_reading(self, wanted: bool) -> None: ...

    def close(self) -> None: ...


class Read:
    """What our client makes of the bytes that an origin sends before it closes."""

    def __init__(self, data: bytes, cuts: list[int] | range = range(0), head_bytes: int = 65536) -> None:
        self.response = Response(
            NoConnection(),  # type: ignore[arg-type]
            "o",
            method="GET",
            head_bytes=head_bytes,
            head_timeout=1,
            idle_timeout=1,
        )
        got: list[bytes] = []
        self.response._sink = got.append
        for piece in split(data, cuts):
            if self.response._error is None and not self.response.complete:
                self.response.feed(piece)
        self.response.connection_closed(None)
        self.body = b"".join(got)
        self.whole = self.response.complete and self.response._error is None
        self.error = self.response._error

    def outcome(self) -> tuple[object, ...]:
        r = self.response
        return (r.status, r.headers, self.body, self.whole) if self.whole else (type(self.error),)


@pytest.mark.parametrize("data", WHOLE.values(), ids=WHOLE.keys())
def test_takes_for_whole(data: bytes) -> None:
    read = Read(data)
    assert read.whole
    assert Read(data, range(len(data))).outcome() == read.outcome()


@pytest.mark.parametrize(("data", "error"), BROKEN.values(), ids=BROKEN.keys())
def test_takes_for_broken(data: bytes, error: type[HTTPClientError]) -> None:
    for cuts in (range(0), range(len(data))):
        read = Read(data, cuts, LIMITS.head_bytes)
        assert not read.whole
        assert type(read.error) is error


KNOWN = st.sampled_from(sorted({*WHOLE.values(), *(d for d, _ in BROKEN.values() if len(d) < 500)}))
NAMES = st.sampled_from(["x-a", "x-b", "Server", "Content-Type"])
VALUES = st.text(alphabet='abc ,;=/"\t\x80ÿ', max_size=12).map(
    lambda text: text.strip(" \t").encode("latin-1")
)


@st.composite
def valid(draw: st.DrawFn) -> bytes:
    """An answer as h11 writes it: of known length, chunked, or ended by the connection."""
    connection = h11.Connection(h11.SERVER)
    version = draw(st.sampled_from([b"1.1", b"1.0"]))
    connection.receive_data(b"GET / HTTP/%b\r\nhost: a\r\n\r\n" % version)
    assert isinstance(connection.next_event(), h11.Request)
    connection.next_event()
    headers: list[Any] = draw(st.lists(st.tuples(NAMES, VALUES), max_size=3))
    body = draw(st.lists(st.binary(min_size=1, max_size=50), max_size=4))
    if draw(st.booleans()):
        headers.append(("content-length", str(sum(map(len, body)))))
    data = b""
    if draw(st.booleans()) and version == b"1.1":
        data += connection.send(h11.InformationalResponse(status_code=103, headers=[("link", "a")])) or b""
    status = draw(st.sampled_from([200, 400, 503]))
    data += connection.send(h11.Response(status_code=status, headers=headers)) or b""
    for piece in body:
        data += connection.send(h11.Data(data=piece)) or b""
    return data + (connection.send(h11.EndOfMessage()) or b"")


def read_by_h11(data: bytes) -> tuple[int, list[tuple[bytes, bytes]], bytes] | None:
    """Status, fields and body, where h11 takes the answer for whole."""
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
    connection.send(h11.Request(method="GET", target="/", headers=[("host", "a")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(data)
    if data:
        connection.receive_data(b"")
    try:
        while isinstance(head := connection.next_event(), h11.InformationalResponse):
            pass
        if not isinstance(head, h11.Response):
            return None
        body = b""
        while isinstance(event := connection.next_event(), h11.Data):
            body += event.data
    except h11.RemoteProtocolError:
        return None
    return (head.status_code, list(head.headers), body) if isinstance(event, h11.EndOfMessage) else None


def comparable(status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> tuple[object, ...]:
    """Without what h11 writes in lower case."""
    return status, [(n, v.lower() if n == b"transfer-encoding" else v) for n, v in headers], body


@examples(200)
@given(valid(), CUTS)
def test_reads_what_h11_reads_however_it_is_split(data: bytes, cuts: list[int]) -> None:
    read = Read(data, cuts)
    assert read.whole
    theirs = read_by_h11(data)
    assert theirs is not None
    assert comparable(read.response.status, read.response.headers, read.body) == comparable(*theirs)


@examples(250)
@given(damaged(valid() | KNOWN))
def test_never_reads_a_damaged_answer_differently_from_h11(data: bytes) -> None:
    read, theirs = Read(data), read_by_h11(data)
    if read.whole and theirs is not None:
        assert comparable(read.response.status, read.response.headers, read.body) == comparable(*theirs)


@examples(150)
@given(damaged(valid() | KNOWN), CUTS)
def test_splits_change_nothing(data: bytes, cuts: list[int]) -> None:
    assert Read(data, cuts).outcome() == Read(data).outcome()


@examples(150)
@given(damaged(valid() | KNOWN))
def test_what_is_taken_can_be_relayed(data: bytes) -> None:
    """An engine cannot make more of its answer than one on the way to a client."""
    read = Read(data)
    if read.whole:
        head = status_line(read.response.status) + encode_fields(read.response.headers)
        assert head.count(b"\n") == 1 + len(read.response.headers)


@examples(150)
@given(st.binary(max_size=300), CUTS)
def test_any_bytes_end_in_an_answer_or_an_error(data: bytes, cuts: list[int]) -> None:
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    for prefix in (b"", b"HTTP/1.1 200 OK\r\n", chunked):
        read = Read(prefix + data, cuts)
        assert read.whole or isinstance(read.error, HTTPClientError)
        if isinstance(read.error, UpstreamClosed):
            assert read.error.before_first_byte == (not prefix + data)
