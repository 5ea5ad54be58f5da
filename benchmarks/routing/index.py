"""What choosing costs: hash chain, look-ups, event intake, memory, choices, and what streams notice of it.

    python benchmarks/routing/index.py [--peer-python PATH] [--out FILE]

Prints a table, and JSON to FILE. `--peer-python` is a Python that has ai-dynamo-runtime, whose RadixTree
(Rust) is measured in the same run. About two minutes; figures are medians, and compare only within one run.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BLOCK = 16
MATCH_BLOCKS = 64
CHAIN_TOKENS = 32_000
INDEX_BLOCKS = 2_000_000
EVENT_BLOCKS = 64
RATE = 50_000  # blocks a second in events
STREAMS = 50
CHUNK_SECONDS = 0.02
STREAM_SECONDS = 12.0
WARM_UP_SECONDS = 2.0


def median_us(call: Callable[[], Any], times: int) -> float:
    taken = []
    for _ in range(times):
        begun = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken) * 1e6


def some_ids(count: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(150_000) for _ in range(count)]


# --- the peer, in its own interpreter ---


def peer() -> dict[str, float]:
    """Of ai-dynamo-runtime. Its events come decoded to JSON and with tokens hashed; ours as they are sent."""
    from dynamo._core import RadixTree, compute_block_hash_for_seq  # type: ignore[import-not-found]

    ids = some_ids(CHAIN_TOKENS)
    rng = random.Random(2)

    def event(number: int, parent: int | None, tokens: list[int]) -> bytes:
        blocks = [(rng.getrandbits(63), h) for h in compute_block_hash_for_seq(tokens, BLOCK)]
        stored = [{"block_hash": b, "tokens_hash": t} for b, t in blocks]
        data = {"stored": {"parent_hash": parent, "blocks": stored}}
        return json.dumps({"event_id": number, "data": data}).encode()

    tree = RadixTree()
    for worker in range(8):
        tree.apply_event(worker, event(0, None, ids[: (worker + 1) * 16 * BLOCK]))
    asked = compute_block_hash_for_seq(ids[: MATCH_BLOCKS * BLOCK], BLOCK)
    events = [event(i, None, some_ids(EVENT_BLOCKS * BLOCK, i)) for i in range(1000)]
    begun = time.perf_counter()
    for number, each in enumerate(events):
        tree.apply_event(number % 8, each)
    tree.find_matches(asked)  # it answers after what came before
    intake = len(events) * EVENT_BLOCKS / (time.perf_counter() - begun)
    return {
        "chain_us": median_us(lambda: compute_block_hash_for_seq(ids, BLOCK), 100),
        "lookup_us": median_us(lambda: tree.find_matches(asked), 5000),
        "intake_blocks_per_s": intake,
    }


# --- ours ---


def chain_and_lookup(engines: int) -> dict[str, float]:
    from tandem.router.strategies import KvIndex, Prompt
    from tandem.router.strategies.chain import NO_SPACE, extend, root

    ids = some_ids(CHAIN_TOKENS)
    index, fleet = KvIndex(), make_fleet(engines)
    for number, engine in enumerate(fleet):
        rank = index.follow(engine)
        blocks = (number % 8 + 1) * 16
        index.store(rank, list(range(1, blocks + 1)), None, ids[: blocks * BLOCK], BLOCK)
    prompt = Prompt(MATCH_BLOCKS * BLOCK + 1, ids[: MATCH_BLOCKS * BLOCK + 1])
    prompt.chain(BLOCK)
    return {
        "chain_us": median_us(lambda: extend(root(NO_SPACE, BLOCK), ids, BLOCK), 100),
        "lookup_us": median_us(lambda: index.match(prompt, fleet), 5000),
    }


def make_fleet(count: int) -> list[Any]:
    from tandem.http import Origin
    from tandem.router.engines import Engine, EngineRole

    urls = [f"http://e{i:03}:1" for i in range(count)]
    return [Engine(url, EngineRole.PREFILL, Origin.parse(url)) for url in urls]


def payloads(count: int, blocks: int, seed: int = 0) -> list[bytes]:
    """Batches as vLLM sends them, each of one prompt of its own."""
    import msgspec

    rng = random.Random(seed)
    made = []
    for _ in range(count):
        event = {
            "type": "BlockStored",
            "block_hashes": [rng.getrandbits(64) for _ in range(blocks)],
            "parent_block_hash": None,
            "token_ids": [rng.randrange(150_000) for _ in range(blocks * BLOCK)],
            "block_size": BLOCK,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None] * blocks,
            "group_idx": 0,
        }
        made.append(msgspec.msgpack.encode([0.0, [event], 0]))
    return made


def intake() -> dict[str, float]:
    from tandem.router.strategies import KvIndex
    from tandem.router.strategies.kv_wire import decode

    index = KvIndex()
    ranks = [index.follow(engine) for engine in make_fleet(8)]
    batches = payloads(1000, EVENT_BLOCKS)
    begun = time.perf_counter()
    for number, batch in enumerate(batches):
        for event in decode(batch)[0]:
            for piece in event.pieces():
                piece(index, ranks[number % 8])
    taken = time.perf_counter() - begun
    return {"intake_blocks_per_s": len(batches) * EVENT_BLOCKS / taken}


def rss() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory(engines: int) -> dict[str, float]:
    """2 million blocks, each held by one engine; resident memory more than before."""
    from tandem.router.strategies import KvIndex

    index, rng = KvIndex(), random.Random(3)
    ranks = [index.follow(engine) for engine in make_fleet(engines)]
    step = 250
    gc.collect()
    before = rss()
    longest = 0.0
    for number in range(INDEX_BLOCKS // step):
        ids = [rng.randrange(150_000) for _ in range(step * BLOCK)]
        hashes = [rng.getrandbits(64) for _ in range(step)]
        begun = time.perf_counter()
        index.store(ranks[number % engines], hashes, None, ids, BLOCK)
        longest = max(longest, time.perf_counter() - begun)
    del ids, hashes
    gc.collect()
    return {"mb": (rss() - before) / 1e6, "blocks": index.count, "longest_store_ms": longest * 1e3}


def choices(engines: int) -> dict[str, float]:
    """Microseconds of `choose` and `sent`, prompts of 2,000 tokens of which 1,000 are shared; the chain of a
    prompt is counted, as it is made once for each request."""
    from tandem.router.strategies import (
        DecoderLoad,
        DecoderScore,
        KvAware,
        KvIndex,
        KvPrefixes,
        LeastLoaded,
        PrefixAware,
        Prompt,
        RoundRobin,
        SentIndex,
        Session,
    )

    fleet, index = make_fleet(engines), KvIndex()
    rng = random.Random(5)
    shared = some_ids(1000)
    for engine in fleet:
        rank = index.follow(engine, complete=True)
        index.store(rank, list(range(1, 63)), None, shared[: 62 * BLOCK], BLOCK)
    load = DecoderLoad(10, 0.5, 0.1)
    strategies: dict[str, Any] = {
        "roundrobin": RoundRobin(),
        "leastloaded": LeastLoaded(rng),
        "session": Session(rng=rng),
        "prefixaware": PrefixAware(rng=rng),
        "kvaware": KvAware(KvPrefixes(index), rng=rng),
        "decoder": DecoderScore(lambda engine: load, SentIndex(), rng=rng),
    }
    tails = [some_ids(1000, seed) for seed in range(500)]
    result = {}
    for name, strategy in strategies.items():
        prompts = [Prompt(2000, shared + tail, session=str(i)) for i, tail in enumerate(tails)]
        strategy.choose(Prompt(10, session="first"), fleet)
        taken = []
        for prompt in prompts:
            begun = time.process_time_ns()
            choice = strategy.choose(prompt, fleet)
            strategy.sent(prompt, choice.engine)
            taken.append((time.process_time_ns() - begun) / 1000)
        result[name] = statistics.median(taken)
    return result


# --- streams beside events ---


def writer(folder: str, rate: int) -> None:
    """Chunks with their time for `STREAMS` connections, and events at a rate: another process."""
    import zmq

    context = zmq.Context()
    sockets = [context.socket(zmq.PUB) for _ in range(8)]
    for number, publisher in enumerate(sockets):
        publisher.bind(f"ipc://{folder}/events{number}")
    batches = payloads(400, EVENT_BLOCKS) if rate else []

    async def chunks(out: asyncio.StreamWriter, offset: float) -> None:
        await asyncio.sleep(offset)
        while True:
            out.write(b"%020d\n" % time.monotonic_ns())
            await asyncio.sleep(CHUNK_SECONDS)

    async def events() -> None:
        sent, begun, number = 0, time.monotonic(), 0
        while rate:
            while sent < (time.monotonic() - begun) * rate:  # also makes up for what was late
                sequence, which = divmod(number, len(sockets))
                batch = batches[number % len(batches)]
                sockets[which].send_multipart([b"", sequence.to_bytes(8, "big"), batch])
                sent, number = sent + EVENT_BLOCKS, number + 1
            await asyncio.sleep(0.002)

    async def main() -> None:
        opened = [await asyncio.open_unix_connection(f"{folder}/chunks") for _ in range(STREAMS)]
        tasks = [
            asyncio.create_task(chunks(out, CHUNK_SECONDS * i / STREAMS)) for i, (_, out) in enumerate(opened)
        ]
        await asyncio.gather(events(), *tasks)

    asyncio.run(main())


def streams(rate: int) -> dict[str, float]:
    """Delays of chunks, in milliseconds, from their writing to their reading."""
    import uvloop

    from tandem.config import Subscription
    from tandem.router.kv_events import Subscriber
    from tandem.router.strategies import KvIndex

    delays: list[int] = []
    first = asyncio.Event()

    class Reader(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            now = time.monotonic_ns()
            first.set()
            delays.extend(now - int(stamp) for stamp in data.split())

    async def main() -> dict[str, float]:
        with tempfile.TemporaryDirectory() as folder:
            server = await asyncio.get_running_loop().create_unix_server(Reader, f"{folder}/chunks")
            index = KvIndex()
            subscriber = Subscriber(index)
            for number, engine in enumerate(make_fleet(8)):
                subscriber.add(engine, Subscription(f"ipc://{folder}/events{number}"))
            process = await asyncio.create_subprocess_exec(
                sys.executable, __file__, "--part", "writer", folder, str(rate)
            )
            await first.wait()
            await asyncio.sleep(WARM_UP_SECONDS)
            delays.clear()
            batches, cpu, begun = subscriber.batches, time.process_time(), time.monotonic()
            await asyncio.sleep(STREAM_SECONDS)
            seconds = time.monotonic() - begun
            share = (time.process_time() - cpu) / seconds
            taken_in = (subscriber.batches - batches) * EVENT_BLOCKS / seconds
            process.kill()
            await process.wait()
            subscriber.close()
            server.close()
        delays.sort()
        at = {name: delays[int(len(delays) * q)] / 1e6 for name, q in (("p50", 0.5), ("p999", 0.999))}
        return {**at, "max": delays[-1] / 1e6, "cpu": share, "blocks_per_s": taken_in}

    return uvloop.run(main())


# --- one run ---


def part(*arguments: object, python: str = sys.executable) -> Any:
    """A measurement in a process of its own, so that none finds another's garbage."""
    command = [python, __file__, "--part", *map(str, arguments)]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


