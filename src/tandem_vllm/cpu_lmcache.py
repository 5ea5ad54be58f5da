"""`CpuLMCacheConnector`: vLLM's LMCache connector for engines on CPU.

LMCache 0.5.6 moves KV between vLLM's cache and its own chunks by kernels for accelerators, and has none for
CPU. Here it gets one (see `cpu_kv_copies`). What else differs from the stock connector:

- LMCache that cannot start is an engine that cannot. The stock one logs it and goes on without LMCache; a
  prefiller then answers and hands over nothing.
- Settings under which LMCache hands over garbage or hangs are refused.
- What prefillers keep is found again, and a Redis that fails fails no request (see `kv_tiers`).
- NIXL's progress thread pauses between polls, and the engine stays on its cores (see `nixl_agents`).

Imported by vLLM only when an engine asks for the connector.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tandem_vllm.cpu_kv_copies import KvCopies, Write, learnt_order
from tandem_vllm.kv_moves import MOVES, MoveMetrics, MoveStats
from tandem_vllm.nixl_agents import kept_affinity, nixl_api, paced_progress, progress_delay_us

MADE_FOR = {"vllm": "0.32", "lmcache": "0.5.6"}


def _installed(package: str) -> str:
    """The version of a package, under whatever name its build for CPU has."""
    for name in (package, f"{package}-cpu"):
        try:
            return f"{package} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"no {package}"


try:
    import lmcache.v1.gpu_connector as lmcache_connectors
    import lmcache.v1.storage_backend as storage_backends
    import vllm._custom_ops as ops
    from lmcache.utils import EngineType
    from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
    from lmcache.v1.memory_management import MemoryFormat
    from lmcache.v1.transfer_channel.nixl_channel import NixlChannel
    from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1
    from vllm.logger import init_logger
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    from tandem_vllm.kv_tiers import Tiers

    _stock = lmcache_connectors.CreateGPUConnector
    _stock_l1 = storage_backends.LocalCPUBackend
    _push = NixlChannel.batched_write
    _write = ops.cpu_attn_reshape_and_cache
except (ImportError, AttributeError) as error:
    made_for = " with ".join(f"{name} {version}" for name, version in MADE_FOR.items())
    raise ImportError(
        f"CpuLMCacheConnector was made for {made_for}; here are {_installed('vllm')} and "
        f"{_installed('lmcache')}, which it does not fit ({error}). Install the pinned CPU stack, or hand "
        "over by NIXL alone."
    ) from error

# vLLM's logging configuration shows only loggers below `vllm`.
logger = init_logger("vllm.tandem.cpu_lmcache")


def _timed_push(self: Any, objects: Sequence[Any], transfer_spec: Any = None) -> Any:
    with MOVES.timed("push", sum(each.get_size() for each in objects)):
        return _push(self, objects, transfer_spec)


NixlChannel.batched_write = _timed_push


class CpuLMCacheConnector(LMCacheConnectorV1):  # type: ignore[misc]  # vLLM is not there when types are checked
    """The stock connector, with copies for CPU."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        with _for_cpu():
            super().__init__(vllm_config, role, kv_cache_config)
        self._check_started()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        with _for_cpu():  # hand-offs over NIXL are set up here
            super().register_kv_caches(kv_caches)
        self._check_started()

    def start_load_kv(self, forward_context: Any, **given: Any) -> None:
        super().start_load_kv(forward_context, **given)
        self._drop_failed_loads()

    def _drop_failed_loads(self) -> None:
        """A request whose KV could not be loaded fails, and what is in its blocks is nothing. LMCache would
        hand that over and keep it for others all the same."""
        adapter = self._lmcache_engine
        if not adapter._invalid_block_ids:
            return
        invalid = torch.tensor(sorted(adapter._invalid_block_ids))
        metadata, whole = self._get_connector_metadata(), []
        for request in metadata.requests:
            if torch.isin(request.slot_mapping // adapter._block_size, invalid).any():
                adapter.lmcache_engine.lookup_unpin(request.req_id)
                logger.warning("%s: its KV could not be loaded, and is not kept", request.req_id)
            else:
                whole.append(request)
        metadata.requests = whole

    def get_kv_connector_stats(self) -> MoveStats | None:
        return MOVES.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> MoveStats:
        return MoveStats(data)

    @classmethod
    def build_prom_metrics(cls, *given: Any) -> MoveMetrics:
        return MoveMetrics(*given)

    def _check_started(self) -> None:
        """Raises RuntimeError where LMCache has failed to start, which it only logs."""
        manager = self._lmcache_engine._manager
        if manager._init_failed:
            raise RuntimeError(f"LMCache cannot start: {manager._init_failed_reason.strip()}")


@contextmanager
def _for_cpu() -> Iterator[None]:
    """What LMCache makes inside the block is made for CPU."""
    lmcache_connectors.CreateGPUConnector = _create
    storage_backends.LocalCPUBackend = Tiers
    try:
        with kept_affinity(), paced_progress(nixl_api(), progress_delay_us(os.environ)):
            yield
    finally:
        lmcache_connectors.CreateGPUConnector = _stock
        storage_backends.LocalCPUBackend = _stock_l1


def _create(config: Any, metadata: Any, engine: Any, layout_hints: Any = None) -> Any:
    """In the place of LMCache's own factory. Raises ValueError for what cannot be done."""
    if engine != EngineType.VLLM or lmcache_connectors.torch_device_type != "cpu":
        return _stock(config, metadata, engine, layout_hints)
    why = unfit(config, metadata)
    if why is not None:
        raise ValueError(why)
    return CpuCopier(metadata)


def unfit(config: Any, metadata: Any) -> str | None:
    """Why an engine must not run so: LMCache's settings and the model's KV. None: it may."""
    if config.use_layerwise:
        return (
            "use_layerwise (LMCACHE_USE_LAYERWISE): is not supported: with prefill and decode apart LMCache "
            "then recomputes or dies (LMCache #1174), and on CPU it has no use. Set it to false"
        )
    if config.enable_pd and config.pd_backend_mode != "sync":
        return (
            f"pd_backend_mode (LMCACHE_PD_BACKEND_MODE): is {config.pd_backend_mode!r}; in this mode a "
            "request without a hand-off kills a prefiller, and aborted ones fill a decoder's buffer for good "
            "(LMCache #2847). Set it to sync"
        )
    if config.enable_blending:
        return "enable_blending (LMCACHE_ENABLE_BLENDING): LMCache has it for GPUs only. Set it to false"
    if metadata.use_mla:
        return "the model's attention (MLA) keeps its KV in a form of which there are no copies on CPU"
    if metadata.kv_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"--kv-cache-dtype: there are no copies of {metadata.kv_dtype} on CPU. Leave it out"
    return None


class CpuCopier(GPUConnectorInterface):  # type: ignore[misc]
    """What LMCache calls to copy KV out of vLLM's cache and into it."""

    def __init__(self, metadata: Any) -> None:
        self._layers, _, _, self._heads, self._head_size = metadata.kv_shape
        self._copies: KvCopies | None = None

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([2, self._layers, num_tokens, self._heads * self._head_size])

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        self._of(kwargs).gather(memory_obj.tensor, kwargs["slot_mapping"][start:end])
        memory_obj.metadata.fmt = MemoryFormat.KV_2LTD

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        # What vLLM has itself may be in blocks that other requests read: it is never written again.
        known = min(end - start, max(0, kwargs.get("vllm_cached_tokens", 0) - start))
        slots = kwargs["slot_mapping"][start + known : end]
        self._of(kwargs).scatter(memory_obj.tensor[:, :, known:], slots)

    def batched_from_gpu(
        self, memory_objs: Sequence[Any], starts: Sequence[int], ends: Sequence[int], **kwargs: Any
    ) -> None:
        with MOVES.timed("gather", _bytes(memory_objs)):
            for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
                self.from_gpu(memory_obj, start, end, **kwargs)

    def batched_to_gpu(
        self, memory_objs: Sequence[Any], starts: Sequence[int], ends: Sequence[int], **kwargs: Any
    ) -> None:
        with MOVES.timed("scatter", _bytes(memory_objs)):
            for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
                self.to_gpu(memory_obj, start, end, **kwargs)

    def _of(self, kwargs: Any) -> KvCopies:
        if self._copies is None:  # vLLM's cache stays where it is
            self._copies = KvCopies(kwargs["kvcaches"], vllm_order, self._heads)
            logger.info("LMCache copies KV of %d layers on CPU", self._layers)
        return self._copies


def _bytes(memory_objs: Sequence[Any]) -> int:
    return sum(each.tensor.nbytes for each in memory_objs)


def vllm_order(dtype: torch.dtype, block_size: int, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`learnt_order` of this processor."""
    return learnt_order(vllm_write(dtype, block_size, head_size), dtype, block_size, head_size)


def vllm_write(dtype: torch.dtype, block_size: int, head_size: int) -> Write:
    """vLLM's own, as its CPU attention calls it."""
    isa = _get_attn_isa(dtype, block_size, head_size, "auto")

    def write(
        keys: torch.Tensor,
        values: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        _write(keys, values, key_cache, value_cache, slots, isa)

    return write
