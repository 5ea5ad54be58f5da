"""How the engines of one machine hand over through LMCache, as they and their router have to know it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tandem.api import Endpoint, Role
from tandem.engine.args import flag_value
from tandem.engine.kv_cache import GIB, L1_BYTES, KvCache, cache_settings, kv_cache
from tandem.engine.kv_size import count, model_names, token_size
from tandem.engine.lmcache import (
    BACKEND_MODE,
    Receiver,
    Sender,
    as_variables,
    equal_ranks,
    hand_off_settings,
    hand_off_step,
    receive_buffer,
)
from tandem.engine.machine import Machine
from tandem.engine.pd_buffer import VARIABLE, PdBuffer
from tandem.engine.pod_variables import DEFAULT_HASH_SEED, lmcache_variable
from tandem.engine.roles import int_flag, literal_environment, model_config, pd_spec

BUFFER_SHARE = 8
"""One part in this many of the available memory is room for receive and send buffers on a CPU, all engines
together: half of what KV caches take."""

_PATH = "spec.kvCacheSpec"

L1_SHARE = 8
"""One part in this many of the available memory is L1, of all prefillers together: as much as the buffers."""

L1_VARIABLE = lmcache_variable("max_local_cpu_size")
"""In GiB: a manifest may have another."""


@dataclass(frozen=True)
class LMCacheHandOff:
    buffer: PdBuffer
    """Of each rank of a decoder to receive, and of a prefiller to send from."""
    step_tokens: int
    """What a prefiller computes in one step; a longer prompt is computed by a decoder alone."""
    ranks: int
    """Tensor-parallel, of both roles."""
    host: str
    notify_port: int
    """Where prefillers tell the router that KV is there."""
    device: Literal["cpu", "cuda"]
    cache: KvCache
    """What prefillers keep."""
    l1_bytes: int
    """Of each prefiller, if it has L1."""
    left_out: str | None = None
    """What of kvCacheSpec is not there."""

    @property
    def notes(self) -> Iterator[str]:
        """What was decided, one line each."""
        yield self.buffer.reason
        if self.cache.l1:
            l2 = "" if self.cache.redis_url is None else ", and L2 in Redis behind it"
            yield f"L1: {self.l1_bytes / GIB:.1f} GiB of each prefiller{l2}; {L1_VARIABLE} sets another size"
        if self.left_out is not None:
            yield self.left_out

    def default_variables(self, role: Role) -> dict[str, str]:
        """What an engine has unless the manifest says otherwise."""
        l1 = {L1_VARIABLE: f"{self.l1_bytes / GIB:.3f}"} if self.cache.of_role(role) else {}
        return {"PYTHONHASHSEED": DEFAULT_HASH_SEED, "LMCACHE_TRACK_USAGE": "false", **l1}

    def variables(self, role: Role, init_ports: Sequence[int], alloc_ports: Sequence[int]) -> dict[str, str]:
        """What an engine is told that takes KV on these ports, if it is a decoder."""
        side: Sender | Receiver
        if role is Role.PREFILL:
            side = Sender(self.host, self.notify_port)
        else:
            side = Receiver(init_ports, alloc_ports, self.host)
        settings = hand_off_settings(side, buffer_bytes=self.buffer.bytes, backend="UCX", device=self.device)
        caches = cache_settings(self.cache, role, l1_bytes=self.l1_bytes)
        caches.pop("max_local_cpu_size", None)
        return as_variables({**caches, **settings, **BACKEND_MODE})


def lmcache_hand_off(
    endpoint: Endpoint,
    machine: Machine,
    model: Path,
    args: Mapping[Role, Sequence[str]],
    *,
    engines: int,
    host: str,
    notify_port: int,
) -> LMCacheHandOff:
    """`args`: each role's flags; `engines`: how many there are in all. Raises EngineError."""
    config = model_config(model)
    ranks = equal_ranks(*(int_flag(args[role], "--tensor-parallel-size") or 1 for role in Role))
    contexts = (int_flag(args[role], "--max-model-len") for role in Role)
    context = min(filter(None, contexts), default=None) or count(config, "max_position_embeddings")
    token = token_size(
        config or None,
        model_names(endpoint),
        tp=ranks,
        kv_cache_dtype=flag_value(args[Role.DECODE], "--kv-cache-dtype"),
    )
    on_cpu = machine.accelerator == "cpu"
    caches, left_out = _caches(endpoint, on_cpu=on_cpu)
    prefillers = pd_spec(endpoint).role(Role.PREFILL).replicas
    return LMCacheHandOff(
        buffer=receive_buffer(
            token,
            longest=context,
            given=literal_environment(endpoint).get(VARIABLE),
            room=machine.memory_bytes // BUFFER_SHARE // engines if on_cpu else None,
        ),
        step_tokens=int_flag(args[Role.PREFILL], "--max-num-batched-tokens") or hand_off_step(context),
        ranks=ranks,
        host=host,
        notify_port=notify_port,
        device="cpu" if on_cpu else "cuda",
        cache=caches,
        left_out=left_out,
        l1_bytes=min(L1_BYTES, machine.memory_bytes // L1_SHARE // prefillers),
    )


def _caches(endpoint: Endpoint, *, on_cpu: bool) -> tuple[KvCache, str | None]:
    """What prefillers keep here, and a note where that is not what the resource asks for."""
    asked = kv_cache(endpoint.spec)
    if not on_cpu:
        # LMCache's own connector keeps KV under keys that have the tag of one hand-off.
        left_out = f"{_PATH}: left out; behind LMCache's own connector nothing that is kept is found again"
        return replace(asked, l1=False), left_out if endpoint.spec.kv_cache_spec else None
    if asked.l1 and asked.redis_url is not None and not asked.redis_url.startswith("redis://"):
        left_out = f"{_PATH}.l2CacheSpec.l2CacheLocalUrl: left out; on a CPU it must be redis://HOST:PORT"
        return replace(asked, redis_url=None), left_out
    return asked, None
