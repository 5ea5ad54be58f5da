"""The prefiller's side of LMCache PD, in its mode sync: after every step, what the step computed is sent.

The engine stands still until the receiver has given it chunks, however long that takes. The write then runs
beside the engine, one after the other, and its end is told to the router; whether before or after the
request's own answer, the request's id decides here, as chance does there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any
from uuid import uuid4

from tandem.sim.blocks import Block, KvSource
from tandem.sim.cost import CostProfile
from tandem.sim.handoff import Host
from tandem.sim.lmcache.keys import Key, Keys, tags_of
from tandem.sim.lmcache.notify import Push, encoded
from tandem.sim.lmcache.reply import reply
from tandem.sim.lmcache.settings import Settings
from tandem.sim.request import Finish, SimRequest, State
from tandem.sim.sidechannel import PeerLost, ask

logger = logging.getLogger("tandem.sim")

_FIELDS = ("req_id", "receiver_host", "receiver_init_port", "receiver_alloc_port")
_FAILED = "NIXL_ERR_REMOTE_DISCONNECT"


@dataclass(eq=False, slots=True)
class Transfer:
    """One request's way to its receiver, over all its steps."""

    req_id: Any
    host: str
    init_port: int
    alloc_port: int
    sent: int = 0
    """Tokens that earlier steps sent."""
    last: bool = False
    """Whether the prompt's last step was sent: a write that ends from now on is told to the router, also an
    earlier step's. LMCache keeps this for all writes of a request where the engine is one process."""
    preemptions: int = 0


@dataclass(eq=False, slots=True, kw_only=True)
class Store:
    """What one step computed of one request, to be sent."""

    request_id: str
    transfer: Transfer
    source: KvSource
    spans: list[tuple[int, int]]
    keys: list[Key]
    last: bool
    lost: bool
    """Whether a fault makes the write fail, the notification be left out or come so many seconds late."""
    silent: bool
    delay: float
    full: Callable[[], bool]
    """Whether a fault says that the receiver has no room."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A receiver as the handshake found it; kept for ever."""

    init: tuple[str, int]
    alloc: tuple[str, int]
    agent: str


