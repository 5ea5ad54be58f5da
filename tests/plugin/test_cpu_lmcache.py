"""LMCache's copies on CPU: bit for bit what vLLM wrote, and refusals in words where KV would be garbage."""

from __future__ import annotations

import builtins
import importlib
import sys
import types
import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

BLOCKS = 12


@pytest.fixture(scope="session")
def cpu_lmcache() -> Any:
    """The connector's module, with the real vLLM and LMCache below it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("vllm", reason="needs vLLM's CPU build: run `make setup`")
        pytest.importorskip("lmcache", reason="needs LMCache: run `make setup`")
        importlib.import_module("vllm.platforms").current_platform.import_kernels()
        return importlib.import_module("tandem_vllm.cpu_lmcache")


class Cache:
    """Layers of a cache as vLLM's CPU attention has them, full of what is in nobody's way."""

    def __init__(
        self, module: Any, layers: int, heads: int, block_size: int, head_size: int, dtype: Any
    ) -> None:
        import torch

        self.module, self.heads, self.block_size, self.head_size = module, heads, block_size, head_size
        shape = (BLOCKS, heads, block_size, 2 * head_size)
        self.layers = [torch.randn(shape).to(dtype) for _ in range(layers)]

    def written(self, keys: Any, values: Any, slots: Any) -> list[Any]:
        """A copy of the layers after vLLM's own write of [layers, tokens, heads, head size] at `slots`."""
        layers = [layer.clone() for layer in self.layers]
        write = self.module.vllm_write(layers[0].dtype, self.block_size, self.head_size)
        for layer, key, value in zip(layers, keys, values, strict=True):
            areas = layer.view(BLOCKS, self.heads, 2 * self.block_size, self.head_size).chunk(2, dim=2)
            write(key, value, *areas, slots)
        return layers

    def copier(self, chunk: int = 256) -> Any:
        shape = (len(self.layers), 2, chunk, self.heads, self.head_size)
        return self.module.CpuCopier(types.SimpleNamespace(kv_shape=shape))


def chunk_for(copier: Any, tokens: int, dtype: Any) -> Any:
    import torch

    tensor = torch.empty(copier.get_shape(tokens), dtype=dtype)
    return types.SimpleNamespace(tensor=tensor, metadata=types.SimpleNamespace(fmt=None))


