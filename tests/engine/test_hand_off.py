"""What engines on one machine are told to hand over through LMCache."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.api import ANNOTATION_CONNECTOR, Endpoint, Role
from tandem.engine import EngineError, EnginePlan, EnginePorts, Machine, hand_off_ranks, plan, switch

from .endpoints import S3, endpoint, manifest
from .test_launch import CPU, GPU, flags, only

ASKS = {ANNOTATION_CONNECTOR: "lmcache"}
WITH_LMCACHE = {"cpu": replace(CPU, lmcache="0.5.6"), "gpu": replace(GPU, lmcache="0.5.6")}
TOKEN_BYTES = 2 * 30 * 192 * 2


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """SmolLM2-135M, as far as planning reads it."""
    config = {
        "max_position_embeddings": 8192,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
        "intermediate_size": 1536,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def planned(resource: Endpoint, machine: Machine, model: Path) -> EnginePlan:
    pd = resource.spec.pd_spec
    assert pd is not None
    ranks = hand_off_ranks(resource, machine)

    def ports(first: int) -> tuple[int, ...]:
        return tuple(range(first, first + ranks))

    of_engines = [
        EnginePorts(
            http=8101 + i, side_channel=5601 + i, init=ports(7300 + 10 * i), alloc=ports(7400 + 10 * i)
        )
        for i in range(pd.prefill_spec.replicas + pd.decoding_spec.replicas)
    ]
    return plan(resource, machine, model, of_engines, notify_port=7500)


def loaded(environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """LMCache's own reading of an engine's variables."""
    config = pytest.importorskip("lmcache.v1.config", reason="needs LMCache: run `make setup`")
    for name, value in environment.items():
        if name.startswith("LMCACHE_"):
            monkeypatch.setenv(name, value)
    return config.LMCacheEngineConfig.from_env()


@pytest.mark.parametrize("machine", WITH_LMCACHE)
def test_lmcache_reads_both_halves_of_a_hand_off(
    model: Path, monkeypatch: pytest.MonkeyPatch, machine: str
) -> None:
    found = planned(endpoint(annotations=ASKS), WITH_LMCACHE[machine], model)
    assert found.connector.name == "lmcache"
    for role in Role:
        with monkeypatch.context() as patch:
            config = loaded(only(found.engines, role).env, patch)
        assert (config.enable_pd, config.pd_backend_mode, config.chunk_size) == (True, "sync", 256)
        assert (config.transfer_channel, config.nixl_backends) == ("nixl", ["UCX"])
        assert config.pd_buffer_device == ("cpu" if machine == "cpu" else "cuda")
        assert config.local_cpu is (role is Role.PREFILL and machine == "cpu")
        assert config.remote_url is None
        assert not config.use_layerwise
        if role is Role.PREFILL:
            assert config.pd_role == "sender"
            assert (config.pd_proxy_host, int(config.pd_proxy_port)) == ("127.0.0.1", 7500)
        else:
            assert config.pd_role == "receiver"
            assert config.pd_peer_host == "127.0.0.1"
            assert (config.pd_peer_init_port, config.pd_peer_alloc_port) == ([7310], [7410])
    seeds = {engine.env["PYTHONHASHSEED"] for engine in found.engines}
    assert seeds == {"0"}, "engines find each other's KV by Python's hashes"


@pytest.mark.parametrize("machine", WITH_LMCACHE)
def test_vllm_takes_the_command_lines(
    vllm_parse: Callable[[Sequence[str]], argparse.Namespace], model: Path, machine: str
) -> None:
    found = planned(endpoint(annotations=ASKS), WITH_LMCACHE[machine], model)
    prefill, decode = (vllm_parse(flags(only(found.engines, role))) for role in Role)
    assert prefill.max_num_batched_tokens == found.lmcache.step_tokens == 8192  # type: ignore[union-attr]
    assert decode.enable_prefix_caching is False
    names = {
        each.kv_transfer_config.get_from_extra_config("lmcache_rpc_port", "") for each in (prefill, decode)
    }
    assert names == {"prefill-8101", "decode-8102"}


def test_a_decoder_that_is_to_keep_prefixes_does_not(model: Path) -> None:
    resource = endpoint(["--enable-prefix-caching"], annotations=ASKS)
    found = planned(resource, WITH_LMCACHE["cpu"], model)
    assert switch(flags(only(found.engines, Role.DECODE)), "--enable-prefix-caching") is False
    assert switch(flags(only(found.engines, Role.PREFILL)), "--enable-prefix-caching") is True


def test_the_buffer_holds_four_of_the_longest_prompts_where_there_is_room_and_says_why(model: Path) -> None:
    found = planned(endpoint(annotations=ASKS), WITH_LMCACHE["cpu"], model)
    hand_off = found.lmcache
    assert hand_off is not None
    assert hand_off.buffer.bytes == 4 * 8192 * TOKEN_BYTES
    assert hand_off.buffer.chunks == 4 * 32
    (note,) = (note for note in found.notes if "PD_BUFFER_SIZE" in note)
    assert "23,040 bytes a token" in note
    assert "4.0 prompts of 8,192 tokens at once" in note


def test_the_buffers_of_all_engines_take_an_eighth_of_the_memory_at_most(model: Path) -> None:
    machine = replace(WITH_LMCACHE["cpu"], memory_bytes=4 << 30)
    found = planned(endpoint(prefillers=2, decoders=2, annotations=ASKS), machine, model)
    assert found.lmcache is not None
    assert 4 * found.lmcache.buffer.bytes <= (4 << 30) // 8
    assert found.lmcache.buffer.bytes % (256 * TOKEN_BYTES) == 0


def test_what_the_resource_says_of_the_buffer_counts(model: Path) -> None:
    size = [{"name": "PD_BUFFER_SIZE", "value": str(100 << 20)}]
    found = planned(endpoint(annotations=ASKS, env=size), WITH_LMCACHE["cpu"], model)
    assert found.lmcache is not None
    assert found.lmcache.buffer.bytes == 100 << 20
    too_small = [{"name": "PD_BUFFER_SIZE", "value": "1000"}]
    with pytest.raises(EngineError, match=r"PD_BUFFER_SIZE.*do not hold one chunk of 256 tokens"):
        planned(endpoint(annotations=ASKS, env=too_small), WITH_LMCACHE["cpu"], model)


def test_each_rank_of_a_gpus_decoder_takes_kv_at_ports_of_its_own(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = planned(manifest(S3), WITH_LMCACHE["gpu"], model)
    assert found.lmcache is not None
    assert found.lmcache.ranks == 8
    decoder = only(found.engines, Role.DECODE)
    config = loaded(decoder.env, monkeypatch)
    assert config.pd_peer_init_port == list(range(7320, 7328))
    assert decoder.receiver == (
        "127.0.0.1:7320,7321,7322,7323,7324,7325,7326,7327:7420,7421,7422,7423,7424,7425,7426,7427"
    )


def test_roles_with_other_ranks_cannot_hand_over(model: Path) -> None:
    resource = endpoint(decode_args=["--tensor-parallel-size", "2"], annotations=ASKS)
    with pytest.raises(EngineError, match="each rank writes to its own counterpart"):
        planned(resource, WITH_LMCACHE["gpu"], model)


def test_variables_of_a_hand_off_in_the_manifest_are_replaced_and_it_is_told(model: Path) -> None:
    """Also where validation had no say, as its resource was for NIXL."""
    for name, value, own in (
        ("LMCACHE_PD_BACKEND_MODE", "async", "sync"),
        ("LMCACHE_USE_LAYERWISE", "true", "false"),
    ):
        found = planned(
            endpoint(annotations=ASKS, env=[{"name": name, "value": value}]), WITH_LMCACHE["cpu"], model
        )
        assert {engine.env[name] for engine in found.engines} == {own}
        assert any(name in note and "replaced" in note for note in found.notes)


REDIS = {"l2CacheBackend": "redis", "l2CacheLocalUrl": "redis://cache:6379"}


def test_prefillers_keep_kv_as_the_resource_asks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = planned(
        endpoint(annotations=ASKS, caches={"enableL2Cache": True, "l2CacheSpec": REDIS}),
        WITH_LMCACHE["cpu"],
        model,
    )
    with monkeypatch.context() as patch:
        prefill = loaded(only(found.engines, Role.PREFILL).env, patch)
    assert (prefill.local_cpu, prefill.remote_url) == (True, "redis://cache:6379")
    assert prefill.max_local_cpu_size == pytest.approx(CPU.memory_bytes / 8 / (1 << 30), abs=0.001)
    assert prefill.enable_pd
    with monkeypatch.context() as patch:
        decode = loaded(only(found.engines, Role.DECODE).env, patch)
    assert (decode.local_cpu, decode.remote_url) == (False, None)
    assert any("L1: " in note and "L2 in Redis" in note for note in found.notes)


@pytest.mark.parametrize(
    "given",
    [
        {"enableL1Cache": False, "enableL2Cache": True, "l2CacheSpec": REDIS},  # L2 is behind L1
        {"enableL2Cache": False, "l2CacheSpec": REDIS},
        {"enableL2Cache": True, "l2CacheSpec": {"l2CacheBackend": "tieredstorage"}},
        {"enableL2Cache": True, "l2CacheSpec": REDIS | {"l2CacheLocalUrl": "rediss://cache:6379"}},
    ],
)
def test_without_a_redis_to_use_there_is_no_l2(
    model: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    found = planned(endpoint(annotations=ASKS, caches=given), WITH_LMCACHE["cpu"], model)
    config = loaded(only(found.engines, Role.PREFILL).env, monkeypatch)
    assert config.remote_url is None
    assert config.local_cpu is given.get("enableL1Cache", True)
    tls = "rediss://" in str(given)
    assert any("l2CacheLocalUrl: left out" in note for note in found.notes) is tls


def test_l1_is_as_large_as_a_variable_says(model: Path) -> None:
    size = [{"name": "LMCACHE_MAX_LOCAL_CPU_SIZE", "value": "0.5"}]
    found = planned(endpoint(annotations=ASKS, env=size), WITH_LMCACHE["cpu"], model)
    assert only(found.engines, Role.PREFILL).env["LMCACHE_MAX_LOCAL_CPU_SIZE"] == "0.5"


def test_where_nothing_would_be_found_again_nothing_is_kept(model: Path) -> None:
    found = planned(endpoint(annotations=ASKS, caches={"enableL1Cache": True}), WITH_LMCACHE["gpu"], model)
    assert only(found.engines, Role.PREFILL).env["LMCACHE_LOCAL_CPU"] == "false"
    assert any(note.startswith("spec.kvCacheSpec: left out") for note in found.notes)


def test_without_lmcache_nothing_of_it_is_there(model: Path) -> None:
    found = planned(endpoint(), WITH_LMCACHE["cpu"], model)
    assert found.lmcache is None
    assert all(engine.receiver is None for engine in found.engines)
    assert not any(name.startswith("LMCACHE_") for engine in found.engines for name in engine.env)
    assert hand_off_ranks(endpoint(), WITH_LMCACHE["cpu"]) == 0
