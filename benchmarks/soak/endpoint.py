"""`tandem up` with real engines: started, looked at, stopped."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import machine
from prometheus_client.parser import text_string_to_metric_families
from promises import ROUTER

from tandem.bench.load import LoadError, ask
from tandem.bench.scrape import ENGINE_IN_HAND, ROUTER_IN_HAND
from tandem.http import Client, Origin
from tandem.local.record import ProcessState, load

START_SECONDS = 600.0


@dataclass
class Endpoint:
    pid: int
    """Of `tandem up`."""
    url: str
    folder: Path
    """Where `tandem up` writes down which processes there are, for `tandem status`."""
    client: Client

    def __post_init__(self) -> None:
        self.roles: dict[str, str] = {p.name: p.role for p in self._processes()}
        """By name; the router is one of them."""
        self.urls = {p.name: p.url for p in self._processes() if p.name != ROUTER}
        """Of engines, by name."""

    @property
    def router(self) -> Origin:
        return Origin.parse(self.url)

    def of(self, role: str) -> list[str]:
        """The names of a role."""
        return [name for name, its in self.roles.items() if its == role]

    def pids(self, who: str) -> set[int]:
        """The processes of an engine or of the router."""
        root = next(p.pid for p in self._processes() if p.name == who)
        return set() if root is None else set(machine.children(root))

    def _processes(self) -> list[ProcessState]:
        state = load(self.folder)
        assert state is not None, f"{self.folder} has no state of an endpoint"
        return state.processes

    async def ready(self) -> set[str] | None:
        """The engines in use, by the router's word, each proved with all others that are; None when it gives
        none."""
        samples = await self._samples(self.router)
        try:
            async with asyncio.timeout(5):
                told = json.loads(await ask(self.client, self.router, "/ready"))
        except (LoadError, TimeoutError):
            return None
        if samples is None:
            return None
        in_use = {
            labels["engine"] for name, labels, value in samples if name == "tandem_engine_ready" and value
        }
        proved = {url for url in in_use if not any(url in each for each in told.get("unproved", ()))}
        return {name for name, url in self.urls.items() if url in proved}

    async def answers(self, who: str) -> bool:
        try:
            async with asyncio.timeout(5):
                await ask(self.client, Origin.parse(self.urls[who]), "/health")
        except (LoadError, TimeoutError):
            return False
        return True

    async def in_hand(self) -> list[str]:
        """What the router and the engines still have of requests: places, reservations, KV blocks. Or who is
        silent."""
        left = []
        for who, url in {ROUTER: self.url, **self.urls}.items():
            samples = await self._samples(Origin.parse(url))
            if samples is None:
                left.append(f"{who} does not answer")
                continue
            left += [
                f"{who}: {name}{labels} is {value:g}"
                for name, labels, value in samples
                if name in (*ROUTER_IN_HAND, *ENGINE_IN_HAND) and value
            ]
        return left

    async def at_rest(self) -> bool:
        return not await self.in_hand()

    async def counted(self, name: str) -> dict[str, float]:
        """A counter of the router, by its labels."""
        samples = await self._samples(self.router) or []
        return {"/".join(labels.values()): value for n, labels, value in samples if n == name and value}

    async def _samples(self, origin: Origin) -> list[tuple[str, dict[str, str], float]] | None:
        try:
            async with asyncio.timeout(5):
                page = (await ask(self.client, origin, "/metrics")).decode()
        except (LoadError, TimeoutError):
            return None
        return [
            (s.name, dict(s.labels), s.value) for f in text_string_to_metric_families(page) for s in f.samples
        ]


@asynccontextmanager
async def up(file: Path, port: int) -> AsyncIterator[Endpoint]:
    """`tandem up -f FILE`, ready in the block and stopped after it."""
    client = Client()
    with tempfile.TemporaryDirectory() as state:
        log = Path(state) / "up.log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tandem", "up", "--json", "--port", str(port), "--file", str(file)),
                env={**os.environ, "XDG_STATE_HOME": state},
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
            )
        try:
            assert process.stdout is not None
            async with asyncio.timeout(START_SECONDS):
                told = json.loads(await process.stdout.readline() or "null")
            if told is None:
                raise SystemExit(f"tandem up ended with {await process.wait()}")
            yield Endpoint(process.pid, told["url"], Path(told["logs"]), client)
            if process.returncode is not None:
                raise SystemExit(f"tandem up ended with {process.returncode}")
        except BaseException:
            sys.stderr.write(log.read_text("utf-8", "replace"))
            raise
        finally:
            await client.aclose()
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            await process.wait()