def random_slots(tokens: int, block_size: int) -> Any:
    """Of a sequence: whole blocks in any order, the last one in part."""
    import torch

    blocks = torch.randperm(BLOCKS)[: -(-tokens // block_size)]
    return (blocks[:, None] * block_size + torch.arange(block_size)).view(-1)[:tokens]


FORMS = [
    ("bfloat16", 3, 128, 64),
    ("bfloat16", 1, 32, 128),
    ("bfloat16", 8, 64, 80),
    ("float16", 4, 96, 96),
    ("float32", 2, 128, 32),
    ("bfloat16", 1, 128, 512),  # more elements than two digits can count
]


@pytest.mark.parametrize(("dtype", "heads", "block_size", "head_size"), FORMS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_what_one_engine_wrote_is_bit_for_bit_in_the_chunks_and_in_the_other_engine(
    cpu_lmcache: Any, dtype: str, heads: int, block_size: int, head_size: int, data: st.DataObject
) -> None:
    import torch

    kind = getattr(torch, dtype)
    chunk = data.draw(st.sampled_from([block_size // 2, block_size, 2 * block_size]), label="chunk")
    tokens = data.draw(st.integers(1, 4 * block_size), label="tokens")
    torch.manual_seed(tokens)
    layers = 2
    keys, values = (torch.randn(layers, tokens, heads, head_size).to(kind) for _ in range(2))
    source, target = (Cache(cpu_lmcache, layers, heads, block_size, head_size, kind) for _ in range(2))
    from_slots, to_slots = random_slots(tokens, block_size), random_slots(tokens, block_size)
    starts = list(range(0, tokens, chunk))
    ends = [min(tokens, start + chunk) for start in starts]

    out, into = source.copier(), target.copier()
    chunks = [chunk_for(out, end - start, kind) for start, end in zip(starts, ends, strict=True)]
    filled = source.written(keys, values, from_slots)
    out.batched_from_gpu(chunks, starts, ends, kvcaches=filled, slot_mapping=from_slots)
    wanted = target.written(keys, values, to_slots)
    into.batched_to_gpu(chunks, starts, ends, kvcaches=target.layers, slot_mapping=to_slots)

    for each, start, end in zip(chunks, starts, ends, strict=True):
        of_tokens = each.tensor.view(2, layers, end - start, heads, head_size)
        assert torch.equal(of_tokens[0], keys[:, start:end])
        assert torch.equal(of_tokens[1], values[:, start:end])
    assert all(torch.equal(seen, want) for seen, want in zip(target.layers, wanted, strict=True))


def test_blocks_that_the_engine_has_itself_are_not_written(cpu_lmcache: Any) -> None:
    import torch

    tokens, known = 300, 128
    cache = Cache(cpu_lmcache, 2, 2, 64, 32, torch.bfloat16)
    copier, slots = cache.copier(), random_slots(tokens, 64)
    keys, values = (torch.randn(2, tokens, 2, 32).bfloat16() for _ in range(2))
    wanted = cache.written(keys[:, known:], values[:, known:], slots[known:])
    chunks = [chunk_for(copier, 256, torch.bfloat16), chunk_for(copier, 44, torch.bfloat16)]
    for each, start in zip(chunks, (0, 256), strict=True):
        part = slice(start, start + each.tensor.shape[2])
        each.tensor[0], each.tensor[1] = keys[:, part].flatten(2), values[:, part].flatten(2)
    copier.batched_to_gpu(
        chunks, [0, 256], [256, 300], kvcaches=cache.layers, slot_mapping=slots, vllm_cached_tokens=known
    )
    assert all(torch.equal(seen, want) for seen, want in zip(cache.layers, wanted, strict=True))


def test_an_order_that_is_none_is_found_out(cpu_lmcache: Any) -> None:
    import torch

    def write(keys: Any, values: Any, key_cache: Any, value_cache: Any, slots: Any) -> None:
        key_cache.copy_(keys.view(1, 1, 32, 32))  # and no values

    with pytest.raises(ValueError, match="is no permutation"):
        cpu_lmcache.learnt_order(write, torch.bfloat16, 32, 32)


def test_layers_of_several_forms_are_refused(cpu_lmcache: Any) -> None:
    import torch

    caches = [torch.zeros(4, 2, 32, 64), torch.zeros(4, 2, 64, 64)]
    with pytest.raises(ValueError, match=r"known are only layers that are alike, of \[blocks, 2, block size"):
        cpu_lmcache.KvCopies(caches, cpu_lmcache.vllm_order, 2)


class TestUnfit:
    @pytest.fixture
    def config(self) -> Any:
        return importlib.import_module("lmcache.v1.config").LMCacheEngineConfig.from_defaults(
            enable_pd=True, pd_role="receiver", pd_backend_mode="sync"
        )

    @pytest.fixture
    def metadata(self) -> Any:
        import torch

        return types.SimpleNamespace(kv_shape=(2, 2, 256, 3, 64), use_mla=False, kv_dtype=torch.bfloat16)

    def test_nothing_is_wrong_with_what_tandem_renders(
        self, cpu_lmcache: Any, config: Any, metadata: Any
    ) -> None:
        assert cpu_lmcache.unfit(config, metadata) is None

    @pytest.mark.parametrize(
        ("setting", "value", "said"),
        [
            ("use_layerwise", True, "LMCache #1174"),
            ("pd_backend_mode", "async", "LMCache #2847"),
            ("enable_blending", True, "for GPUs only"),
        ],
    )
    def test_settings_that_give_garbage_are_refused_with_the_reason(
        self, cpu_lmcache: Any, config: Any, metadata: Any, setting: str, value: Any, said: str
    ) -> None:
        setattr(config, setting, value)
        why = cpu_lmcache.unfit(config, metadata)
        assert setting in why
        assert said in why

    def test_kv_of_which_there_are_no_copies_is_refused(
        self, cpu_lmcache: Any, config: Any, metadata: Any
    ) -> None:
        import torch

        metadata.kv_dtype = torch.float8_e4m3fn
        assert "--kv-cache-dtype" in cpu_lmcache.unfit(config, metadata)
        metadata.use_mla = True
        assert "MLA" in cpu_lmcache.unfit(config, metadata)

    def test_a_gpu_gets_lmcaches_own_connector(
        self, cpu_lmcache: Any, config: Any, metadata: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config.use_layerwise = True
        monkeypatch.setattr(cpu_lmcache.lmcache_connectors, "torch_device_type", "cuda")
        monkeypatch.setattr(cpu_lmcache, "_stock", lambda *given: given)
        kind = cpu_lmcache.EngineType.VLLM
        assert cpu_lmcache._create(config, metadata, kind, None) == (config, metadata, kind, None)


def test_an_lmcache_that_failed_to_start_is_an_engine_that_did(
    cpu_lmcache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stock(self: Any, *args: Any) -> None:
        manager = types.SimpleNamespace(_init_failed=True, _init_failed_reason="no such port\n")
        self._lmcache_engine = types.SimpleNamespace(_manager=manager)

    monkeypatch.setattr(cpu_lmcache.LMCacheConnectorV1, "__init__", stock)
    with pytest.raises(RuntimeError, match=r"^LMCache cannot start: no such port$"):
        cpu_lmcache.CpuLMCacheConnector(None, None, None)


def test_what_could_not_be_loaded_is_neither_handed_over_nor_kept(
    cpu_lmcache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    def request(name: str, *blocks: int) -> Any:
        slots = (torch.tensor(blocks)[:, None] * 16 + torch.arange(16)).view(-1)
        return types.SimpleNamespace(req_id=name, slot_mapping=slots)

    unpinned: list[str] = []
    metadata = types.SimpleNamespace(requests=[request("a", 1, 2), request("b", 3, 4), request("c", 5)])
    connector = object.__new__(cpu_lmcache.CpuLMCacheConnector)
    connector._lmcache_engine = types.SimpleNamespace(
        _invalid_block_ids=set(),
        _block_size=16,
        lmcache_engine=types.SimpleNamespace(lookup_unpin=unpinned.append),
    )

    def stock(self: Any, context: Any) -> None:
        self._lmcache_engine._invalid_block_ids = {4, 9}

    monkeypatch.setattr(cpu_lmcache.LMCacheConnectorV1, "start_load_kv", stock)
    monkeypatch.setattr(connector, "_get_connector_metadata", lambda: metadata)
    connector.start_load_kv(None)
    assert [each.req_id for each in metadata.requests] == ["a", "c"]
    assert unpinned == ["b"]


def test_versions_that_do_not_fit_are_told_in_words(
    cpu_lmcache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def importing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "lmcache.v1.gpu_connector":
            raise ImportError("cannot import name 'CreateGPUConnector'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", importing)
    monkeypatch.delitem(sys.modules, "tandem_vllm.cpu_lmcache")
    with pytest.raises(
        ImportError, match=r"made for vllm 0\.32 with lmcache 0\.5\.6; here are vllm 0\.32\.0 and lmcache"
    ):
        importlib.import_module("tandem_vllm.cpu_lmcache")
