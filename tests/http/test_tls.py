"""The server over TLS: what it speaks, whom it lets in, who is slow or leaves, files that are replaced."""

import asyncio
import json
import os
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tandem.http import BadTls, Handler, Limits, Request, Responder, Server, Tls, TlsFiles, serve

from .certificates import Authority, Pair
from .conftest import ClientPeer, Connect, until

HOST = "router.test"
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority("an authority")


@pytest.fixture(scope="module")
def pair(authority: Authority) -> Pair:
    return authority.sign(HOST)


@pytest.fixture
def files(tmp_path: Path, pair: Pair) -> TlsFiles:
    return TlsFiles(*pair.write(tmp_path, "server"))


Start = Callable[..., Awaitable[Server]]
Open = Callable[..., Awaitable[ClientPeer]]


@pytest.fixture
async def start(files: TlsFiles) -> AsyncIterator[Start]:
    """Start our server with a handler, limits, and perhaps other files."""
    servers: list[Server] = []

    async def start(handler: Handler, tls: Tls | None = None, **limits: Any) -> Server:
        servers.append(await serve(handler, "127.0.0.1", 0, limits=Limits(**limits), tls=tls or Tls(files)))
        return servers[-1]

    yield start
    for server in servers:
        await server.close()


@pytest.fixture
async def secure(authority: Authority) -> AsyncIterator[Open]:
    """Open a client's end that speaks TLS."""
    peers: list[ClientPeer] = []

    async def secure(port: int, context: ssl.SSLContext | None = None) -> ClientPeer:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=context or authority.client(), server_hostname=HOST
        )
        peers.append(ClientPeer(reader, writer))
        return peers[-1]

    yield secure
    for peer in peers:
        peer.writer.transport.abort()


async def echo(request: Request, respond: Responder) -> None:
    respond.send(200, [], request.body)


def served(peer: ClientPeer) -> bytes:
    """The certificate that the server showed."""
    shown = peer.writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    assert isinstance(shown, bytes)
    return shown


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_one_connection_carries_many_requests(
    start: Start, secure: Open, authority: Authority, version: ssl.TLSVersion
) -> None:
    server = await start(echo)
    context = authority.client()
    context.minimum_version = context.maximum_version = version
    context.set_alpn_protocols(["h2", "http/1.1"])
    peer = await secure(server.port, context)
    spoken = peer.writer.get_extra_info("ssl_object")
    assert spoken.selected_alpn_protocol() == "http/1.1"
    for body in (b"", b"a", b"b" * 3_000_000):
        assert (await peer.request("POST", "/", body=body)).body == body
    assert server.connections == 1


async def test_older_versions_are_not_spoken(start: Start, secure: Open, authority: Authority) -> None:
    server = await start(echo)
    context = authority.client()
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await secure(server.port, context)
    await until(lambda: server.connections == 0)


async def test_a_client_that_speaks_no_tls_gets_nothing(start: Start, connect: Connect) -> None:
    server = await start(echo)
    peer = await connect(server.port)
    await peer.send(GET)
    with suppress(ConnectionError):
        assert b"HTTP" not in await peer.rest()
    await until(lambda: server.connections == 0)


async def test_who_dawdles_over_the_handshake_is_counted_and_ended(start: Start, connect: Connect) -> None:
    server = await start(echo, head_timeout=0.1)
    peer = await connect(server.port)
    await until(lambda: server.connections == 1)
    await peer.send(b"\x16\x03\x01")
    assert await peer.rest() == b""
    await until(lambda: server.connections == 0)


async def test_too_many_connections_are_told_so(start: Start, secure: Open, connect: Connect) -> None:
    server = await start(echo, connections=1)
    await connect(server.port)  # which does not even begin a handshake
    await until(lambda: server.connections == 1)
    peer = await secure(server.port)
    answer = await peer.rest()
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"too many connections" in answer


async def test_a_client_that_is_still_sending_sees_why_its_body_is_refused(
    start: Start, secure: Open
) -> None:
    peer = await secure((await start(echo, body_bytes=1000)).port)
    head = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    await peer.send(head + b"100000\r\n" + b"a" * 0x100000)
    answer = await peer.rest()
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == 413


async def test_a_client_that_leaves_cancels_its_request(start: Start, secure: Open) -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def handler(request: Request, respond: Responder) -> None:
        respond.start(200, [])
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    server = await start(handler)
    for leave in (lambda peer: peer.writer.close(), lambda peer: peer.writer.transport.abort()):
        begun.clear()
        cancelled.clear()
        peer = await secure(server.port)
        await peer.send(GET)
        await begun.wait()
        leave(peer)
        await cancelled.wait()
    assert await server.drain(60)


