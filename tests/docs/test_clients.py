"""docs/clients.md: its commands are run as written (but for ports and engines), with what it shows."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shlex
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest

from tandem.config import add_router_arguments
from tandem.http import Responder

from ..http.certificates import Authority
from ..router.fakes import FakeEngine, Seen, engines
from .pages import ROOT, blocks

BLOCKS = [text.splitlines() for _, text in blocks("sh", "clients.md")]
PAGE = (ROOT / "docs" / "clients.md").read_text()
FENCED = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
SHOWN = [text for language, text in FENCED if not language]
BOUNDS = re.findall(r"\| `(--[a-z-]+)` \| ([0-9.]+)[^|]*? to ([0-9]+) \|", PAGE)


@pytest.mark.parametrize(("flag", "least", "most"), BOUNDS)
def test_a_limit_may_be_what_is_said(flag: str, least: str, most: str) -> None:
    def read(value: str) -> object:
        parser = argparse.ArgumentParser(exit_on_error=False)
        add_router_arguments(parser)
        return parser.parse_args([flag, value])

    for value in (least, most):
        read(value)
    for value in (str(float(least) - 0.01), str(int(least) - 1) if "." not in least else "0", f"{most}0"):
        with pytest.raises(argparse.ArgumentError):
            read(value)


def test_each_limit_says_so() -> None:
    limits = {"--max-connections", "--max-head-bytes", "--max-body-bytes", "--head-timeout", "--body-timeout"}
    assert {flag for flag, *_ in BOUNDS} == limits | {
        "--max-held-bytes",
        "--body-rate",
        "--keep-alive-timeout",
        "--write-timeout",
    }


class Router:
    """One that a command of the page has started."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.port = port
        self.log = ""

    async def logged(self, words: str) -> None:
        assert self.process.stderr is not None
        while words not in self.log:
            line = await self.process.stderr.readline()
            assert line, f"it ended: {self.log}"
            self.log += line.decode()


Begin = Callable[[str], Awaitable[Router]]


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    fake = FakeEngine("d")
    async with engines(fake):
        yield fake


@pytest.fixture
async def begin(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[Begin]:
    """Start a router by a command of the page."""
    async with AsyncExitStack() as stack:

        async def begin(command: str) -> Router:
            program, *words = shlex.split(command)
            assert program == ".venv/bin/tandem"
            words[words.index("http://10.0.0.3:8081")] = engine.url
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "tandem", *words, "--port", "0"),
                cwd=tmp_path,
                stderr=asyncio.subprocess.PIPE,
            )

            async def end() -> None:
                if process.returncode is None:
                    process.terminate()
                await process.communicate()

            stack.push_async_callback(end)
            router = Router(process, 0)
            await router.logged("listening on ")
            router.port = int(re.findall(r"listening on https?://127\.0\.0\.1:(\d+)", router.log)[0])
            return router

        yield begin


async def run(command: str, folder: Path, router: Router | None = None) -> str:
    """What a command prints. Raises when it fails."""
    words = shlex.split(command)
    if router is not None:
        words = [
            re.sub(r"(?<=localhost:)8443|(?<=127\.0\.0\.1:)8000", str(router.port), word) for word in words
        ]
        words[1:1] = ["--silent", "--show-error", "--noproxy", "*"]
    process = await asyncio.create_subprocess_exec(
        *words, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    if process.returncode:
        raise RuntimeError(err.decode())
    return out.decode()


async def test_tls_is_served_and_its_files_are_followed(begin: Begin, tmp_path: Path) -> None:
    openssl, tandem, curl = BLOCKS[0]
    taken, refused = SHOWN[:2]
    await run(openssl, tmp_path)
    router = await begin(tandem)
    assert json.loads(await run(curl, tmp_path, router)) == {"status": "ok"}
    Path(tmp_path, "tls.crt").write_bytes(Authority("another").own.pem)
    await router.logged(refused.strip())
    await run(openssl, tmp_path)
    await router.logged(taken.strip())
    assert json.loads(await run(curl, tmp_path, router)) == {"status": "ok"}
    router.process.terminate()
    assert await router.process.wait() == 0


async def test_clients_show_certificates(begin: Begin, tmp_path: Path) -> None:
    tandem, curl = BLOCKS[1]
    await run(BLOCKS[0][0], tmp_path)
    router = await begin(tandem)
    assert json.loads(await run(curl, tmp_path, router)) == {"status": "ok"}
    with pytest.raises(RuntimeError):
        await run(BLOCKS[0][2], tmp_path, router)


async def test_pages_in_browsers_are_let_in(begin: Begin, tmp_path: Path) -> None:
    tandem, curl = BLOCKS[2]
    told = await run(curl, tmp_path, await begin(tandem))
    assert told.startswith("HTTP/1.1 204 ")
    assert "access-control-allow-origin: https://app.example\r\n" in told
    assert "access-control-allow-headers: authorization, content-type\r\n" in told


async def test_heartbeats_are_what_is_shown(begin: Begin, engine: FakeEngine) -> None:
    (tandem,) = BLOCKS[3]
    beats = asyncio.Event()

    async def late(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        await beats.wait()
        return False

    router = await begin(tandem.replace("--heartbeat 15", "--heartbeat 0.1"))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{router.port}", trust_env=False) as client:
        while (await client.get("/ready")).status_code != 200:
            await asyncio.sleep(0.01)
        engine.on_generate = late
        received = b""
        body = {"model": "m", "prompt": "hi", "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for part in answer.aiter_bytes():
                received += part
                if received.count(b": heartbeat\n\n") >= 2:
                    beats.set()
    before, first, _ = SHOWN[2].partition("data: ")
    assert first
    assert received.startswith(before.encode())
    assert received.lstrip(b": heartbeat\n").startswith(b"data: {")
