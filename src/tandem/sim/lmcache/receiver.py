"""The decoder's side of LMCache PD: it gives senders chunks of its buffer, and loads what it finds there.

Allocations are served one at a time, first come, first served. One that waits for room keeps the chunks it
has, and all later ones wait behind it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import uuid4

from tandem.sim.blocks import Block, KvSource
from tandem.sim.handoff import Host
from tandem.sim.lmcache.buffer import Allocation, ReceiveBuffer, fill
from tandem.sim.lmcache.keys import Key, Keys, parse, tags_of
from tandem.sim.lmcache.reply import reply
from tandem.sim.lmcache.settings import Settings
from tandem.sim.request import Finish, SimRequest
from tandem.sim.sidechannel import Listener

logger = logging.getLogger("tandem.sim")


class Receiver:
    """`page_bytes`: of a chunk, in one rank's buffer. `listen`: let engines of other processes in."""

    def __init__(
        self, host: Host, settings: Settings, keys: Keys, *, page_bytes: int, listen: bool = True
    ) -> None:
        self.buffer = ReceiveBuffer(settings.buffer_bytes // page_bytes)
        self._host = host
        self._settings = settings
        self._keys = keys
        self._page_bytes = page_bytes
        self._agent = uuid4().hex
        self._listeners = [Listener(self._answer) for _ in range(2)] if listen else []
        self._allocations: dict[str, Allocation] = {}
        self._waiting: deque[Allocation] = deque()
        self._retry: asyncio.TimerHandle | None = None
        self._stuck: Allocation | None = None
        self._jammed = False
        self._hits: dict[str, int] = {}
        self._closed = False

    @property
    def held(self) -> int:
        return self.buffer.used

    def details(self) -> dict[str, Any]:
        b = self.buffer
        buffer = {
            "chunks": b.total,
            "used": b.used,
            "free": b.free,
            "allocations_waiting": len(self._waiting),
        }
        return {"receive_buffer": buffer}

    async def start(self) -> None:
        """Raises OSError when a port cannot be had."""
        addresses = self._addresses
        for listener, address in zip(self._listeners, addresses, strict=False):
            await listener.start(*address)
        for address in addresses:
            self._host.network.listeners[address] = self

    async def close(self) -> None:
        self._closed = True
        for address in self._addresses:
            if self._host.network.listeners.get(address) is self:
                del self._host.network.listeners[address]
        for listener in self._listeners:
            await listener.close()
        if self._retry is not None:
            self._retry.cancel()

    @property
    def _addresses(self) -> tuple[tuple[str, int], tuple[str, int]]:
        # All ranks do the same: the first one stands for them.
        settings = self._settings
        return (settings.peer_host, settings.init_ports[0]), (settings.peer_host, settings.alloc_ports[0])

    # What senders ask

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        if self._closed:
            return {"error": "NIXL_ERR_REMOTE_DISCONNECT"}
        match message["do"]:
            case "handshake":
                return {"agent": self._agent}
            case "allocate":
                return self._allocate(message["keys"])
            case "allocated":
                return self._allocated(message["ticket"])
            case "write":
                return self._write(message)
        return {"error": "unknown"}

    def _allocate(self, texts: Sequence[str]) -> dict[str, Any]:
        ticket = uuid4().hex
        try:
            allocation = Allocation([parse(text) for text in texts])
        except ValueError as error:
            # LMCache's thread never answers this one, and then cannot take another.
            logger.error("Failed to process mem alloc loop: %s", error)
            self._jammed = True
            return {"ticket": ticket}
        if not self._jammed:
            self._allocations[ticket] = allocation
            self._waiting.append(allocation)
            if len(self._waiting) == 1:
                self._serve()
        return self._allocated(ticket)

    def _allocated(self, ticket: str) -> dict[str, Any]:
        allocation = self._allocations.get(ticket)
        if allocation is None or not allocation.done:
            return {"ticket": ticket}
        del self._allocations[ticket]
        return {"agent": self._agent, "already": allocation.already, "chunks": allocation.chunks}

    def _serve(self) -> None:
        self._retry = None
        while self._waiting:
            if not self.buffer.allocate(self._waiting[0], full=self._host.fault("full-buffer")):
                if self._stuck is not self._waiting[0]:
                    self._stuck = self._waiting[0]
                    logger.warning("Failed to allocate memory object, retrying...")
                clock = self._host.clock
                self._retry = clock.at(clock.now() + self._settings.retry_seconds, self._serve)
                return
            self._waiting.popleft()

    def _write(self, message: Mapping[str, Any]) -> dict[str, Any]:
        if message["agent"] != self._agent:
            return {"error": "NIXL_ERR_REMOTE_DISCONNECT"}
        if message["page_bytes"] != self._page_bytes:
            return {"error": "NIXL_ERR_INVALID_PARAM"}  # pages of different length
        if self._host.fault("lost-kv"):
            return {"error": "NIXL_ERR_BACKEND"}
        tokens, taint = message["source"]
        self.buffer.write(message["chunks"], message["spans"], KvSource(list(tokens), taint))
        return {}

    # The engine

    def queued(self, request: SimRequest) -> None:
        pass

    def matched(self, request: SimRequest, local: int) -> int | None:
        if not self._settings.active:
            return 0
        if (hit := self._hits.get(request.id)) is None:
            hit = self._hits[request.id] = self._look_up(request)
            logger.info(
                "Reqid: %s, Total tokens %d, Inference Engine computed tokens: %d, LMCache hit tokens: %d",
                request.id,
                request.prompt_length,
                local,
                hit,
            )
        # Of a whole prompt, the last token is computed again for its successor.
        return max(0, hit - local - (hit == request.prompt_length))

    def _look_up(self, request: SimRequest) -> int:
        """Tokens of the prompt's prefix that are in the buffer. They stay there for anyone to take."""
        tokens = request.prompt
        if self._settings.skip_last_tokens:
            tokens = tokens[: -self._settings.skip_last_tokens]
        found = self.buffer.prefix(self._lookup_keys(request, tokens))
        return min(found * self._settings.chunk_size, len(tokens))

    def _lookup_keys(self, request: SimRequest, tokens: Sequence[int]) -> list[Key]:
        tags = tags_of(request.kv_params)
        if not all(isinstance(value, str) for _, value in tags):
            return []  # came over the wire as text, and is compared with what is none
        return self._keys.of(tokens, tags)

    def load(self, request: SimRequest, blocks: Sequence[Block]) -> float | None:
        hit, local = self._hits[request.id], request.local_hit
        size = self._settings.chunk_size
        first = local // size  # whole chunks that the engine has itself are not taken, and stay for ever
        keys = self._lookup_keys(request, request.prompt[:hit])[first:]
        held = list(blocks)
        # After the step is put together, as in the engine: two requests of one step both count on the chunks.
        asyncio.get_running_loop().call_soon(self._retrieve, request, keys, held, hit)
        profile = self._host.profile
        return len(keys) * size * profile.kv_bytes_per_token / profile.kv_bandwidth

    def _retrieve(self, request: SimRequest, keys: Sequence[Key], blocks: Sequence[Block], hit: int) -> None:
        if self._closed:
            return
        try:
            chunks = self.buffer.retrieve(keys)
        except KeyError as error:
            logger.error("AssertionError: Key %s not found in local data.", error.args[0])
            self._host.crash()
            return
        size, local = self._settings.chunk_size, request.local_hit
        fill(blocks, local, hit, self._host.pool.block_size, chunks, size)
        required = hit - local // size * size
        gigabytes = required * self._host.profile.kv_bytes_per_token / 1024**3
        seconds = len(keys) * size * self._host.profile.kv_bytes_per_token / self._host.profile.kv_bandwidth
        logger.info(
            "[req_id=%s] Retrieved %d out of %d required tokens (from %d total tokens). size: %.4f gb, "
            "cost %.4f ms, throughput: %.4f GB/s;",
            request.id,
            required,
            required,
            hit,
            gigabytes,
            seconds * 1000,
            gigabytes / max(seconds, 1e-9),
        )

    def save(self, work: Sequence[tuple[SimRequest, int]], then: Callable[[], None]) -> None:
        then()

    def finished(self, request: SimRequest, finish: Finish) -> bool:
        self._hits.pop(request.id, None)
        reply(request, self._host)
        return False

    def refused(self, params: Mapping[str, Any]) -> None:
        pass
