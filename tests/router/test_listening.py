"""The router's port as its flags make it: limits, TLS, browsers, drain."""

from __future__ import annotations

import asyncio
import functools
import json
import resource
import socket
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.http import Client, Responder
from tandem.router.body import Body
from tandem.router.reading import Reading

from ..http.certificates import Authority
from .conftest import SHORT, Endpoint, Start
from .fakes import DONE, SSE, FakeEngine, Seen, chunk, eventually, streams_slowly
from .lmcache_fakes import Hold

SOON = 0.1


# Limits


async def test_max_body_bytes(start: Start) -> None:
    endpoint = await start(max_body_bytes=2000)
    fits = {**SHORT, "prompt": "x" * 1000}
    assert (await endpoint.post(fits)).status_code == 200
    answer = await endpoint.post({**SHORT, "prompt": "x" * 2000})
    assert answer.status_code == 413
    assert answer.json()["error"]["message"] == "request body is larger than 2000 bytes"
    assert await endpoint.samples("tandem_refused_total", "status") == {("413",): 1}


async def test_a_body_may_have_64_mib_by_default(start: Start) -> None:
    endpoint = await start()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n"
    refused = await endpoint.raw(head % (64 * 1024 * 1024 + 1))
    assert refused.startswith(b"HTTP/1.1 413 ")
    assert b"larger than 67108864 bytes" in refused


async def test_max_held_bytes(start: Start) -> None:
    """Large bodies for which there is no room are told to come again; small ones are served all the time."""
    endpoint = await start(prefill=0, max_body_bytes=150_000, max_held_bytes=150_000)
    hold = endpoint.decode[0].on_generate = Hold()
    large = {**SHORT, "prompt": "x" * 80_000}
    first = asyncio.create_task(endpoint.post(large))
    await hold.holds()
    refused = await endpoint.post(large)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert await endpoint.samples("tandem_refused_total", "status") == {("503",): 1}
    small = asyncio.create_task(endpoint.post(SHORT))
    await hold.holds(2)
    hold.go_on.set()
    assert [(await task).status_code for task in (first, small)] == [200, 200]
    assert (await endpoint.post(large)).status_code == 200