async def test_an_answer_is_whole_however_slowly_it_is_read_and_then_the_connection_ends(
    start: Start, authority: Authority
) -> None:
    size = 8_000_000
    answered = threading.Event()

    async def handler(request: Request, respond: Responder) -> None:
        respond.send(200, [], b"a" * size)
        asyncio.get_running_loop().call_later(0.05, answered.set)  # our end is closed by then

    server = await start(handler)

    def read() -> bytes:
        received = b""
        with (
            socket.create_connection(("127.0.0.1", server.port)) as plain,
            authority.client().wrap_socket(plain, server_hostname=HOST, suppress_ragged_eofs=False) as peer,
        ):
            peer.sendall(GET.replace(b"host", b"connection: close\r\nhost"))
            answered.wait()
            while piece := peer.recv(1 << 16):
                received += piece
        return received

    answer = await asyncio.to_thread(read)
    assert len(answer.partition(b"\r\n\r\n")[2]) == size
    await until(lambda: server.connections == 0)


async def test_a_slow_reader_pauses_its_source_and_nobody_elses(start: Start, secure: Open) -> None:
    total, piece = 64_000_000, b"a" * 100_000
    sent = 0

    async def handler(request: Request, respond: Responder) -> None:
        nonlocal sent
        if request.path == "/short":
            respond.send(200, [], b"short")
            return
        respond.start(200, [])
        while sent < total:
            respond.write(piece)
            sent += len(piece)
            await respond.drained()
        respond.finish()

    server = await start(handler)
    slow = await secure(server.port)
    slow.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await slow.send(GET)
    seen = [-1]
    while sent == 0 or seen[-20:] != [sent] * 20:
        seen.append(sent)
        await asyncio.sleep(0.01)
    assert sent < total
    other = await secure(server.port)
    assert (await other.request("GET", "/short")).body == b"short"
    slow.writer.transport.resume_reading()  # type: ignore[attr-defined]
    received = 0
    while not (some := await slow.reader.read(1 << 20)).endswith(b"0\r\n\r\n"):
        received += len(some)
    assert received + len(some) > total


async def test_a_peer_that_makes_tls_answer_and_reads_none_of_it_is_not_heard(start: Start) -> None:
    """As with key updates without end: what is to be sent to it must not pile up."""
    server = await start(echo)
    reading: list[bool] = []

    class Socket(asyncio.Transport):
        def pause_reading(self) -> None:
            reading.append(False)

        def resume_reading(self) -> None:
            reading.append(True)

        def is_closing(self) -> bool:
            return False

        def get_extra_info(self, name: str, default: Any = None) -> Any:
            return default

        def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

        def get_write_buffer_size(self) -> int:
            return 1

        def abort(self) -> None: ...

    connection = server._connection()
    connection.connection_made(Socket())
    connection.pause_writing()
    assert reading == [False]
    connection.resume_writing()
    assert reading == [False, True]
    connection.connection_lost(None)


@pytest.mark.parametrize("stalled", [False, True])
async def test_drain_does_not_wait_for_idle_clients_to_say_good_bye(
    start: Start, secure: Open, connect: Connect, stalled: bool
) -> None:
    server = await start(echo)
    if stalled:
        await connect(server.port)
        await until(lambda: server.connections == 1)
    else:
        peer = await secure(server.port)
        assert (await peer.request("GET", "/")).status == 200
        peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
    assert await server.drain(60)
    assert server.connections == 0


async def test_clients_need_a_certificate_where_an_authority_is_given(
    start: Start, secure: Open, authority: Authority, tmp_path: Path, files: TlsFiles
) -> None:
    theirs, strangers = Authority("of clients"), Authority("of strangers")
    ca = tmp_path / "ca.crt"
    ca.write_bytes(theirs.own.pem)
    server = await start(echo, Tls(TlsFiles(files.certificate, files.key, str(ca))))
    known = await secure(server.port, authority.client(tmp_path, theirs.sign("a client")))
    assert (await known.request("GET", "/")).status == 200

    async def ask(pair: Pair | None) -> None:
        # With TLS 1.3 a client hears only after its own handshake that it is not let in.
        peer = await secure(server.port, authority.client(tmp_path, pair))
        await peer.send(GET)
        if not await peer.rest():
            raise EOFError

    for pair in (None, strangers.sign("a client")):
        with pytest.raises((ssl.SSLError, ConnectionError, EOFError)):
            await ask(pair)
    await until(lambda: server.connections == 1)


# Files that are replaced


def replace(pair: Pair, files: TlsFiles) -> None:
    """As Kubernetes and certificate managers do: new files in the place of the old."""
    for path, content in ((files.certificate, pair.pem), (files.key, pair.key_pem())):
        Path(path + ".new").write_bytes(content)
        os.replace(path + ".new", path)


def settled(tls: Tls) -> bool:
    """Look twice: a change counts when it stands still."""
    return tls.renew() or tls.renew()


