"""Hand-offs through LMCache on real engines: the same answers, and what becomes of its own faults."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from tandem.api import ANNOTATION_CONNECTOR
from tandem.bench.scrape import scrape
from tandem.local.manifest import read_manifest
from tandem.prompt import PromptCounter, load

from . import processes
from .answers import fresh_prompt, greedy, judge, right_at_once
from .conftest import Up, start_up, stop_up

THRESHOLD = 200
BLOCK_TOKENS = 128
"""vLLM's block size on CPU."""


def manifest(folder: Path) -> Path:
    """The built-in endpoint, but that KV goes through LMCache, and that short prompts do, too."""
    raw = read_manifest(None).raw
    raw["metadata"]["annotations"] = {ANNOTATION_CONNECTOR: "lmcache"}
    raw["spec"]["pdSpec"]["routingThreshold"] = THRESHOLD
    file = folder / "endpoint.yaml"
    file.write_text(yaml.safe_dump(raw), "utf-8")
    return file


@pytest.fixture(scope="module")
def lmcache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """One prefiller and one decoder with SmolLM2-135M."""
    folder = tmp_path_factory.mktemp("lmcache")
    up = start_up(folder, "--file", str(manifest(folder)))
    yield up
    assert stop_up(up) == 0


@pytest.fixture(scope="module")
def counter(lmcache: Up) -> PromptCounter:
    return load(Path(lmcache.plan["model"]))


@pytest.mark.parametrize("tokens", [300, 1000, 1800])
async def test_a_disaggregated_answer_equals_that_of_the_decoder_alone(
    lmcache: Up, client: httpx.AsyncClient, counter: PromptCounter, tokens: int
) -> None:
    prompt = fresh_prompt(counter, tokens)
    before = await scrape(client, lmcache.decode[0])
    answer = await greedy(client, lmcache.url, prompt)
    assert answer.headers["x-tandem-path"] == "disaggregated"
    assert answer.prompt_tokens == tokens
    while not (grown := (await scrape(client, lmcache.decode[0])).since(before)).prompt_tokens:
        await asyncio.sleep(0.1)  # an engine writes its counters a little after its answer
    assert (grown.received_tokens, grown.computed_tokens) == (tokens - 1, 1)
    reference = await greedy(client, lmcache.decode[0], prompt, cache_salt="alone")
    assert judge(answer, reference, f"{tokens} tokens").acceptable


@pytest.mark.parametrize("blocks", [2, 3, 5, 8] * 3)
async def test_what_the_decoder_received_is_bit_for_bit_the_prefillers(
    lmcache: Up, client: httpx.AsyncClient, counter: PromptCounter, blocks: int
) -> None:
    """The prefiller, asked again, finds the prompt in its own cache and computes its last token only, as the
    decoder does after the hand-off."""
    prompt = fresh_prompt(counter, blocks * BLOCK_TOKENS + 1)
    answer = await greedy(client, lmcache.url, prompt, max_tokens=64)
    assert answer.headers["x-tandem-path"] == "disaggregated"
    reference = await greedy(client, lmcache.prefill[0], prompt, max_tokens=64)
    assert answer.ids == reference.ids
    assert answer.likely == reference.likely


async def test_many_at_once_are_all_right_and_leave_nothing_in_the_buffer(
    lmcache: Up, client: httpx.AsyncClient, counter: PromptCounter
) -> None:
    lengths = [20, 1100, 60, 250, 1030, 40, 1025, 300]
    await right_at_once(client, lmcache.url, lmcache.decode[0], counter, lengths, threshold=THRESHOLD)
    await reserved(client, lmcache, 0)


async def reserved(client: httpx.AsyncClient, up: Up, chunks: int) -> None:
    """Wait until so many chunks of the decoder's buffer are spoken for."""
    async with asyncio.timeout(60):
        while True:
            lines = (await client.get(f"{up.url}/metrics")).text.splitlines()
            held = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("tandem_reserved{")]
            if sum(held) == chunks:  # an engine of which nothing is held is not named
                return
            await asyncio.sleep(0.2)


def pids(up: Up) -> dict[str, int | None]:
    (state,) = up.state.glob("**/state.json")
    return {p["name"]: p["pid"] for p in json.loads(state.read_text())["processes"]}


def kill(up: Up, name: str) -> None:
    pid = pids(up)[name]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


async def started_again(
    client: httpx.AsyncClient, up: Up, before: Mapping[str, int | None], *names: str
) -> None:
    """Wait until engines are other processes than before, and the router uses every pair."""
    async with asyncio.timeout(150):
        while True:
            now = pids(up)
            if all(now[name] not in (None, before[name]) for name in names):
                answer = await client.get(f"{up.url}/ready")
                if answer.status_code == 200 and not answer.json().get("unproved"):
                    return
            await asyncio.sleep(0.5)


@pytest.mark.slow
async def test_a_prefiller_that_is_killed_at_work_comes_back_and_its_prompt_is_answered(
    lmcache: Up, client: httpx.AsyncClient, counter: PromptCounter
) -> None:
    before = pids(lmcache)
    prompt = fresh_prompt(counter, 1800)
    engine = processes.with_argument(f"--port\0{urlsplit(lmcache.prefill[0]).port}")
    used = processes.cpu_seconds(engine)
    asking = asyncio.create_task(greedy(client, lmcache.url, prompt))
    async with asyncio.timeout(60):
        while processes.cpu_seconds(engine) < used + 0.5:
            await asyncio.sleep(0.02)
    kill(lmcache, "prefill-0")
    answer = await asking
    assert answer.headers["x-tandem-path"] == "decode_only"
    reference = await greedy(client, lmcache.decode[0], prompt, cache_salt="alone")
    assert judge(answer, reference, "a prefiller was killed").acceptable
    await started_again(client, lmcache, before, "prefill-0")
    assert pids(lmcache)["decode-0"] == before["decode-0"]
    answer = await greedy(client, lmcache.url, fresh_prompt(counter, 700))
    assert answer.headers["x-tandem-path"] == "disaggregated"


async def test_a_decoder_that_was_restarted_is_met_again_by_a_new_prefiller(
    lmcache: Up, client: httpx.AsyncClient, counter: PromptCounter
) -> None:
    """The old one would write into nothing for ever."""
    before = pids(lmcache)
    kill(lmcache, "decode-0")
    await started_again(client, lmcache, before, "prefill-0", "decode-0")
    prompt = fresh_prompt(counter, 700)
    answer = await greedy(client, lmcache.url, prompt)
    assert answer.headers["x-tandem-path"] == "disaggregated"
    reference = await greedy(client, lmcache.decode[0], prompt, cache_salt="alone")
    assert judge(answer, reference, "after a restart").acceptable
    assert "cannot find decode-0 again" in (lmcache.state / "up.log").read_text()
