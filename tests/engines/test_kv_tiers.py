"""kvCacheSpec on real engines: prompts that vLLM's own cache has no more are served from host memory (L1),
and from Redis (L2) after a restart; whatever Redis does, they are answered."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import yaml

from tandem.api import ANNOTATION_CONNECTOR
from tandem.bench.scrape import EngineCounters, read_counters, read_sums
from tandem.local.manifest import read_manifest
from tandem.prompt import PromptCounter, load

from ..redis_server import RedisServer, redis_server
from .answers import Greedy, fresh_prompt, greedy, judge
from .conftest import Up, start_up, stop_up

pytestmark = pytest.mark.slow

T = TypeVar("T")

TOKENS = 900
CHUNKS = 4
TOKEN_BYTES = 2 * 30 * 192 * 2
"""Of SmolLM2-135M's KV."""
TIERS = ("vllm:lmcache_l1_hit_bytes_total", "vllm:lmcache_l2_hit_bytes_total")


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory, redis: RedisServer) -> Iterator[Up]:
    """One prefiller and one decoder with SmolLM2-135M; the prefiller has L1, and L2 in Redis."""
    folder = tmp_path_factory.mktemp("tiers")
    raw = read_manifest(None).raw
    raw["metadata"]["annotations"] = {ANNOTATION_CONNECTOR: "lmcache"}
    raw["spec"]["pdSpec"]["routingThreshold"] = 200
    raw["spec"]["kvCacheSpec"] = {
        "enableL2Cache": True,
        "l2CacheSpec": {"l2CacheBackend": "redis", "l2CacheLocalUrl": redis.url},
    }
    raw["spec"]["worker"].setdefault("environmentVariables", []).extend(
        [
            {"name": "LMCACHE_MAX_LOCAL_CPU_SIZE", "value": "0.5"},
            {"name": "VLLM_SERVER_DEV_MODE", "value": "1"},  # has /reset_prefix_cache
        ]
    )
    file = folder / "endpoint.yaml"
    file.write_text(yaml.safe_dump(raw), "utf-8")
    up = start_up(folder, "--file", str(file))
    yield up
    assert stop_up(up) == 0


@pytest.fixture(scope="module")
def counter(up: Up) -> PromptCounter:
    return load(Path(up.plan["model"]))


@dataclass(frozen=True)
class Work:
    """What a prefiller did, or has done."""

    counters: EngineCounters
    l1_bytes: float
    l2_bytes: float

    def since(self, before: Work) -> Work:
        return Work(
            self.counters.since(before.counters),
            self.l1_bytes - before.l1_bytes,
            self.l2_bytes - before.l2_bytes,
        )


@dataclass
class Asking:
    client: httpx.AsyncClient
    up: Up

    async def work(self) -> Work:
        text = (await self.client.get(f"{self.up.prefill[0]}/metrics")).text
        sums = read_sums(text, TIERS)
        return Work(read_counters(text), *(sums.get(name, 0.0) for name in TIERS))

    async def ask(self, prompt: list[int], **fields: Any) -> tuple[Greedy, Work]:
        """The router's answer, and what the prefiller did for it."""
        before = await self.work()
        answer = await greedy(self.client, self.up.url, prompt, **fields)
        assert answer.headers["x-tandem-path"] == "disaggregated"

        async def done() -> Work | None:  # an engine writes its counters a little after its answer
            grown = (await self.work()).since(before)
            return grown if grown.counters.prompt_tokens >= len(prompt) else None

        return answer, await eventually(done)

    async def forget(self) -> None:
        """Empty vLLM's own cache in the prefiller."""

        async def emptied() -> bool:
            answer = await self.client.post(f"{self.up.prefill[0]}/reset_prefix_cache")
            return bool(answer.json()["success"])

        await eventually(emptied)


@pytest.fixture
def asking(client: httpx.AsyncClient, up: Up) -> Asking:
    return Asking(client, up)


async def eventually(what: Callable[[], Awaitable[T | None]], seconds: float = 120) -> T:
    """Its first result that is true."""
    async with asyncio.timeout(seconds):
        while not (found := await what()):
            await asyncio.sleep(0.1)
        return found


async def test_a_prompt_that_vllm_has_forgotten_comes_from_host_memory(
    asking: Asking, counter: PromptCounter
) -> None:
    prompt = fresh_prompt(counter, TOKENS)
    first, computed = await asking.ask(prompt)
    assert (computed.counters.computed_tokens, computed.l1_bytes, computed.l2_bytes) == (TOKENS, 0, 0)
    await asking.forget()
    second, kept = await asking.ask(prompt)
    assert (kept.counters.received_tokens, kept.counters.computed_tokens) == (TOKENS - 1, 1)
    assert (kept.l1_bytes, kept.l2_bytes) == (TOKENS * TOKEN_BYTES, 0)
    assert judge(second, first, "from L1").acceptable
    told = status(asking.up)["prefill-0"]["cache_bytes"]
    assert (told["l1_read"], told["l2_read"]) == (TOKENS * TOKEN_BYTES, 0)


