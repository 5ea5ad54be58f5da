"""What a request needed is freed when it ends: left in cycles it would wait for Python's garbage collection,
whose search then takes tens of milliseconds, in which no stream goes on."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

from .conftest import LONG, SHORT, Endpoint, Start
from .fakes import DONE, OnGenerate, broken, chunk, streams

REQUESTS = 20


@contextmanager
def collected() -> Iterator[Counter[str]]:
    """By kind: what of the router's, and of its parsers, a search at the end of the block finds in cycles."""
    found: Counter[str] = Counter()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        kinds = (type(one) for one in gc.garbage)
        found.update(str(kind) for kind in kinds if kind.__module__.startswith(("tandem", "httptools")))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@asynccontextmanager
async def connected(endpoint: Endpoint) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    url = endpoint.client.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        yield reader, writer
    finally:
        writer.close()


def message(body: dict[str, Any], *, stream: bool = True, last: bool = False) -> bytes:
    """`last`: of its connection."""
    content = json.dumps({**body, "stream": stream}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += b"connection: close\r\n" if last else b""
    return b"%bcontent-length: %d\r\n\r\n%b" % (head, len(content), content)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("body", [LONG, SHORT])
async def test_requests_on_a_kept_connection(start: Start, body: dict[str, Any], stream: bool) -> None:
    endpoint = await start()
    end = b"\r\n0\r\n\r\n" if stream else b"}}}"
    async with connected(endpoint) as (reader, writer):
        with collected() as found:
            for _ in range(REQUESTS):
                writer.write(message(body, stream=stream))
                await reader.readuntil(end)
    assert not found


async def each_on_a_new_connection(endpoint: Endpoint, sent: bytes, until: bytes = b"") -> Counter[str]:
    """What is found after requests whose clients read so far (as long as anything comes) and leave."""
    with collected() as found:
        for _ in range(REQUESTS):
            async with connected(endpoint) as (reader, writer):
                writer.write(sent)
                await (reader.readuntil(until) if until else reader.read(-1))
        await asyncio.sleep(0.1)
    return found


async def test_connections(start: Start) -> None:
    assert not await each_on_a_new_connection(await start(), message(LONG), b"\r\n0\r\n\r\n")


@pytest.mark.parametrize("asked", [LONG, SHORT])
async def test_clients_that_leave(start: Start, asked: dict[str, Any]) -> None:
    endpoint = await start()
    endpoint.decode[0].on_generate = streams(chunk("a"), chunk("b"), then_hangs=True)
    assert not await each_on_a_new_connection(endpoint, message(asked), b"data: ")


@pytest.mark.parametrize(
    "engine", [broken(500), streams(chunk("a"), whole=False), streams(chunk("a"), DONE, whole=False)]
)
async def test_engines_that_fail(start: Start, engine: OnGenerate) -> None:
    endpoint = await start(suspect_after=10**6, retry_ratio=1.0)
    endpoint.decode[0].on_generate = engine
    assert not await each_on_a_new_connection(endpoint, message(SHORT, last=True))
