"""What `spec.kvCacheSpec` asks for, as LMCache has it: an L1 in host memory, an L2 in a Redis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tandem.api import Role, Spec
from tandem.engine.pd_buffer import CHUNK_TOKENS

GIB = 1 << 30
L1_BYTES = 16 * GIB
"""Of each rank, where the memory allows."""


@dataclass(frozen=True)
class KvCache:
    l1: bool
    redis_url: str | None
    """The shared store, where it is Redis."""
    tiered: bool
    """Whether HyperPod's own tiered storage is asked for."""
    file: str | None
    """An LMCache configuration in the model container, in place of the rest."""

    def of_role(self, role: Role | None) -> bool:
        """Whether engines of a role have L1 (None: of a colocated endpoint). Decoders have no caches: what
        they load was sent to them."""
        return self.l1 and role is not Role.DECODE


def kv_cache(spec: Spec) -> KvCache:
    given = dict(spec.kv_cache_spec or {})
    l2 = dict(given.get("l2CacheSpec") or {}) if given.get("enableL2Cache", False) else {}
    backend = str(l2.get("l2CacheBackend", "")).lower()
    return KvCache(
        l1=given.get("enableL1Cache", True),
        redis_url=l2.get("l2CacheLocalUrl") if "redis" in backend else None,
        tiered="tieredstorage" in backend,
        file=given.get("cacheConfigFile") or None,
    )


def cache_settings(cache: KvCache, role: Role | None, *, l1_bytes: int) -> dict[str, Any]:
    """LMCache's settings for chunks, L1 and L2. `l1_bytes`: L1's size on each rank, if there is one.

    On prefillers LMCache has L2 beside L1 alone: it moves blocks through L1's memory, which is else missing.
    """
    l1 = cache.of_role(role)
    keys: dict[str, Any] = {"chunk_size": CHUNK_TOKENS, "save_unfull_chunk": False, "local_cpu": l1}
    if l1:
        keys["max_local_cpu_size"] = l1_bytes / GIB
    if cache.redis_url is not None and (l1 or role is None):
        keys |= {"remote_url": cache.redis_url, "remote_serde": "naive"}
    return keys
