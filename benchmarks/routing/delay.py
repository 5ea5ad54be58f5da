"""What running streams notice of the router's other work: the delay of each chunk on its way through it.

Fifty streams of a chunk every 20 ms go through a router with kvaware and eight engines: alone, while KV
events of 50,000 blocks a second arrive, and while prompts of 100,000 tokens do, one a second. The engines
are stand-ins that write the time into each chunk. They, the events and the long prompts come from one
process; this one reads the chunks. A chunk's delay is from its writing to its reading.
"""

from __future__ import annotations

import asyncio
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

import peers
import traces
import uvloop
import zmq
from index import payloads
from machine import Quietly, as_it_comes, cpu_seconds, free_ports

from engines import NAME, Place
from tandem.http import Client, Origin, Request, Responder, serve

ENGINES = 8
STREAMS = 50
CHUNK_SECONDS = 0.02
SECONDS = 15.0
WARM_UP_SECONDS = 3.0
BLOCK = 16
EVENT_BLOCKS = 64
EVENT_RATE = 50_000
"""Blocks a second."""
PROMPT_TOKENS = 100_000
KINDS = ("alone", "events", "prompts")
_JSON = [(b"content-type", b"application/json")]
_STREAM = [(b"content-type", b"text/event-stream")]


# --- the other process: engines, their events, and long prompts ---


class Engine:
    """Answers as vLLM does: a stream goes on until the client leaves, anything else is one token."""

    async def __call__(self, request: Request, responder: Responder) -> None:
        if request.method == "GET":
            models = {"object": "list", "data": [{"id": NAME, "object": "model", "max_model_len": 1 << 20}]}
            responder.send(200, _JSON, json.dumps(models).encode())
            return
        if not json.loads(request.body).get("stream"):
            responder.send(200, _JSON, json.dumps(_completion("a", "length", usage=True)).encode())
            return
        responder.start(200, _STREAM)
        piece = b"data: " + json.dumps(_completion("%020d", None)).encode() + b"\n\n"
        while True:
            responder.write(piece % time.monotonic_ns())
            await asyncio.sleep(CHUNK_SECONDS)


