"""A real nginx with a rendered configuration, in a folder of its own, before an engine made for the test."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tandem.api import Role

from ..api.conftest import lacking
from .endpoints import container, pod, rendered

Handler = Callable[[str, str, bytes, asyncio.StreamWriter], Awaitable[None]]
"""(method, target, body, writer): the whole answer of a fake engine."""


def nginx() -> str:
    """The program."""
    found = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
    if found is None:
        lacking("needs nginx: apt-get install nginx")
    return found


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@dataclass
class Engine:
    """Counts what it is asked, and answers by a function."""

    port: int
    asked: list[tuple[str, str, bytes]]
    gone: asyncio.Event
    """Set when a client's connection was closed before its answer was whole."""


@asynccontextmanager
async def engine(handler: Handler) -> AsyncIterator[Engine]:
    made = Engine(0, [], asyncio.Event())
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            method, target, _ = head.split("\r\n", 1)[0].split(" ")
            headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head.split("\r\n")[1:])}
            body = b""
            if "content-length" in headers:
                body = await reader.readexactly(int(headers["content-length"]))
            made.asked.append((method, target, body))
            answering = asyncio.ensure_future(handler(method, target, body, writer))
            leaving = asyncio.ensure_future(reader.read(1))
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                answering.cancel()
                made.gone.set()
            leaving.cancel()
        except (asyncio.IncompleteReadError, ConnectionError):
            made.gone.set()
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def answer(writer: asyncio.StreamWriter, status: int, body: bytes, kind: str = "application/json") -> None:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


@dataclass
class Proxy:
    client: httpx.AsyncClient
    metrics: httpx.AsyncClient
    process: asyncio.subprocess.Process


@asynccontextmanager
async def proxy(
    conf: str, folder: Path, engine_port: int, weights: Path | None = None
) -> AsyncIterator[Proxy]:
    """nginx as its container starts it, with this configuration; only what is of the pod is put elsewhere:
    ports and folders."""
    port, metrics = free_port(), free_port()
    for old, new in (
        ("listen 8081", f"listen 127.0.0.1:{port}"),
        ("listen 9113", f"listen 127.0.0.1:{metrics}"),
        ("127.0.0.1:8000", f"127.0.0.1:{engine_port}"),
        ("/tmp/", f"{folder}/"),
        ("/opt/ml/model/", f"{weights or folder}/"),
    ):
        conf = conf.replace(old, new)
    file = folder / "nginx.conf"
    # A worker that starts as root becomes `nobody`, who cannot read a test's folder.
    file.write_text(f"user root;\n{conf}" if os.geteuid() == 0 else conf, "utf-8")
    sidecar = container(pod(rendered("dpd-s3"), Role.DECODE), "sidecar-reverse-proxy")
    process = await asyncio.create_subprocess_exec(
        *(str(file) if word.endswith("nginx.conf") else word for word in sidecar["command"]),
        env={**os.environ, "PATH": f"{os.environ['PATH']}:{Path(nginx()).parent}"},
        stderr=asyncio.subprocess.PIPE,
    )
    limits = httpx.Limits(max_connections=200)
    try:
        async with (
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30, limits=limits) as client,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{metrics}", timeout=30) as figures,
        ):
            await _listening(process, port)
            yield Proxy(client, figures, process)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _listening(process: asyncio.subprocess.Process, port: int) -> None:
    while True:
        if process.returncode is not None:
            assert process.stderr is not None
            raise AssertionError((await process.stderr.read()).decode())
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.02)
        else:
            writer.close()
            return
