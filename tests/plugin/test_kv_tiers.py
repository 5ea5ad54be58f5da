"""What prefillers on CPU keep, with LMCache's own memory: found again by whoever may find it, and in time."""

from __future__ import annotations

import importlib
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ..redis_server import RedisServer, redis_server

LAYERS, HEADS, HEAD_SIZE, CHUNK = 3, 2, 16, 64


@pytest.fixture(scope="session")
def tiers() -> Any:
    """The module, with the real LMCache below it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("vllm", reason="needs vLLM's CPU build: run `make setup`")
        pytest.importorskip("lmcache", reason="needs LMCache: run `make setup`")
        return importlib.import_module("tandem_vllm.kv_tiers")


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


Made = Callable[..., Any]


@pytest.fixture
def made(tiers: Any) -> Iterator[Made]:
    """The tiers of one engine. `url`: of its Redis."""
    import torch

    metadata = importlib.import_module("lmcache.v1.metadata").LMCacheMetadata(
        model_name="m",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.bfloat16,
        kv_shape=(LAYERS, 2, CHUNK, HEADS, HEAD_SIZE),
        chunk_size=CHUNK,
        role="worker",
    )

    every: list[Any] = []

    def make(url: str | None = None, *, gib: float = 0.01) -> Any:
        config = importlib.import_module("lmcache.v1.config").LMCacheEngineConfig.from_defaults(
            local_cpu=True, max_local_cpu_size=gib, remote_url=url, chunk_size=CHUNK
        )
        importlib.import_module("lmcache.v1.pin_monitor").PinMonitor.GetOrCreate(config, metadata)
        built = tiers.Tiers(config, metadata, "cpu")
        assert config.remote_url is None, "LMCache makes no store of its own"
        every.append(built)
        return built

    yield make
    for one in every:
        if one._redis is not None:
            written(one)
            one._redis.close()
            one._writer._redis.close()


def key(of: int, hand_off: str, **tags: str) -> Any:
    import torch

    configs = {"lmcache.tag.req": hand_off} | {f"lmcache.tag.{name}": value for name, value in tags.items()}
    kind = importlib.import_module("lmcache.utils").CacheEngineKey
    return kind("m", 1, 0, of, torch.bfloat16, configs)


def keep(tiers: Any, keys: list[Any], tokens: int = CHUNK) -> list[Any]:
    """Random KV kept under the keys, as after a prefill."""
    import torch

    chunks = []
    for _ in keys:
        shape = torch.Size([2, LAYERS, tokens, HEADS * HEAD_SIZE])
        chunk = tiers.allocate([shape], [torch.bfloat16], busy_loop=False)
        chunk.tensor.copy_(torch.randn(shape))
        chunks.append(chunk)
    tiers.batched_submit_put_task(keys, chunks)
    values = [chunk.tensor.clone() for chunk in chunks]
    for chunk in chunks:
        chunk.ref_count_down()
    return values


def got(tiers: Any, keys: list[Any]) -> list[Any]:
    chunks = tiers.batched_get_blocking(keys)
    values = [chunk.tensor.clone() for chunk in chunks]
    for chunk in chunks:
        chunk.ref_count_down()
    return values


def written(tiers: Any) -> None:
    """Wait until nothing waits to be written to Redis."""
    tiers._writer.settled()


def test_what_one_hand_off_computed_another_finds(tiers: Any, made: Made) -> None:
    import torch

    one = made()
    kept = keep(one, [key(1, "a"), key(2, "a")])
    again = [key(1, "b"), key(2, "b"), key(3, "b")]
    assert one.batched_contains(again, pin=True) == 2
    found = got(one, again[:2])
    assert all(map(torch.equal, found, kept))
    for each in again[:2]:
        assert one.unpin(each)
    assert not any(chunk.is_pinned for chunk in one.hot_cache.values())


def test_prompts_of_another_space_share_nothing(made: Made) -> None:
    one = made()
    keep(one, [key(1, "a", space="x")])
    assert one.batched_contains([key(1, "b", space="y")], pin=True) == 0
    assert one.batched_contains([key(1, "b")], pin=True) == 0
    assert one.batched_contains([key(1, "b", space="x")], pin=True) == 1


def test_a_restarted_engine_finds_in_redis_what_it_had(tiers: Any, made: Made, redis: RedisServer) -> None:
    import torch

    redis.ask("FLUSHALL")
    before = made(redis.url)
    whole = keep(before, [key(1, "a"), key(2, "a")])
    last = keep(before, [key(3, "a")], tokens=5)
    written(before)
    after = made(redis.url)
    again = [key(n, "b") for n in (1, 2, 3, 4)]
    tiers.MOVES.take()
    assert after.batched_contains(again, pin=False) == 0, "only a look-up asks Redis"
    assert after.batched_contains(again, pin=True) == 3
    assert all(map(torch.equal, got(after, again[:3]), [*whole, *last]))
    moved = tiers.MOVES.take().data
    assert (len(moved["l2_hit"]), len(moved["l1_hit"])) == (3, 0)
    got(after, again[:3])
    assert len(tiers.MOVES.take().data["l1_hit"]) == 3, "now they are in host memory"


def test_where_redis_has_lost_a_chunk_what_is_before_it_counts(made: Made, redis: RedisServer) -> None:
    redis.ask("FLUSHALL")
    before = made(redis.url)
    keep(before, [key(n, "a") for n in (1, 2, 3)])
    written(before)
    assert redis.ask(f"DEL {key(2, '').to_string().partition('@req')[0]}") == ":1"
    assert made(redis.url).batched_contains([key(n, "b") for n in (1, 2, 3)], pin=True) == 1


def test_what_is_no_chunk_of_this_model_is_left(made: Made, redis: RedisServer) -> None:
    redis.ask("FLUSHALL")
    name = key(1, "").to_string().partition("@req")[0]
    for text in ("x", "x" * 24_577, "x" * 24_960):
        redis.ask(f"SET {name} {text}")
        assert made(redis.url).batched_contains([key(1, "a")], pin=True) == 0


def test_without_redis_prompts_go_on_and_it_is_told_once(
    made: Made, tiers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(tiers.logger, "warning", lambda text, *values: told.append(text % values))
    one = made("redis://127.0.0.1:1")
    for _ in range(3):
        assert one.batched_contains([key(1, "a")], pin=True) == 0
    (line,) = told
    assert line.startswith("L2 of the KV cache, the Redis at 127.0.0.1:1: ")
    keep(one, [key(1, "a")])
    written(one)
    assert one.batched_contains([key(1, "b")], pin=True) == 1, "host memory is there"


def test_what_cannot_be_written_in_time_is_dropped_and_holds_no_memory(tiers: Any) -> None:
    counts: list[int] = []

    def chunk() -> Any:
        counts.append(0)
        at = len(counts) - 1

        def change(by: int) -> None:
            counts[at] += by

        return types.SimpleNamespace(ref_count_up=lambda: change(1), ref_count_down=lambda: change(-1))

    writer = tiers.Writer(None)  # not started: nothing is written
    for _ in range(100):
        writer.offer("k", chunk())
    assert counts == [1] * 64 + [0] * 36


def test_memory_that_is_full_makes_room(made: Made) -> None:
    one = made(gib=0.001)  # a MiB: 42 chunks of 24 KiB
    for n in range(200):
        keep(one, [key(n, "a")])
    assert one.batched_contains([key(199, "b")], pin=True) == 1
    assert one.batched_contains([key(0, "b")], pin=True) == 0