async def test_new_connections_get_the_new_certificate_and_the_open_ones_live_on(
    start: Start, secure: Open, files: TlsFiles, pair: Pair, authority: Authority
) -> None:
    tls = Tls(files)
    server = await start(echo, tls)
    old = await secure(server.port)
    assert served(old) == pair.der
    assert not settled(tls)
    new_pair = authority.sign(HOST)
    replace(new_pair, files)
    assert settled(tls)
    assert not settled(tls)
    new = await secure(server.port)
    assert served(new) == new_pair.der
    for peer in (old, new):
        assert (await peer.request("POST", "/", body=b"on")).body == b"on"


async def test_a_session_of_before_is_not_resumed_under_new_files(
    start: Start, files: TlsFiles, authority: Authority
) -> None:
    """Else a client whose authority was taken out would still be let in."""
    tls = Tls(files)
    server = await start(echo, tls)
    context = authority.client()
    context.maximum_version = ssl.TLSVersion.TLSv1_2  # whose session is there when the handshake is done

    def resumed(session: ssl.SSLSession | None) -> tuple[bool | None, ssl.SSLSession | None]:
        with (
            socket.create_connection(("127.0.0.1", server.port)) as plain,
            context.wrap_socket(plain, server_hostname=HOST, session=session) as secured,
        ):
            return secured.session_reused, secured.session

    _, session = await asyncio.to_thread(resumed, None)
    assert (await asyncio.to_thread(resumed, session))[0] is True
    replace(authority.sign(HOST), files)
    assert settled(tls)
    assert (await asyncio.to_thread(resumed, session))[0] is False


def mismatched(pair: Pair, other: Pair, files: TlsFiles) -> str:
    Path(files.certificate).write_bytes(other.pem)
    return "the key is not the certificate's"


def empty(pair: Pair, other: Pair, files: TlsFiles) -> str:
    Path(files.certificate).write_bytes(b"")
    return "holds no certificate in PEM"


def swapped(pair: Pair, other: Pair, files: TlsFiles) -> str:
    Path(files.key).write_bytes(pair.pem)
    return "holds no private key in PEM"


def missing(pair: Pair, other: Pair, files: TlsFiles) -> str:
    Path(files.key).unlink()
    return "cannot be read: No such file or directory"


def encrypted(pair: Pair, other: Pair, files: TlsFiles) -> str:
    Path(files.key).write_bytes(pair.key_pem(b"secret"))
    return "is encrypted"


def damaged(pair: Pair, other: Pair, files: TlsFiles) -> str:
    Path(files.certificate).write_bytes(pair.pem[:100] + pair.pem[140:])
    return "OpenSSL cannot use this"


def folder(pair: Pair, other: Pair, files: TlsFiles) -> str:
    Path(files.key).unlink()
    Path(files.key).mkdir()
    return "cannot be read: Is a directory"


BAD = [mismatched, empty, swapped, missing, encrypted, damaged, folder]


@pytest.mark.parametrize("harm", BAD)
def test_files_that_are_no_pair_are_refused_with_which_and_why(
    files: TlsFiles, pair: Pair, authority: Authority, harm: Callable[[Pair, Pair, TlsFiles], str]
) -> None:
    why = harm(pair, authority.sign(HOST), files)
    with pytest.raises(BadTls, match=why) as caught:
        Tls(files)
    assert files.certificate in str(caught.value) or files.key in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_an_authority_that_is_none_is_refused(files: TlsFiles, tmp_path: Path, content: bytes) -> None:
    ca = tmp_path / "ca.crt"
    ca.write_bytes(content)
    with pytest.raises(BadTls, match=r"ca\.crt"):
        Tls(TlsFiles(files.certificate, files.key, str(ca)))


@pytest.mark.parametrize("harm", BAD)
async def test_a_broken_new_pair_keeps_the_old_and_says_so_once_and_a_good_one_is_taken_then(
    start: Start,
    secure: Open,
    files: TlsFiles,
    pair: Pair,
    authority: Authority,
    caplog: pytest.LogCaptureFixture,
    harm: Callable[[Pair, Pair, TlsFiles], str],
) -> None:
    tls = Tls(files)
    server = await start(echo, tls)
    looks = asyncio.Semaphore(0)
    looked = 0

    async def sleep(seconds: float) -> None:
        nonlocal looked
        looked += 1
        await looks.acquire()

    async def look(times: int) -> None:
        seen = looked
        for _ in range(times):
            looks.release()
        await until(lambda: looked == seen + times)

    following = asyncio.create_task(tls.follow(sleep))
    await until(lambda: looked == 1)
    why = harm(pair, authority.sign(HOST), files)
    await look(4)
    complaints = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert len(complaints) == 1
    assert why in complaints[0]
    assert "those of before are used on" in complaints[0]
    assert served(await secure(server.port)) == pair.der
    if harm is folder:
        Path(files.key).rmdir()
    new_pair = authority.sign(HOST)
    replace(new_pair, files)
    await look(2)
    assert served(await secure(server.port)) == new_pair.der
    following.cancel()