@pytest.mark.parametrize("legs", [1, 2])
async def test_a_large_body_is_let_go_of_when_its_answer_begins(
    start: Start, legs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer may take minutes, and as long as its reader likes."""
    endpoint = await start(prefill=legs - 1, max_body_bytes=150_000, max_held_bytes=150_000)
    go_on = asyncio.Event()
    endpoint.decode[0].on_generate = streams_slowly(go_on)
    bodies: list[bytes] = []
    read, stream = Reading.read, Client.stream

    async def note_what_came(self: Reading, data: bytes) -> Body:
        bodies.append(data)
        return await read(self, data)

    def note_what_is_sent(self: Client, *args: Any, **more: Any) -> Any:
        bodies.extend(arg for arg in args if isinstance(arg, bytes) and len(arg) > 80_000)
        return stream(self, *args, **more)

    monkeypatch.setattr(Reading, "read", note_what_came)
    monkeypatch.setattr(Client, "stream", note_what_is_sent)
    large = {**SHORT, "prompt": "x" * 80_000, "stream": True}
    request = functools.partial(endpoint.client.stream, "POST", "/v1/completions", json=large)
    async with request() as first, request() as second:
        for answer in (first, second):
            assert answer.status_code == 200
            assert (await anext(answer.aiter_bytes())).startswith(b"data: ")
        assert len(bodies) >= 2 * (1 + legs)
        kept = {sys.getrefcount(each) for each in bodies}
        assert kept == {sys.getrefcount(each) for each in [bytes(1000)]}, "only this test has them"
        go_on.set()


async def test_max_head_bytes(start: Start) -> None:
    endpoint = await start(max_head_bytes=1024)
    assert (await endpoint.post(SHORT, x_more="a" * 500)).status_code == 200
    assert (await endpoint.post(SHORT, x_more="a" * 1024)).status_code == 431


async def test_max_connections(start: Start) -> None:
    endpoint = await start(max_connections=2)
    for _ in range(3):
        assert (await endpoint.client.get("/health")).status_code == 200, "one connection"
    url = endpoint.client.base_url
    with socket.create_connection((url.host, url.port)):
        for _ in range(2):
            assert b"too many connections" in await endpoint.raw()
    assert await endpoint.samples("tandem_refused_total", "status") == {("503",): 2}


@pytest.mark.parametrize(
    ("options", "pieces", "status"),
    [
        ({"head_timeout": SOON}, [b"GET /health HTTP/1.1\r\nho"], b"408"),
        (
            {"body_timeout": SOON},
            [b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{"],
            b"408",
        ),
        ({"keep_alive_timeout": SOON}, [b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"], b"200"),
    ],
    ids=["head", "body", "idle"],
)
async def test_time_outs_of_a_clients_connection(
    start: Start, options: dict[str, float], pieces: list[bytes], status: bytes
) -> None:
    endpoint = await start(**options)
    answer = await endpoint.raw(*pieces)
    assert answer.startswith(b"HTTP/1.1 " + status)


async def test_body_rate(start: Start) -> None:
    """A client that drips never pauses for long, and is ended all the same."""
    endpoint = await start(body_timeout=0.3, body_rate=1e6)
    url = endpoint.client.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n")

    async def drip() -> None:
        while True:
            writer.write(b" ")
            await asyncio.sleep(0.01)

    dripping = asyncio.create_task(drip())
    assert (await reader.read(-1)).startswith(b"HTTP/1.1 408 ")
    dripping.cancel()
    writer.close()


async def test_write_timeout(start: Start) -> None:
    """A client that takes nothing of its answer is dropped, and its request cancelled."""
    endpoint = await start(write_timeout=SOON)

    async def much(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        responder.start(200, SSE)
        while True:
            responder.write(chunk("x" * 100_000))
            await responder.drained()
            await asyncio.sleep(0)

    endpoint.decode[0].on_generate = much
    url = endpoint.client.base_url
    body = json.dumps({**SHORT, "stream": True}).encode()
    with socket.create_connection((url.host, url.port)) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )

        async def cancelled() -> bool:
            return endpoint.decode[0].cancelled == 1

        await eventually(cancelled)


@pytest.mark.parametrize("kept", [True, False])
async def test_engine_keep_alive(start: Start, kept: bool) -> None:
    """How long an idle connection to an engine waits for the next request."""
    endpoint = await start(engine_keep_alive=3600.0 if kept else 0.0)
    (decoder,) = endpoint.decode
    for _ in range(3):
        await endpoint.post(SHORT)
    assert decoder.server is not None
    server = decoder.server

    async def settled() -> bool:
        await asyncio.sleep(0.02)
        return (server.connections > 0) is kept

    await eventually(settled)


@pytest.fixture
def few_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_open_files_are_raised_to_what_the_connections_need(start: Start, few_files: None) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    await start(max_connections=1000)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (2512, hard)


# TLS


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority("an authority")


@pytest.fixture
def certificate(authority: Authority, tmp_path: Path) -> dict[str, str]:
    """The options of a router that has one."""
    files = authority.sign("router.test").write(tmp_path, "router")
    return dict(zip(("tls_certificate", "tls_key"), files, strict=True))


def https(endpoint: Endpoint, context: ssl.SSLContext) -> httpx.AsyncClient:
    url = f"https://127.0.0.1:{endpoint.client.base_url.port}"
    return httpx.AsyncClient(base_url=url, verify=context, trust_env=False, timeout=20.0)


async def test_tls_serves_streams_and_takes_new_files_while_they_run(
    start: Start, authority: Authority, certificate: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = await start(wait=False, **certificate)
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        responder.start(200, SSE)
        responder.write(chunk("a"))
        begun.set()
        await go_on.wait()
        responder.write(DONE)
        responder.finish()
        return True

    (decoder,) = endpoint.decode
    async with https(endpoint, authority.client()) as client:
        name = {"sni_hostname": "router.test"}

        async def ready() -> bool:
            return (await client.get("/ready", extensions=name)).status_code == 200

        await eventually(ready)
        decoder.on_generate = slowly
        body = {**SHORT, "stream": True}
        stream = asyncio.create_task(client.post("/v1/completions", json=body, extensions=name))
        await begun.wait()
        caplog.set_level("INFO", "tandem.http")
        authority.sign("router.test").write(Path(certificate["tls_key"]).parent, "router")

        async def taken() -> bool:
            return "new connections get the certificate that is in" in caplog.text

        await eventually(taken)
        go_on.set()
        assert (await stream).content == chunk("a") + DONE


@pytest.mark.parametrize("missing", ["tls_certificate", "tls_key"])
async def test_files_that_are_not_there_are_told_with_their_flags(
    start: Start, certificate: dict[str, str], missing: str
) -> None:
    Path(certificate[missing]).unlink()
    with pytest.raises(
        ValueError, match=r"--tls-certificate, --tls-key: .*router\..* cannot be read: No such file"
    ):
        await start(wait=False, **certificate)


async def test_tls_client_ca(
    start: Start, authority: Authority, certificate: dict[str, str], tmp_path: Path
) -> None:
    theirs = Authority("of clients")
    ca = tmp_path / "ca.crt"
    ca.write_bytes(theirs.own.pem)
    endpoint = await start(wait=False, tls_client_ca=str(ca), **certificate)
    name = {"sni_hostname": "router.test"}
    async with https(endpoint, authority.client(tmp_path, theirs.sign("a client"))) as client:
        assert (await client.get("/health", extensions=name)).status_code == 200
    async with https(endpoint, authority.client()) as client:
        with pytest.raises((httpx.TransportError, ssl.SSLError)):
            await client.get("/health", extensions=name)


# Browsers

APP = "https://app.example"
PREFLIGHT = {"origin": APP, "access-control-request-method": "POST", "access-control-request-headers": "x-a"}


async def test_no_page_of_another_origin_may_use_it_by_default(start: Start) -> None:
    """Whatever engines say: vLLM lets all in."""

    def lets_all_in(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        headers = [(b"content-type", b"application/json"), (b"access-control-allow-origin", b"*")]
        responder.send(200, headers, b'{"choices":[{"text":"x"}]}')
        return True

    endpoint = await start()
    endpoint.decode[0].on_generate = lets_all_in
    assert (await endpoint.client.options("/v1/completions", headers=PREFLIGHT)).status_code == 405
    answer = await endpoint.post(SHORT, origin=APP)
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("access-control-")]


async def test_cors_flags(start: Start) -> None:
    endpoint = await start(cors_origins=(APP,), cors_methods=("POST",), cors_headers=("x-a", "authorization"))
    before = len(endpoint.decode[0].seen)
    answer = await endpoint.client.options("/v1/completions", headers=PREFLIGHT)
    assert answer.status_code == 204
    assert answer.headers["access-control-allow-origin"] == APP
    assert answer.headers["access-control-allow-methods"] == "POST"
    assert answer.headers["access-control-allow-headers"] == "x-a, authorization"
    assert len(endpoint.decode[0].seen) == before
    other = {**PREFLIGHT, "origin": "https://other.example"}
    assert (await endpoint.client.options("/v1/completions", headers=other)).status_code == 403
    for body in (SHORT, {**SHORT, "stream": True}, {**SHORT, "model": "other"}):
        got = await endpoint.post(body, origin=APP)
        assert got.headers["access-control-allow-origin"] == APP