def measure(peer_python: str | None) -> dict[str, Any]:
    result: dict[str, Any] = {"peer": None}
    if peer_python:
        # Its tree works in a thread of its own, whose waking may take longer than its work.
        result["peer"] = best([part("peer", python=peer_python) for _ in range(3)])
    result["ours"] = best([{**part("chain", 8), **part("intake")} for _ in range(3)])
    result["ours_256"] = part("chain", 256)
    result["memory"] = {n: part("memory", n) for n in (8, 256)}
    result["choices"] = {n: part("choices", n) for n in (2, 8, 256)}
    runs = [(part("streams", 0), part("streams", RATE)) for _ in range(3)]
    result["streams"] = [{"without": without, "with": beside} for without, beside in runs]
    return result


def best(runs: list[dict[str, float]]) -> dict[str, float]:
    """The lowest time and the highest rate of each kind."""
    return {name: (max if name.endswith("_per_s") else min)(run[name] for run in runs) for name in runs[0]}


def table(result: dict[str, Any]) -> str:
    ours, theirs = result["ours"], result["peer"] or {}
    rows = [("", "Tandem", "Dynamo (Rust)")]

    def row(name: str, key: str, scale: float, unit: str) -> None:
        there = f"{theirs[key] * scale:,.2f} {unit}" if theirs else "–"
        rows.append((name, f"{ours[key] * scale:,.2f} {unit}", there))

    row(f"hash chain of {CHAIN_TOKENS:,} tokens", "chain_us", 1e-3, "ms")
    row(f"look-up of a {MATCH_BLOCKS}-block match, 8 engines", "lookup_us", 1, "µs")
    rows.append(("the same, 256 engines", f"{result['ours_256']['lookup_us']:,.2f} µs", "–"))
    row("event intake, blocks a second", "intake_blocks_per_s", 1e-3, "thousand")
    for engines, m in result["memory"].items():
        rows.append((f"2 million blocks, {engines} engines", f"{m['mb']:,.0f} MB", "–"))
        rows.append(("longest store of 250 blocks", f"{m['longest_store_ms']:,.1f} ms", "–"))
    for name in result["choices"][2]:
        costs = " / ".join(f"{each[name]:,.1f}" for each in result["choices"].values())
        rows.append((f"{name}: choose + sent, 2 / 8 / 256 engines", f"{costs} µs", "–"))
    for pair in result["streams"]:
        without, beside = pair["without"], pair["with"]
        rows.append(
            (
                f"chunk delay p99.9 without → with {beside['blocks_per_s']:,.0f} blocks/s",
                f"{without['p999']:.2f} → {beside['p999']:.2f} ms "
                f"(CPU {without['cpu']:.0%} → {beside['cpu']:.0%})",
                "–",
            )
        )
    widths = [max(len(r[i]) for r in rows) for i in range(3)]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) + " |" for r in rows]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


PARTS: dict[str, Callable[..., Any]] = {
    "peer": peer,
    "chain": lambda engines: chain_and_lookup(int(engines)),
    "intake": intake,
    "memory": lambda engines: memory(int(engines)),
    "choices": lambda engines: choices(int(engines)),
    "streams": lambda rate: streams(int(rate)),
    "writer": lambda folder, rate: writer(folder, int(rate)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--peer-python", help="a Python that has ai-dynamo-runtime")
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        name, *rest = arguments.part
        print(json.dumps(PARTS[name](*rest)))
        return
    result = measure(arguments.peer_python)
    print(table(result))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
