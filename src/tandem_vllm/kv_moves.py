"""How much KV LMCache moves on CPU, and how long that takes: collected in an engine, told in its /metrics.

| metric | of what |
|---|---|
| `vllm:lmcache_gather_bytes_total`, `vllm:lmcache_gather_seconds` | copies out of vLLM's cache into chunks |
| `vllm:lmcache_push_bytes_total`, `vllm:lmcache_push_seconds` | writes of chunks into a decoder's buffer |
| `vllm:lmcache_scatter_bytes_total`, `vllm:lmcache_scatter_seconds` | copies of chunks into vLLM's cache |
| `vllm:lmcache_l1_hit_bytes_total` | chunks that were found in host memory |
| `vllm:lmcache_l2_hit_bytes_total`, `vllm:lmcache_l2_hit_seconds` | chunks read from Redis |
| `vllm:lmcache_l2_write_bytes_total`, `vllm:lmcache_l2_write_seconds` | chunks written to Redis |

vLLM takes what a connector has collected after each step, so what happens between two steps is told with the
next one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

KINDS = {
    "gather": "copies of KV out of the cache, into LMCache's chunks",
    "push": "writes of chunks into a decoder's buffer",
    "scatter": "copies of LMCache's chunks into the cache",
    "l1_hit": "chunks that were found in host memory (L1)",
    "l2_hit": "reads of chunks from Redis (L2)",
    "l2_write": "writes of chunks to Redis (L2)",
}
_UNTIMED = {"l1_hit"}
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class KvMoves:
    """Collects, from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found = _nothing()

    @contextmanager
    def timed(self, kind: str, size: int) -> Iterator[None]:
        """A move of so many bytes; one that fails does not count."""
        begun = time.perf_counter()
        yield
        self.add(kind, size, time.perf_counter() - begun)

    def add(self, kind: str, size: int, seconds: float) -> None:
        with self._lock:
            self._found[kind].append((size, seconds))

    def take(self) -> MoveStats | None:
        """What has been collected since the last time."""
        with self._lock:
            found, self._found = self._found, _nothing()
        stats = MoveStats(data=found)
        return None if stats.is_empty() else stats


class MoveStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not there when types are checked
    """Kind → (bytes, seconds) of each move."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data or _nothing())

    def reset(self) -> None:
        self.data = _nothing()

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def aggregate(self, other: Any) -> MoveStats:
        for kind, moves in other.data.items():
            self.data[kind].extend(moves)
        return self

    def reduce(self) -> dict[str, int | float]:
        told: dict[str, int | float] = {}
        for kind, moves in self.data.items():
            if moves:
                told[f"Num {kind}"] = len(moves)
                told[f"{kind} (MB)"] = round(_sum(moves, 0) / 1e6, 1)
                if kind not in _UNTIMED:
                    told[f"{kind} (ms)"] = round(_sum(moves, 1) * 1000, 1)
        return told


class MoveMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The metrics, in the process that serves them."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def made(metric: Any) -> Any:
            return create_metric_per_engine(metric, per_engine_labelvalues)

        self._bytes = {
            kind: made(
                self._counter_cls(f"vllm:lmcache_{kind}_bytes", f"Bytes of {what}.", labelnames=labelnames)
            )
            for kind, what in KINDS.items()
        }
        self._seconds = {
            kind: made(
                self._histogram_cls(
                    f"vllm:lmcache_{kind}_seconds",
                    f"Time of {what}.",
                    labelnames=labelnames,
                    buckets=_SECONDS,
                )
            )
            for kind, what in KINDS.items()
            if kind not in _UNTIMED
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for kind, moves in transfer_stats_data.items():
            for size, seconds in moves:
                self._bytes[kind][engine_idx].inc(size)
                if kind in self._seconds:
                    self._seconds[kind][engine_idx].observe(seconds)


def _nothing() -> dict[str, list[tuple[int, float]]]:
    return {kind: [] for kind in KINDS}


def _sum(moves: list[tuple[int, float]], which: int) -> float:
    return sum(move[which] for move in moves)


MOVES = KvMoves()
"""Those of this engine."""
