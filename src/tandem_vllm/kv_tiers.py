"""What a prefiller on CPU keeps of the KV it has computed: chunks in host memory (L1) and in a Redis (L2).

LMCache's own host memory, with two differences:

- **A hand-off's tag is not in the keys.** The router gives each hand-off a tag of its own, which enters
  LMCache's keys (see tandem.router.connectors.lmcache). Under such keys nothing that is kept would be found
  again. All other tags stay, so prompts for another model or adapter, or with another `cache_salt`, share
  nothing.
- **Redis lies behind it**, in the place of LMCache's own remote store. A look-up fetches what Redis has into
  host memory, and finds it there: after that nothing can go wrong any more, where LMCache's own look-up
  promises what its store may fail to give, and the request fails. Redis has a patience of its own, after
  which the prompt is computed (LMCache's has none: its look-up of a store that hangs hangs, too). Writes are
  another thread's.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from tandem_vllm.kv_moves import MOVES
from tandem_vllm.redis_store import PAUSE_SECONDS, Address, RedisStore, StoreAway, StoreError

HAND_OFF_TAG = "lmcache.tag.req"
_WAITING_CHUNKS = 64
"""How many wait to be written to Redis; what comes beyond is not written."""

logger = logging.getLogger("vllm.tandem.kv_tiers")


def kept_key(key: Any) -> Any:
    """The key under which a chunk is kept: without the tag of the hand-off that it was computed for."""
    if not key.request_configs or HAND_OFF_TAG not in key.request_configs:
        return key
    others = {name: value for name, value in key.request_configs.items() if name != HAND_OFF_TAG}
    return dataclasses.replace(key, request_configs=others)


class Tiers(LocalCPUBackend):  # type: ignore[misc]  # LMCache is not there when types are checked
    """In the place of LMCache's LocalCPUBackend, whose name it keeps: LMCache finds it by that."""

    def __init__(self, config: Any, metadata: Any = None, *given: Any, **more: Any) -> None:
        super().__init__(config, metadata, *given, **more)
        self._redis: RedisStore | None = None
        self._writer: Writer | None = None
        self._fetched: set[Any] = set()
        if config.local_cpu and config.remote_url is not None:
            address = Address.parse(config.remote_url)
            config.remote_url = None  # LMCache would make its own
            self._redis = RedisStore(address)
            self._writer = Writer(RedisStore(address))
            self._writer.start()
            logger.info("L2 of the KV cache is the Redis at %s", address)

    def __str__(self) -> str:
        return "LocalCPUBackend"

    def contains(self, key: Any, pin: bool = False) -> bool:
        found: bool = super().contains(kept_key(key), pin)
        return found

    def batched_contains(self, keys: Sequence[Any], pin: bool = False) -> int:
        keys = [kept_key(key) for key in keys]
        found: int = super().batched_contains(keys, pin)
        if pin and self._redis is not None and found < len(keys):  # a prompt's look-up
            self._fetch(self._redis, keys[found:])
            found += super().batched_contains(keys[found:], pin)
        return found

    def submit_put_task(self, key: Any, memory_obj: Any, on_complete_callback: Any = None) -> Any:
        return super().submit_put_task(kept_key(key), memory_obj, on_complete_callback)

    def batched_submit_put_task(
        self,
        keys: Sequence[Any],
        memory_objs: Sequence[Any],
        transfer_spec: Any = None,
        on_complete_callback: Any = None,
    ) -> None:
        super().batched_submit_put_task(keys, memory_objs, transfer_spec, on_complete_callback)
        if self._writer is not None:
            for key, chunk in zip(keys, memory_objs, strict=True):
                self._writer.offer(kept_key(key).to_string(), chunk)

    def get_blocking(self, key: Any) -> Any:
        key = kept_key(key)
        chunk = super().get_blocking(key)
        if chunk is not None and key not in self._fetched:
            MOVES.add("l1_hit", chunk.get_size(), 0.0)
        self._fetched.discard(key)
        return chunk

    def pin(self, key: Any) -> bool:
        done: bool = super().pin(kept_key(key))
        return done

    def unpin(self, key: Any) -> bool:
        done: bool = super().unpin(kept_key(key))
        return done

    def remove(self, key: Any, force: bool = True) -> bool:
        key = kept_key(key)
        self._fetched.discard(key)
        done: bool = super().remove(key, force)
        return done

    def _fetch(self, redis: RedisStore, keys: Sequence[Any]) -> None:
        """Bring what Redis has of the first keys to host memory, as far as there is room and patience."""
        names = [key.to_string() for key in keys]
        deadline = redis.deadline()
        try:
            for key, name, size in zip(keys, names, redis.sizes(names, deadline), strict=True):
                chunk = self._room(size)
                if chunk is None:
                    return
                try:
                    begun = time.perf_counter()
                    if not redis.read(name, chunk.byte_array.cast("B"), deadline):
                        return
                    MOVES.add("l2_hit", size, time.perf_counter() - begun)
                    self._fetched.add(key)
                    self.submit_put_task(key, chunk)
                finally:
                    chunk.ref_count_down()
        except StoreError as error:
            told(redis, error)

    def _room(self, size: int) -> Any:
        """Where a chunk of so many bytes goes. None: there is no room, or it is no chunk of this model."""
        shapes, dtypes = self.metadata.get_shapes(1), self.metadata.get_dtypes()
        of_token = sum(math.prod(s) * d.itemsize for s, d in zip(shapes, dtypes, strict=True))
        tokens, rest = divmod(size, of_token)
        if rest or not 0 < tokens <= self.metadata.chunk_size:
            return None
        return self.allocate(self.metadata.get_shapes(tokens), dtypes, busy_loop=False)


class Writer(threading.Thread):
    """Writes chunks to Redis, while the engine goes on."""

    def __init__(self, redis: RedisStore) -> None:
        super().__init__(name="kv-l2-writer", daemon=True)
        self._redis = redis
        self._waiting: queue.Queue[tuple[str, Any]] = queue.Queue(_WAITING_CHUNKS)

    def offer(self, name: str, chunk: Any) -> None:
        """Write it, unless too many wait already. The chunk stays in memory until then."""
        chunk.ref_count_up()
        try:
            self._waiting.put_nowait((name, chunk))
        except queue.Full:
            chunk.ref_count_down()

    def run(self) -> None:
        while True:
            name, chunk = self._waiting.get()
            self.write(name, chunk)
            self._waiting.task_done()

    def settled(self) -> None:
        """Wait until everything that was offered is written, or given up."""
        self._waiting.join()

    def write(self, name: str, chunk: Any) -> None:
        try:
            with MOVES.timed("l2_write", chunk.get_size()):
                self._redis.write(name, chunk.byte_array.cast("B"), self._redis.deadline())
        except StoreError as error:
            told(self._redis, error)
        finally:
            chunk.ref_count_down()


def told(redis: RedisStore, error: StoreError) -> None:
    """Log a failure once, not what follows from it."""
    if not isinstance(error, StoreAway):
        logger.warning(
            "L2 of the KV cache, the Redis at %s: %s. The engine goes on without it; next try in %.0f s",
            redis.address,
            error,
            PAUSE_SECONDS,
        )
