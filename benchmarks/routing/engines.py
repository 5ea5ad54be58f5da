"""Simulated engines of one process for the measurements in real time, which tells how busy each of them was.

    python engines.py SETTINGS_AS_JSON

Prints one line of JSON when all of them listen, and one for every line on its standard input; see
`Engines.times`. Ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

from machine import free_ports
from virtual import Meter

from tandem.sim import CostProfile, EngineSpec, Fleet, parse

NAME = "m"
EVENTS_QUEUE = 100_000


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the engines are. Engine seconds pass `time_scale` times as fast as seconds."""

    model: str
    engines: int
    blocks: int
    """Of KV cache, of each engine."""
    block_size: int
    max_model_len: int
    time_scale: float
    profile: dict[str, Any]
    """Fields of CostProfile."""
    ports: tuple[int, ...] = ()
    """Of HTTP; twice as many follow, for events and their replay."""


@dataclass(frozen=True)
class Place:
    """Where one engine is."""

    url: str
    events: str
    replay: str


def places(settings: Settings) -> list[Place]:
    ports, n = settings.ports, settings.engines
    return [
        Place(f"http://127.0.0.1:{h}", f"tcp://127.0.0.1:{e}", f"tcp://127.0.0.1:{r}")
        for h, e, r in zip(ports[:n], ports[n : 2 * n], ports[2 * n :], strict=True)
    ]


def spec(settings: Settings, place: Place) -> EngineSpec:
    events = {
        "enable_kv_cache_events": True,
        "endpoint": place.events.replace("127.0.0.1", "*"),
        "replay_endpoint": place.replay.replace("127.0.0.1", "*"),
        "hwm": EVENTS_QUEUE,
    }
    flags: dict[str, Any] = {
        "model": settings.model,
        "served-model-name": NAME,
        "max-model-len": settings.max_model_len,
        "block-size": settings.block_size,
        "num-gpu-blocks-override": settings.blocks + 1,  # one is vLLM's own
        "kv-events-config": json.dumps(events),
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return EngineSpec(
        parse([*words, "--enable-prompt-tokens-details"]), port=int(place.url.rpartition(":")[2])
    )


class Engines:
    """The process, seen from the one that started it."""

    def __init__(self, process: asyncio.subprocess.Process, places: list[Place]) -> None:
        self.process = process
        self.places = places

    async def times(self) -> list[tuple[float, float]]:
        """Of each engine: engine seconds spent on steps so far, and on what is not the same in every step."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(b"\n")
        return [(busy, work) for busy, work in json.loads(await self.process.stdout.readline())]


@asynccontextmanager
async def started(settings: Settings) -> AsyncIterator[Engines]:
    """Engines with empty caches, until the end of the block."""
    values = {**asdict(settings), "ports": free_ports(3 * settings.engines)}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        __file__,
        json.dumps(values),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout
        if not await process.stdout.readline():
            raise SystemExit("the engines ended at once")
        yield Engines(process, places(Settings(**values)))
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def serve(settings: Settings) -> None:
    specs = [spec(settings, place) for place in places(settings)]
    profile = CostProfile(**settings.profile)
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with Fleet(specs, profile=profile, time_scale=settings.time_scale, environment={}) as fleet:
        meters = [Meter(server.engine.profile) for server in fleet.engines]
        for server, meter in zip(fleet.engines, meters, strict=True):
            server.engine.profile = meter  # type: ignore[assignment]
        print(json.dumps(fleet.urls), flush=True)
        while await reader.readline():
            print(json.dumps([(meter.busy, meter.work) for meter in meters]), flush=True)


if __name__ == "__main__":
    import uvloop

    uvloop.run(serve(Settings(**json.loads(sys.argv[1]))))
