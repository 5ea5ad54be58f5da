"""KV events over ZMQ: frames, batches, replay. In real time: ZMQ has threads of its own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from .helpers import FOX, Engines, engines, flags


def with_events(folder: Path, **more: Any) -> list[str]:
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{folder}/events",
        **more,
    }
    return flags("--kv-events-config", json.dumps(config))


async def subscriber(e: Engines) -> zmq.asyncio.Socket:
    """Connected, which a first event proves."""
    socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
    publisher = e[0].engine.publisher
    assert publisher is not None
    socket.connect(publisher.endpoint)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    i = 0
    while not await socket.poll(20):
        i += 1
        await e.complete(0, [100 + i] * 16, max_tokens=1)
    while await socket.poll(20):
        await socket.recv_multipart()
    return socket


async def test_events_have_vllms_frames(tmp_path: Path) -> None:
    async with engines(with_events(tmp_path, topic="kv"), time_scale=50) as e:
        socket = await subscriber(e)
        ids = (await e.ask(0, "/tokenize", {"prompt": FOX * 4})).json["tokens"]
        await e.complete(0, FOX * 4, max_tokens=1)
        topic, sequence, batch = await socket.recv_multipart()
        stamp, (event,), rank = msgspec.msgpack.decode(batch)
        assert (topic, len(sequence), rank) == (b"kv", 8, 0)
        assert abs(stamp - e[0].engine.clock.wall()) < 5
        assert (event["type"], event["block_size"], event["token_ids"]) == ("BlockStored", 16, ids[:32])
        await e.complete(0, FOX * 8, max_tokens=1)
        _, next_sequence, batch = await socket.recv_multipart()
        (longer,) = msgspec.msgpack.decode(batch)[1]
        assert int.from_bytes(next_sequence) == int.from_bytes(sequence) + 1
        assert longer["parent_block_hash"] == event["block_hashes"][-1]
        socket.close(linger=0)


async def test_missed_events_are_replayed(tmp_path: Path) -> None:
    command = with_events(tmp_path, replay_endpoint=f"ipc://{tmp_path}/replay")
    async with engines(command, time_scale=50) as e:
        for i in range(3):
            await e.complete(0, [10 + i] * 32, max_tokens=1)
        asking = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        asking.connect(f"ipc://{tmp_path}/replay")
        await asking.send_multipart([b"", (1).to_bytes(8, "big")])
        sequences = []
        while True:
            async with asyncio.timeout(10):
                _, topic, sequence, batch = await asking.recv_multipart()
            if int.from_bytes(sequence, "big", signed=True) == -1:
                assert (topic, batch) == (b"", b"")
                break
            sequences.append(int.from_bytes(sequence, "big"))
            assert msgspec.msgpack.decode(batch)[1][0]["type"] == "BlockStored"
        assert sequences == [1, 2]
        asking.close(linger=0)


async def test_where_events_come_from_is_told(tmp_path: Path) -> None:
    async with engines(with_events(tmp_path), flags()) as e:
        told = (await e.ask(0, "/kv_event_sources")).json["0"]
        assert told["endpoint"] == f"ipc://{tmp_path}/events"
        assert (await e.ask(1, "/kv_event_sources")).json == {}
