"""A subscriber of an engine's KV events, and what of them is compared."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from .pairs import EventSource

WITHIN_SECONDS = 60.0
END = (-1).to_bytes(8, "big", signed=True)

Touch = Callable[[], Awaitable[list[int]]]
"""Has the engine compute one more block of tokens, which it returns."""


@dataclass
class Batch:
    """One message: its frames, what is in the last of them, and what of it all is compared."""

    frames: tuple[bytes, bytes, bytes]
    events: list[dict[str, Any]]
    shape: dict[str, Any]

    @property
    def sequence(self) -> int:
        return int.from_bytes(self.frames[1], "big")


@dataclass
class Hashes:
    """Names for blocks: by the type of their hash and the order in which they were stored, so that what is
    said of a block can be compared, but not its hash."""

    names: dict[object, str] = field(default_factory=dict)

    def stored(self, block_hash: object) -> str:
        return self.names.setdefault(block_hash, f"{type(block_hash).__name__} {len(self.names)}")

    def known(self, block_hash: object) -> str | None:
        return None if block_hash is None else self.names.get(block_hash, "stored before")


@dataclass
class Subscriber:
    """Of one engine. `touch` makes events that mark where to stop reading, so that none that came before can
    be missed."""

    socket: zmq.asyncio.Socket
    touch: Touch
    hashes: Hashes = field(default_factory=Hashes)

    async def until_now(self) -> list[Batch]:
        """Every batch since the last call."""
        marker = await self.touch()
        batches: list[Batch] = []
        async with asyncio.timeout(WITHIN_SECONDS):
            while True:
                batches.append(self._batch(await self.socket.recv_multipart()))
                stored = [e for e in batches[-1].events if e["type"] == "BlockStored"]
                if any(e["token_ids"] == marker for e in stored):
                    return batches[:-1]

    def _batch(self, frames: Sequence[bytes]) -> Batch:
        topic, sequence, payload = frames
        stamp, events, rank = msgspec.msgpack.decode(payload)
        shape = {
            "topic": topic,
            "sequence bytes": len(sequence),
            "timestamp": type(stamp).__name__,
            "rank": rank,
            "events": [self._event(event) for event in events],
        }
        return Batch((topic, sequence, payload), events, shape)

    def _event(self, event: dict[str, Any]) -> dict[str, Any]:
        """Of token ids, which may be an answer's, the number counts."""
        shape = dict(event)
        if event["type"] == "BlockStored":
            shape["parent_block_hash"] = self.hashes.known(event["parent_block_hash"])
            shape["block_hashes"] = [self.hashes.stored(value) for value in event["block_hashes"]]
            shape["token_ids"] = len(event["token_ids"])
        elif "block_hashes" in event:
            shape["block_hashes"] = [self.hashes.known(value) for value in event["block_hashes"]]
        return shape


@asynccontextmanager
async def subscribed(source: EventSource, touch: Touch) -> AsyncIterator[Subscriber]:
    """Connected, which a first event proves."""
    socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
    try:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(source.endpoint)
        async with asyncio.timeout(WITHIN_SECONDS):
            await touch()
            while not await socket.poll(100):
                await touch()
        subscriber = Subscriber(socket, touch)
        await subscriber.until_now()
        yield subscriber
    finally:
        socket.close(linger=0)


async def replayed(source: EventSource, first: int) -> list[list[bytes]]:
    """The frames of the answer to a request for all batches from `first` on, its end included."""
    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    try:
        socket.connect(source.replay)
        await socket.send_multipart([b"", first.to_bytes(8, "big")])
        frames: list[list[bytes]] = []
        async with asyncio.timeout(WITHIN_SECONDS):
            while not frames or frames[-1][-2] != END:
                frames.append(await socket.recv_multipart())
        return frames
    finally:
        socket.close(linger=0)
