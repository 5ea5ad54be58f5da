"""The NIXL hand-off, pull: the decoder reads the prefiller's blocks.

Prefiller: a request with `do_remote_decode` that ends by itself leaves its blocks held under a lease, and its
reply says where they are. Decoder: a request with `do_remote_prefill` reads them and notifies, which frees
them; while it waits for room it renews the lease. Nothing checks that the blocks still hold what they held:
a second use of the parameters, or one after the lease, reads whatever is there, as with the real one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from tandem.sim import ucx_log
from tandem.sim.blocks import Block, KvSource
from tandem.sim.handoff import Host
from tandem.sim.request import Finish, SimRequest, State
from tandem.sim.sidechannel import Listener, PeerLost, ask

logger = logging.getLogger("tandem.sim")

_WHERE = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


@dataclass(slots=True)
class Lease:
    blocks: list[Block]
    expires: float
    """Engine seconds of the prefiller."""
    timer: asyncio.TimerHandle


class Nixl:
    """One engine's side of it; every engine has both roles, whatever its kv_role says (as vLLM)."""

    def __init__(
        self,
        host: Host,
        *,
        side_channel: tuple[str, int],
        lease_seconds: float = 30.0,
        tensor_parallel: int = 1,
        listen: bool = True,
        tells: bool = False,
    ) -> None:
        """`side_channel`: what replies name as remote_host and remote_port; port 0 is a free one if it
        listens. `listen`: let engines of other processes in. `tells`: log over what KV comes."""
        self._host = host
        self._address = side_channel
        self._lease_seconds = lease_seconds
        self._tensor_parallel = tensor_parallel
        self._tells = tells
        self._listener = Listener(self._answer) if listen else None
        self._leases: dict[str, Lease] = {}
        self._lost: set[str] = set()
        self._known: set[str] = set()
        self._pulling: set[str] = set()
        self._renewing: dict[str, dict[str, Any]] = {}
        self._heartbeat: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def held(self) -> int:
        return len(self._leases)

    async def start(self) -> None:
        if self._listener is not None:
            host, port = self._address
            self._address = (host, await self._listener.start(host, port))
        self._host.network.listeners[self._address] = self

    async def close(self) -> None:
        self._closed = True
        if self._host.network.listeners.get(self._address) is self:
            del self._host.network.listeners[self._address]
        if self._listener is not None:
            await self._listener.close()
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        for lease in self._leases.values():
            lease.timer.cancel()
        self._leases.clear()

    # Prefiller

    def finished(self, request: SimRequest, finish: Finish) -> bool:
        params = request.kv_params or {}
        self._renewing.pop(request.id, None)
        if params.get("do_remote_prefill") and not request.looked_up:
            self.refused(params)  # it never came to reading
        if request.id in self._pulling:
            return True  # its blocks are being written; `_pull` lets go of them
        if not params.get("do_remote_decode") or finish not in (Finish.STOP, Finish.LENGTH):
            return False
        if self._host.fault("no-kv-params", request):
            return False
        host, port = self._address
        request.kv_reply = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[block.id for block in request.blocks]],
            "remote_engine_id": self._host.engine_id,
            "remote_request_id": request.id,
            "remote_host": host,
            "remote_port": port,
            "tp_size": self._tensor_parallel,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": request.computed,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
        }
        if request.generated == 1:
            request.kv_reply["remote_prefill_cached_tokens"] = request.local_hit + request.external
        return self._lease(request)

    def _lease(self, request: SimRequest) -> bool:
        if self._host.fault("stale-kv", request):
            for block in request.blocks:
                block.source = KvSource([], uuid4().bytes)
        if self._host.fault("expired-lease", request):
            self._host.stats.on_failure("expired")
            return False
        if self._host.fault("lost-kv", request):
            self._lost.add(request.id)
        expires = self._host.clock.now() + self._lease_seconds
        timer = self._host.clock.at(expires, lambda: self._expire(request.id))
        self._leases[request.id] = Lease(request.blocks, expires, timer)
        return True

    def _expire(self, request_id: str) -> None:
        self._free(request_id)
        self._host.stats.on_failure("expired")

    def _free(self, request_id: str) -> bool:
        self._lost.discard(request_id)
        lease = self._leases.pop(request_id, None)
        if lease is None:
            return False
        lease.timer.cancel()
        self._host.pool.release(lease.blocks)
        self._host.freed()
        return True

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """What a decoder asks: to read, to be done, to wait longer."""
        if self._closed or message["engine"] != self._host.engine_id:
            return {"error": "handshake"}
        match message["do"]:
            case "handshake":
                return {}
            case "read":
                return self._read(message["request"], message["blocks"])
            case "done":
                if not self._free(message["request"]):
                    self._host.stats.on_failure("late")
                return {}
            case "renew":
                for request_id in message["requests"]:
                    self._renew(request_id)
                return {}
        return {"error": "unknown"}

    def _renew(self, request_id: str) -> None:
        if (lease := self._leases.get(request_id)) is not None:
            lease.timer.cancel()
            lease.expires = self._host.clock.now() + self._lease_seconds
            lease.timer = self._host.clock.at(lease.expires, lambda: self._expire(request_id))

    def _read(self, request_id: str, ids: Sequence[int]) -> dict[str, Any]:
        """The KV of these blocks, whatever it is: each source once; (source, start, filled) of each block."""
        if request_id in self._lost or self._host.fault("lost-kv"):
            return {"error": "transfer"}
        sources: dict[int, int] = {}
        told: list[tuple[list[int], bytes]] = []
        blocks: list[tuple[int, int, int] | None] = []
        for i in ids:
            block = self._host.pool.blocks[i] if 0 < i < self._host.pool.size else None
            if block is None:
                return {"error": "transfer"}
            if block.source is None:
                blocks.append(None)
                continue
            if id(block.source) not in sources:
                sources[id(block.source)] = len(told)
                told.append((list(block.source.tokens), block.source.taint))
            blocks.append((sources[id(block.source)], block.start, block.filled))
        return {"sources": told, "blocks": blocks}

    # Decoder

    def queued(self, request: SimRequest) -> None:
        params = request.kv_params or {}
        if not params.get("do_remote_prefill"):
            return
        cached = params.get("remote_prefill_cached_tokens")
        if isinstance(cached, int):
            request.reported_cached = cached
        if all(params.get(name) is not None for name in _WHERE):
            self._renewing[request.id] = params
            self._schedule_heartbeat()

    def matched(self, request: SimRequest, local: int) -> int | None:
        params = request.kv_params or {}
        if not params.get("do_remote_prefill"):
            return 0
        return None if self._host.fault("full-buffer", request) else request.prompt_length - local

    def load(self, request: SimRequest, blocks: Sequence[Block]) -> None:
        params = request.kv_params or {}
        if not params.get("remote_block_ids"):
            self._host.crash()
        elif all(name in params for name in _WHERE):
            self._host.network.spawn(self._pull(request, params, list(blocks)))
        # else it waits for KV that never comes: what vLLM 0.32 does with such parameters

    def save(self, work: Sequence[tuple[SimRequest, int]], then: Callable[[], None]) -> None:
        then()

    def details(self) -> dict[str, Any]:
        return {}

    def refused(self, params: Mapping[str, Any]) -> None:
        if params.get("do_remote_prefill") and all(params.get(name) is not None for name in _WHERE):
            self._host.network.spawn(self._notify(params))

    async def _pull(self, request: SimRequest, params: Mapping[str, Any], blocks: list[Block]) -> None:
        self._pulling.add(request.id)
        try:
            await self._fill(request, params, blocks)
        except (PeerLost, _Refused) as error:
            self._host.stats.on_failure(error.kind if isinstance(error, _Refused) else "handshake")
            self._end_pull(request, ok=False)
        else:
            self._end_pull(request, ok=True)
            await self._notify(params)
        finally:
            self._pulling.discard(request.id)

    def _end_pull(self, request: SimRequest, *, ok: bool) -> None:
        self._pulling.discard(request.id)
        self._renewing.pop(request.id, None)
        if self._closed:
            return
        if request.state is State.LOADING:
            self._host.loaded(request, ok=ok)
        else:  # aborted meanwhile
            self._host.pool.release(request.blocks)
            self._host.freed()

    async def _fill(self, request: SimRequest, params: Mapping[str, Any], blocks: list[Block]) -> None:
        clock, profile = self._host.clock, self._host.profile
        remote = str(params["remote_engine_id"])
        if remote not in self._known:
            await clock.sleep(profile.kv_handshake)
            await self._ask(params, {"do": "handshake"})
            self._known.add(remote)
            if self._tells:
                address = (params["remote_host"], int(params["remote_port"]))
                ucx_log.tell(self._host.engine_id, local=address in self._host.network.listeners)
        ids = params["remote_block_ids"]
        ids = list(ids[0] if isinstance(ids[0], list) else ids)
        # With a local hit only the tail is read; where there are fewer blocks, the rest stays as it is.
        ids = ids[-len(blocks) :] if len(ids) > len(blocks) else ids
        size = len(ids) * self._host.pool.block_size * profile.kv_bytes_per_token
        started = clock.now()
        await clock.sleep(profile.transfer_seconds(size))
        if self._host.fault("lost-kv", request):
            raise _Refused("transfer")
        reply = await self._ask(params, {"do": "read", "request": params["remote_request_id"], "blocks": ids})
        sources = [KvSource(list(tokens), taint) for tokens, taint in reply["sources"]]
        for block, held in zip(blocks, reply["blocks"], strict=False):
            if held is not None:
                source, block.start, block.filled = held
                block.source = sources[source]
        seconds = clock.now() - started
        self._host.stats.on_transfer(seconds, size, _runs(ids, [block.id for block in blocks]))
        # In LMCache's form, which people grep for.
        logger.info(
            "Retrieved %d out of %d required tokens. size: %.4f gb, cost %.4f ms, throughput: %.4f GB/s",
            request.external,
            request.external,
            size / 1e9,
            seconds * 1000,
            size / 1e9 / max(seconds, 1e-9),
        )

    async def _notify(self, params: Mapping[str, Any]) -> None:
        try:
            await self._ask(params, {"do": "done", "request": params["remote_request_id"]})
        except (PeerLost, _Refused):
            self._host.stats.on_failure("notification")

    async def _ask(self, params: Mapping[str, Any], message: dict[str, Any]) -> dict[str, Any]:
        """Raises PeerLost or _Refused."""
        message["engine"] = params["remote_engine_id"]
        try:
            address = (str(params["remote_host"]), int(params["remote_port"]))
        except (TypeError, ValueError):
            raise _Refused("handshake") from None
        local = self._host.network.listeners.get(address)
        reply = local._answer(message) if local is not None else await ask(*address, message)
        if error := reply.get("error"):
            raise _Refused(error)
        return reply

    # Heartbeats

    def _schedule_heartbeat(self) -> None:
        if self._heartbeat is None and self._renewing and not self._closed:
            clock = self._host.clock
            interval = max(1.0, self._lease_seconds // 6)
            self._heartbeat = clock.at(clock.now() + interval, self._beat)

    def _beat(self) -> None:
        self._heartbeat = None
        groups: dict[tuple[str, int, str], tuple[dict[str, Any], list[str]]] = {}
        for params in self._renewing.values():
            key = (params["remote_host"], params["remote_port"], params["remote_engine_id"])
            groups.setdefault(key, (params, []))[1].append(params["remote_request_id"])
        for params, requests in groups.values():
            self._host.network.spawn(self._renew_at(params, requests))
        self._schedule_heartbeat()

    async def _renew_at(self, params: Mapping[str, Any], requests: list[str]) -> None:
        with suppress(PeerLost, _Refused):  # the read will tell
            await self._ask(params, {"do": "renew", "requests": requests})


class _Refused(Exception):
    """The other engine said no; `kind` as in `TransferStats.on_failure`."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


def _runs(remote: Sequence[int], local: Sequence[int]) -> int:
    """NIXL reads blocks that follow each other on both sides as one."""
    steps = [(r - q, b - a) for q, r, a, b in zip(remote, remote[1:], local, local[1:], strict=False)]
    return 1 + sum(step != (1, 1) for step in steps)