def status(up: Up) -> dict[str, Any]:
    """What `tandem status` tells of each process."""
    environment = {**os.environ, "XDG_STATE_HOME": str(up.state)}
    words = [sys.executable, "-m", "tandem", "status", "--json"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    (endpoint,) = json.loads(done.stdout)
    return {process["name"]: process for process in endpoint["processes"]}


async def test_of_a_prompt_that_only_begins_alike_the_rest_is_computed(
    asking: Asking, counter: PromptCounter
) -> None:
    begun = fresh_prompt(counter, 512)
    await asking.ask(begun + fresh_prompt(counter, 100))
    await asking.forget()
    other = begun + fresh_prompt(counter, 100)
    answer, kept = await asking.ask(other)
    assert (kept.counters.received_tokens, kept.counters.computed_tokens) == (512, 100)
    reference = await greedy(asking.client, asking.up.decode[0], other, cache_salt="alone")
    assert judge(answer, reference, "half from L1").acceptable


async def test_what_another_salt_has_sent_is_not_found(asking: Asking, counter: PromptCounter) -> None:
    prompt = fresh_prompt(counter, 400)
    await asking.ask(prompt, cache_salt="a")
    await asking.forget()
    for salt, computed in (("b", 400), ("a", 1)):
        _, kept = await asking.ask(prompt, cache_salt=salt)
        assert kept.counters.computed_tokens == computed


async def test_after_a_restart_a_prompt_comes_from_redis(
    asking: Asking, counter: PromptCounter, redis: RedisServer
) -> None:
    redis.ask("FLUSHALL")
    prompt = fresh_prompt(counter, TOKENS)
    first, _ = await asking.ask(prompt)

    async def all_written() -> bool:
        return redis.values() >= CHUNKS

    await eventually(all_written)
    await restarted(asking)
    second, kept = await asking.ask(prompt)
    assert (kept.counters.received_tokens, kept.counters.computed_tokens) == (TOKENS - 1, 1)
    assert (kept.l1_bytes, kept.l2_bytes) == (0, TOKENS * TOKEN_BYTES)
    assert judge(second, first, "from Redis").acceptable


async def restarted(asking: Asking) -> None:
    """Kill the prefiller, and wait until another is there and proved."""
    (state,) = asking.up.state.glob("**/state.json")

    def pid() -> int | None:
        told = json.loads(state.read_text())["processes"]
        found: int | None = next(p["pid"] for p in told if p["name"] == "prefill-0")
        return found

    killed = pid()
    assert killed is not None
    os.kill(killed, signal.SIGKILL)

    async def is_back() -> bool:
        if pid() in (None, killed):
            return False
        with suppress(httpx.TransportError):
            answer = await asking.client.get(f"{asking.up.url}/ready")
            return answer.status_code == 200 and not answer.json().get("unproved")
        return False

    await eventually(is_back, 200)


@pytest.mark.parametrize("trouble", ["hangs", "is full", "is gone"])
async def test_whatever_redis_does_prompts_are_answered_and_the_log_says_why(
    asking: Asking, counter: PromptCounter, redis: RedisServer, trouble: str
) -> None:
    seen = {"hangs": "no answer in 2 s", "is full": "OOM command not allowed", "is gone": "refused"}[trouble]
    begun = asking.up.log("prefill-0").count(seen)

    async def told() -> bool:
        prompt = fresh_prompt(counter, 300)
        answer, work = await asking.ask(prompt)
        assert work.counters.computed_tokens == 300
        reference = await greedy(asking.client, asking.up.decode[0], prompt, cache_salt="alone")
        assert judge(answer, reference, f"Redis {trouble}").acceptable
        return asking.up.log("prefill-0").count(seen) > begun

    match trouble:
        case "hangs":
            with redis.frozen():
                await eventually(told)
        case "is full":
            redis.ask("CONFIG SET maxmemory-policy noeviction")
            redis.ask("CONFIG SET maxmemory 1mb")
            await eventually(told)
            redis.ask("CONFIG SET maxmemory 0")
        case "is gone":
            redis.stop()
            await eventually(told)
            redis.start()

    async def is_used_again() -> bool:
        await asking.ask(fresh_prompt(counter, 300))
        return redis.values() > 0

    redis.ask("FLUSHALL")
    await eventually(is_used_again)