class Sender:
    """`page_bytes`: of a chunk, in one rank's buffer."""

    def __init__(self, host: Host, settings: Settings, keys: Keys, *, ranks: int, page_bytes: int) -> None:
        self._host = host
        self._settings = settings
        self._keys = keys
        self._ranks = ranks
        self._page_bytes = page_bytes
        self._free_pages = settings.buffer_bytes // page_bytes
        self._transfers: dict[str, Transfer] = {}
        self._ended: dict[str, Transfer] = {}
        self._peers: dict[str, Peer] = {}
        self._writing = asyncio.Lock()
        self._pending = 0
        self._push: Push | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._timers: set[asyncio.TimerHandle] = set()
        self._closed = False

    @property
    def held(self) -> int:
        return self._pending

    def details(self) -> dict[str, Any]:
        return {"send_buffer": {"free": self._free_pages}}

    async def start(self) -> None:
        """Raises OSError."""
        if self._settings.proxy is not None and self._host.network.notify is None:
            host, port = self._settings.proxy
            self._push = Push(f"tcp://{host}:{port}")

    async def close(self) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        for timer in self._timers:
            timer.cancel()
        if self._push is not None:
            self._push.close()

    # The engine

    def queued(self, request: SimRequest) -> None:
        pass

    def matched(self, request: SimRequest, local: int) -> int | None:
        """Nothing is ever found. But here LMCache reads the disagg_spec, and dies of one it cannot read."""
        params = request.kv_params or {}
        if "disagg_spec" in params and not _readable(params["disagg_spec"]):
            logger.error("disagg_spec cannot be read: %r", params["disagg_spec"])
            self._host.crash()
            return None
        return 0

    def load(self, request: SimRequest, blocks: Sequence[Block]) -> float | None:
        raise AssertionError("nothing is ever matched")

    def save(self, work: Sequence[tuple[SimRequest, int]], then: Callable[[], None]) -> None:
        stores = []
        if self._settings.active:
            for request, tokens in work:
                if request.kv_params and "disagg_spec" in request.kv_params:
                    # A request that was aborted during the step was computed all the same.
                    running = request.state is State.RUNNING
                    end = request.computed if running else request.computed + tokens
                    if (store := self._store(request, end)) is not None:
                        stores.append(store)
                    if self._host.dead:
                        return
        self._ended.clear()
        if stores:
            self._pending += len(stores)
            self._spawn(self._send_all(stores, then))
        else:
            then()

    def finished(self, request: SimRequest, finish: Finish) -> bool:
        if (transfer := self._transfers.pop(request.id, None)) is not None:
            self._ended[request.id] = transfer  # the step that it was aborted in is sent all the same
        reply(request, self._host)
        return False

    def refused(self, params: Mapping[str, Any]) -> None:
        pass

    # From the engine to the receiver

    def _store(self, request: SimRequest, end: int) -> Store | None:
        """What is to be sent now that the first `end` tokens are computed. Crashes where LMCache does."""
        transfer = self._transfer(request)
        if transfer is None:
            return None
        size = self._settings.chunk_size
        last = end >= request.prompt_length
        if transfer.preemptions != request.preemptions or self._ranks > 1:
            # It starts over. And where ranks are processes of their own, they forget what was sent.
            transfer.preemptions, transfer.sent = request.preemptions, 0
        until = end if last and self._settings.save_partial_chunks else end // size * size
        start = transfer.sent // size * size
        if transfer.sent == until:
            return None
        transfer.sent = until
        tokens = request.tokens[:until]
        keys = self._keys.of(tokens, tags_of(request.kv_params))[start // size :]
        spans = [(i, min(size, until - i)) for i in range(start, until, size)]
        fault = self._host.fault
        source = KvSource(tokens, request.kv.taint)
        if fault("stale-kv", request):
            source = KvSource([], uuid4().bytes)
        return Store(
            request_id=request.id,
            transfer=transfer,
            source=source,
            spans=spans,
            keys=keys,
            last=last,
            lost=fault("lost-kv", request),
            silent=fault("lost-notification", request),
            delay=self._host.fault_value("late-notification", request),
            full=lambda: fault("full-buffer", request),
        )

    def _transfer(self, request: SimRequest) -> Transfer | None:
        transfer = self._transfers.get(request.id) or self._ended.get(request.id)
        if transfer is not None:
            return transfer
        assert request.kv_params is not None
        spec = request.kv_params["disagg_spec"]
        try:
            init, alloc = ([int(spec[name][r]) for r in range(self._ranks)] for name in _FIELDS[2:])
        except (TypeError, KeyError, IndexError, ValueError) as error:
            logger.error("%s: ports of %r", type(error).__name__, spec)
            self._host.crash()
            return None
        transfer = Transfer(spec["req_id"], spec["receiver_host"], init[0], alloc[0])
        if request.state is State.RUNNING:
            self._transfers[request.id] = transfer
        return transfer

    async def _send_all(self, stores: Sequence[Store], then: Callable[[], None]) -> None:
        """Until everything is under way; then the engine goes on."""
        for store in stores:
            store.transfer.last = store.transfer.last or store.last
            count = min(len(store.keys), self._free_pages)
            if count < len(store.keys):
                logger.warning(
                    "Local cpu memory under pressure so choosing to store only  %d total chunks of KV cache.",
                    count,
                )
                if not count:
                    self._pending -= 1
                    continue
                del store.keys[count:], store.spans[count:]
            self._free_pages -= count
            profile = self._host.profile
            size = count * self._settings.chunk_size * profile.kv_bytes_per_token
            await self._host.clock.sleep(size / profile.kv_bandwidth)  # out of the engine's memory
            peer = await self._connect(store.transfer)
            while store.full():
                await self._host.clock.sleep(self._settings.retry_seconds)
            reply = await self._allocate(peer, store)
            _log_stored(store, profile)
            write = self._spawn(self._write(peer, store, reply))
            if _early(store.transfer.req_id):
                await asyncio.wait([write])
        then()

    async def _connect(self, transfer: Transfer) -> Peer:
        """The receiver's agent. Waits for ever where nobody listens."""
        peer_id = f"{transfer.host}{transfer.init_port}"
        if (peer := self._peers.get(peer_id)) is None:
            init = (transfer.host, transfer.init_port)
            reply = await self._reach(init, {"do": "handshake"})
            await self._host.clock.sleep(self._host.profile.kv_handshake)
            peer = self._peers[peer_id] = Peer(init, (transfer.host, transfer.alloc_port), reply["agent"])
        return peer

    async def _allocate(self, peer: Peer, store: Store) -> dict[str, Any]:
        """Waits for ever for room, for a receiver to come, or in vain for one that died with the question."""
        reply = await self._reach(peer.alloc, {"do": "allocate", "keys": [str(key) for key in store.keys]})
        if "chunks" not in reply:
            logger.warning("waiting for chunks of the receiver at %s:%d", *peer.alloc)
        while "chunks" not in reply:
            await self._host.clock.sleep(self._settings.retry_seconds)
            try:
                reply = await self._ask(peer.alloc, {"do": "allocated", "ticket": reply["ticket"]})
            except PeerLost:
                await asyncio.get_running_loop().create_future()
        return reply

    async def _write(self, peer: Peer, store: Store, reply: Mapping[str, Any]) -> None:
        """One at a time. Without a word to the router if it fails."""
        async with self._writing:
            failure = await self._written(peer, store, reply)
        self._pending -= 1
        self._free_pages += len(store.keys)
        if failure:
            logger.error("NIXL write failed in worker thread: %s", failure)
        elif store.last if self._ranks > 1 else store.transfer.last:
            self._notify(store)

    async def _written(self, peer: Peer, store: Store, reply: Mapping[str, Any]) -> str:
        """What went wrong, or nothing. Chunks that the receiver has already are not sent."""
        already = set(reply["already"])
        spans = [span for i, span in enumerate(store.spans) if i not in already]
        if not spans:
            return ""
        profile = self._host.profile
        size = len(spans) * self._settings.chunk_size * profile.kv_bytes_per_token
        await self._host.clock.sleep(profile.transfer_seconds(size))
        if store.lost:
            return "NIXL_ERR_BACKEND"
        message = {
            "do": "write",
            "agent": peer.agent,
            "page_bytes": self._page_bytes,
            "chunks": reply["chunks"],
            "spans": spans,
            "source": (store.source.tokens, store.source.taint),
        }
        try:
            return str((await self._ask(peer.init, message)).get("error", ""))
        except PeerLost:
            return _FAILED

    def _notify(self, store: Store) -> None:
        if self._settings.proxy is None or store.silent:
            return
        message = encoded(store.transfer.req_id)
        host, port = self._settings.proxy
        send = self._host.network.notify

        def tell() -> None:
            for _ in range(self._ranks):
                if send is not None:
                    send(f"tcp://{host}:{port}", message)
                elif self._push is not None:
                    self._push.send(message)

        if not store.delay:
            tell()
            return

        def late() -> None:
            self._timers.discard(timer)
            tell()

        timer = self._host.clock.at(self._host.clock.now() + store.delay, late)
        self._timers.add(timer)

    async def _reach(self, address: tuple[str, int], message: dict[str, Any]) -> dict[str, Any]:
        """As `_ask`, waiting until somebody is there."""
        told = False
        while True:
            try:
                return await self._ask(address, dict(message))
            except PeerLost:
                if not told:
                    logger.warning("waiting for somebody to listen at %s:%d", *address)
                    told = True
                await self._host.clock.sleep(self._settings.retry_seconds)

    async def _ask(self, address: tuple[str, int], message: dict[str, Any]) -> dict[str, Any]:
        """Raises PeerLost."""
        local = self._host.network.listeners.get(address)
        reply: dict[str, Any] = local._answer(message) if local is not None else await ask(*address, message)
        return reply

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._host.network.spawn(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _log_stored(store: Store, profile: CostProfile) -> None:
    tokens = sum(n for _, n in store.spans)
    size = tokens * profile.kv_bytes_per_token
    seconds = max(size / profile.kv_bandwidth, 1e-9)
    logger.info(
        "[req_id=%s] Stored %d out of total %d tokens. size: %.4f GB, cost %.4f ms, throughput: %.4f GB/s",
        store.request_id,
        tokens,
        tokens,
        size / 1024**3,
        seconds * 1000,
        size / 1024**3 / seconds,
    )


def _readable(spec: object) -> bool:
    return (
        isinstance(spec, dict) and all(f in spec for f in _FIELDS) and isinstance(spec["receiver_host"], str)
    )


def _early(req_id: Any) -> bool:
    """Whether the notification comes before the answer."""
    return bool(blake2b(str(req_id).encode(), digest_size=1).digest()[0] & 1)
