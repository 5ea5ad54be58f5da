"""TLS without sockets: whatever comes over the wire, who is on top gets what its peer sent, or an end."""

import asyncio
import ssl
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.http import TlsFiles
from tandem.http._tls_connection import TlsConnection

from .certificates import Authority
from .messages import CUTS, examples, split

HOST = "router.test"


class Wire(asyncio.Transport):
    """Stands for the socket's transport: what was written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closed
        self.written += data

    def take(self) -> bytes:
        taken, self.written = bytes(self.written), bytearray()
        return taken

    def write_eof(self) -> None: ...

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


class Top(asyncio.Protocol):
    """Stands for the connection on top."""

    def __init__(self) -> None:
        self.received = b""
        self.ended = False

    def data_received(self, data: bytes) -> None:
        assert data
        assert not self.ended
        self.received += data

    def eof_received(self) -> None:
        self.ended = True


class Peers:
    """Our side of a connection, and a client that OpenSSL alone plays."""

    def __init__(self, ours: ssl.SSLContext, theirs: ssl.SSLContext) -> None:
        self.wire, self.top = Wire(), Top()
        self.connection = TlsConnection(ours, self.top)
        self.connection.connection_made(self.wire)
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.client = theirs.wrap_bio(self._in, self._out, server_hostname=HOST)

    def step(self, call: Any, *given: Any) -> Any:
        """Something that the client does; None where it has to wait for us."""
        self._in.write(self.wire.take())
        try:
            return call(*given)
        except ssl.SSLWantReadError:
            return None

    def sent(self) -> bytes:
        """What the client has put on the wire since the last time."""
        return self._out.read()

    def shake_hands(self) -> None:
        for _ in range(3):
            self.step(self.client.do_handshake)
            if hello := self.sent():
                self.connection.data_received(hello)
        assert self.client.version()

    def read(self) -> bytes:
        """All that the client can read now."""
        received = b""
        while piece := self.step(self.client.read, 1 << 20):
            received += piece
        return received


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    authority = Authority("an authority")
    folder: Path = tmp_path_factory.mktemp("tls")
    return TlsFiles(*authority.sign(HOST).write(folder, "server")).context(), authority.client()


Contexts = tuple[ssl.SSLContext, ssl.SSLContext]


@examples(40)
@given(pieces=st.lists(st.binary(min_size=1, max_size=40_000), max_size=4), cuts=CUTS)
def test_what_is_sent_arrives_however_it_is_cut(
    contexts: Contexts, pieces: list[bytes], cuts: list[int]
) -> None:
    peers = Peers(*contexts)
    peers.shake_hands()
    for piece in pieces:
        peers.client.write(piece)
    for part in split(peers.sent(), cuts):
        peers.connection.data_received(part)
    assert peers.top.received == b"".join(pieces)
    for piece in pieces:
        peers.connection.write(piece)
    assert peers.read() == b"".join(pieces)
    assert not peers.wire.closed


@examples(100)
@given(
    pieces=st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=4),
    at=st.integers(0),
    put=st.binary(max_size=5),
    gone=st.integers(0, 20),
    cuts=CUTS,
)
def test_what_is_damaged_on_the_way_is_an_end_and_never_other_bytes(
    contexts: Contexts, pieces: list[bytes], at: int, put: bytes, gone: int, cuts: list[int]
) -> None:
    peers = Peers(*contexts)
    peers.shake_hands()
    for piece in pieces:
        peers.client.write(piece)
    sent = peers.sent()
    at %= len(sent)
    damaged = sent[:at] + put + sent[at + gone :]
    for part in split(damaged, cuts):
        if not peers.wire.closed:
            peers.connection.data_received(part)
    assert b"".join(pieces).startswith(peers.top.received)
    if damaged == sent:
        assert peers.top.received == b"".join(pieces)


@examples(200)
@given(data=st.binary(max_size=300), hello=st.booleans(), at=st.integers(0), cuts=CUTS)
def test_anything_instead_of_a_handshake_reaches_nobody(
    contexts: Contexts, data: bytes, hello: bool, at: int, cuts: list[int]
) -> None:
    peers = Peers(*contexts)
    peers.connection.write(b"not to be seen before the handshake")
    if hello:
        peers.step(peers.client.do_handshake)
        first = peers.sent()
        at %= len(first)
        data = first[:at] + data + first[at:]
    for part in split(data, cuts):
        if not peers.wire.closed:
            peers.connection.data_received(part)
    assert peers.top.received == b""
    assert b"not to be seen" not in peers.wire.written


@pytest.mark.parametrize("ends", [False, True])
def test_what_is_written_before_the_handshake_is_done_goes_out_after_it(
    contexts: Contexts, ends: bool
) -> None:
    peers = Peers(*contexts)
    peers.connection.write(b"early")
    if ends:
        peers.connection.write_eof()
    peers.shake_hands()
    assert peers.read() == b"early"
    peers.connection.write(b"late")
    assert peers.read() == (b"" if ends else b"late")


def test_the_rest_of_an_answer_is_not_written_to_a_socket_that_has_failed(contexts: Contexts) -> None:
    """The event loops warn of each such write."""
    peers = Peers(*contexts)
    peers.shake_hands()
    write, written = peers.wire.write, []

    def fails(data: bytes | bytearray | memoryview) -> None:
        write(data)
        written.append(len(data))
        peers.wire.close()

    peers.wire.write = fails  # type: ignore[method-assign]
    peers.connection.write(b"x" * 3_000_000)
    assert len(written) == 1


def test_each_end_is_told_of_the_others(contexts: Contexts) -> None:
    peers = Peers(*contexts)
    peers.shake_hands()
    peers.client.write(b"last")
    peers.step(peers.client.unwrap)
    peers.connection.data_received(peers.sent())
    assert (peers.top.received, peers.top.ended, peers.wire.closed) == (b"last", True, True)
    peers.step(peers.client.unwrap)  # would raise without our own close_notify


def test_what_cannot_be_read_is_an_end_at_once(contexts: Contexts) -> None:
    """The socket's closes only when the peer has taken all that it was sent, which it may never do."""
    peers = Peers(*contexts)
    peers.shake_hands()
    peers.client.write(b"damaged")
    sent = peers.sent()
    peers.connection.data_received(sent[:-1] + bytes([sent[-1] ^ 1]))
    assert (peers.top.received, peers.top.ended, peers.wire.closed) == (b"", True, True)


def test_nothing_is_sent_or_heard_behind_the_end(contexts: Contexts) -> None:
    peers = Peers(*contexts)
    peers.shake_hands()
    peers.connection.write_eof()
    peers.connection.write_eof()
    peers.connection.write(b"behind")
    assert peers.read() == b""
    peers.client.write(b"still sending")
    peers.connection.data_received(peers.sent())
    assert peers.top.received == b""
    peers.connection.close()
    assert peers.wire.closed
