"""KV events over ZMQ as vLLM publishes them, and the replay of those missed.

Frames: topic, sequence number (8 bytes, big-endian), msgpack of `[timestamp, [event, …], dp_rank]`.
A replay request is `["", first sequence number]`; its answer ends with sequence -1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from tandem.sim.blocks import Event

_END = (-1).to_bytes(8, "big", signed=True)


@dataclass(frozen=True, kw_only=True)
class EventsConfig:
    """`--kv-events-config`; the same names."""

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    @property
    def enabled(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"


class Publisher:
    """Publishes one engine's events. Binds wildcard, IPv6 and ipc endpoints, connects to others, as vLLM."""

    def __init__(self, config: EventsConfig) -> None:
        """Raises zmq.ZMQError when an endpoint cannot be had."""
        self._topic = config.topic.encode()
        self._sequence = 0
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._encoder = msgspec.msgpack.Encoder()
        context: zmq.Context[Any] = zmq.Context.instance()
        self._publish = context.socket(zmq.PUB)
        self._replay: zmq.asyncio.Socket | None = None
        try:
            self._publish.set_hwm(config.hwm)
            if _is_bound(config.endpoint):
                self._publish.bind(config.endpoint)
            else:
                self._publish.connect(config.endpoint)
            if config.replay_endpoint is not None:
                self._replay = zmq.asyncio.Socket(context, zmq.ROUTER)
                self._replay.bind(config.replay_endpoint)
        except zmq.ZMQError:
            self.close()
            raise
        self.endpoint: str = self._publish.getsockopt_string(zmq.LAST_ENDPOINT)
        """With the port that was bound."""
        self.replay_endpoint: str | None = None
        if self._replay is not None:
            self.replay_endpoint = self._replay.getsockopt_string(zmq.LAST_ENDPOINT)

    def publish(self, now: float, events: Iterable[Event]) -> None:
        """One batch; `now` in seconds since 1970."""
        batch = self._encoder.encode([now, [event.as_event() for event in events], 0])
        sequence = self._sequence.to_bytes(8, "big")
        self._sequence += 1
        self._kept.append((sequence, batch))
        self._publish.send_multipart([self._topic, sequence, batch], zmq.NOBLOCK)

    async def serve_replays(self) -> None:
        """Answer replay requests until cancelled; does nothing without a replay endpoint."""
        while self._replay is not None:
            frames = await self._replay.recv_multipart()
            if len(frames) == 3:
                await self._answer(self._replay, frames[0], frames[2])

    async def _answer(self, socket: zmq.asyncio.Socket, client: bytes, first: bytes) -> None:
        for sequence, batch in list(self._kept):
            if int.from_bytes(sequence, "big") >= int.from_bytes(first, "big"):
                await socket.send_multipart([client, b"", self._topic, sequence, batch])
        await socket.send_multipart([client, b"", b"", _END, b""])

    def close(self) -> None:
        self._publish.close(linger=0)
        if self._replay is not None:
            self._replay.close(linger=0)


def _is_bound(endpoint: str) -> bool:
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def parse(value: dict[str, Any]) -> EventsConfig:
    """Raises ValueError (msgspec.ValidationError) for what vLLM would not take either."""
    return msgspec.convert(value, EventsConfig)