def _completion(text: str, reason: str | None, *, usage: bool = False) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
    told = {"usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}} if usage else {}
    return {"id": "c", "object": "text_completion", "created": 1, "model": NAME, "choices": [choice], **told}


async def others(ports: Sequence[int]) -> None:
    """Engines on the ports; what else they do is told by lines of JSON on the standard input, each with a
    router's URL and what is to arrive there. Answers a line with what came."""
    context = zmq.Context()
    publishers = []
    for port in ports[ENGINES:]:
        publishers.append(context.socket(zmq.PUB))
        publishers[-1].bind(f"tcp://127.0.0.1:{port}")
    batches, body = payloads(400, EVENT_BLOCKS), _long_prompt()
    for port in ports[:ENGINES]:
        await serve(Engine(), "127.0.0.1", port)
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    print(flush=True)
    sequence = 0
    while line := await lines.readline():
        asked = json.loads(line)
        result: dict[str, float] = {}
        if asked["kind"] == "events":
            sequence, result = await _events(publishers, batches, sequence, asked["seconds"])
        elif asked["kind"] == "prompts":
            result = await _prompts(asked["url"], body, asked["seconds"])
        else:
            await asyncio.sleep(asked["seconds"])
        print(json.dumps(result), flush=True)


async def _events(
    publishers: Sequence[zmq.Socket[bytes]], batches: Sequence[bytes], number: int, seconds: float
) -> tuple[int, dict[str, float]]:
    sent, begun = 0, time.monotonic()
    while (passed := time.monotonic() - begun) < seconds:
        while sent < passed * EVENT_RATE:  # also makes up for what was late
            sequence, which = divmod(number, len(publishers))
            frames = [b"", sequence.to_bytes(8, "big"), batches[number % len(batches)]]
            publishers[which].send_multipart(frames)
            sent, number = sent + EVENT_BLOCKS, number + 1
        await asyncio.sleep(0.002)
    return number, {"blocks_per_s": sent / (time.monotonic() - begun)}


def _long_prompt() -> Callable[[int], bytes]:
    """Bodies of which no two share a prefix, so that none is counted from memory."""
    rest = traces.words(1, PROMPT_TOKENS - 1)
    text = " ".join(rest)
    return lambda number: json.dumps(
        {"model": NAME, "prompt": f"{traces.words(-number, 1)[0]} {number} {text}", "max_tokens": 1}
    ).encode()


async def _prompts(url: str, body: Callable[[int], bytes], seconds: float) -> dict[str, float]:
    client, origin, begun, tasks = Client(), Origin.parse(url), time.monotonic(), []
    took: list[float] = []

    async def send(data: bytes) -> None:
        sent = time.monotonic()
        async with client.stream(origin, "POST", b"/v1/completions", _JSON, data) as response:
            await response.read(1 << 20)
            if response.status == 200:
                took.append(time.monotonic() - sent)

    while time.monotonic() - begun < seconds:
        tasks.append(asyncio.create_task(send(body(len(tasks)))))
        await asyncio.sleep(1.0)
    await asyncio.gather(*tasks)
    await client.aclose()
    return {"prompts": len(took), "prompt_bytes": len(body(0)), "prompt_s": statistics.median(took or [0.0])}


# --- this process: the reader ---


async def measure(folder: Path, order: Sequence[str]) -> dict[str, dict[str, float]]:
    """One router; each kind of other work after the other."""
    ports = free_ports(2 * ENGINES)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        __file__,
        json.dumps(ports),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin
    assert process.stdout
    try:
        await process.stdout.readline()
        pairs = zip(ports[:ENGINES], ports[ENGINES:], strict=True)
        places = [Place(f"http://127.0.0.1:{h}", f"tcp://127.0.0.1:{e}", "") for h, e in pairs]
        found = {}
        router = peers.Router("", "Tandem", "kvaware", "")
        setting = {"model": str(folder), "block_size": BLOCK, "cache_tokens": 0}
        async with peers.serving(router, places, **setting) as served, _streams(served.url) as delays:
            await asyncio.sleep(WARM_UP_SECONDS)
            for kind in order:
                asked = {"kind": kind, "url": served.url, "seconds": SECONDS}
                delays.clear()
                cpu, begun = cpu_seconds(served.process.pid), time.monotonic()
                process.stdin.write(json.dumps(asked).encode() + b"\n")
                told = json.loads(await process.stdout.readline())
                share = (cpu_seconds(served.process.pid) - cpu) / (time.monotonic() - begun)
                found[kind] = {**quantiles(delays), **told, "router_cpu": share}
                await asyncio.sleep(0.5)
        return found
    finally:
        process.kill()
        await process.wait()


@asynccontextmanager
async def _streams(url: str) -> AsyncIterator[list[int]]:
    """Streams through the router; the list grows by the delay of each chunk, in nanoseconds."""
    delays: list[int] = []
    client, origin = Client(idle_per_origin=STREAMS), Origin.parse(url)

    def read(data: bytes) -> None:
        now = time.monotonic_ns()
        delays.extend(now - int(piece[:20]) for piece in data.split(b'"text": "')[1:])

    async def stream(number: int) -> None:
        await asyncio.sleep(CHUNK_SECONDS * number / STREAMS)
        body = {"model": NAME, "prompt": f"stream {number}", "max_tokens": 100_000, "stream": True}
        async with client.stream(
            origin, "POST", b"/v1/completions", _JSON, json.dumps(body).encode()
        ) as response:
            if response.status != 200:
                raise SystemExit(f"a stream was answered with HTTP {response.status}")
            await response.relay(read)

    tasks = [asyncio.create_task(stream(number)) for number in range(STREAMS)]
    try:
        yield delays
        for task in tasks:
            if task.done():
                task.result()
                raise SystemExit("a stream ended")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.aclose()


def quantiles(delays: Sequence[int]) -> dict[str, float]:
    """Milliseconds."""
    ordered = sorted(delays)
    at = {"p50": 0.5, "p99": 0.99, "p999": 0.999}
    found = {name: ordered[int(len(ordered) * q)] / 1e6 for name, q in at.items()}
    return {**found, "max": ordered[-1] / 1e6, "chunks": len(ordered)}


def run(
    runs: int = 3,
    kinds: Sequence[str] = KINDS,
    *,
    quietly: Quietly = as_it_comes,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = traces.write_model(Path(name))
        for number in range(runs):
            order = kinds[:: 1 if number % 2 == 0 else -1]
            result, others = uvloop.run(quietly(functools.partial(measure, folder, order)))
            found.append({**result, "others": others})
            told = (
                f"{kind} {result[kind]['p999']:.2f} ms ({result[kind]['router_cpu']:.0%})" for kind in kinds
            )
            say(f"chunk delay p99.9, run {number + 1}: {', '.join(told)}")
    return {
        "streams": STREAMS,
        "chunk_seconds": CHUNK_SECONDS,
        "seconds": SECONDS,
        "prompt_tokens": PROMPT_TOKENS,
        "event_rate": EVENT_RATE,
        "runs": found,
    }


if __name__ == "__main__":
    if len(sys.argv) > 1:
        uvloop.run(others(json.loads(sys.argv[1])))
    else:
        print(json.dumps(run(1), indent=1))
