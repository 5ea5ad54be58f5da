"""`tandem sim` as a process."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from .helpers import FOX, REMOTE_DECODE, flags

ENVIRONMENT = {**os.environ, "VLLM_NIXL_SIDE_CHANNEL_PORT": "0", "VLLM_CPU_KVCACHE_SPACE": ""}


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "tandem", "sim", *words]


@asynccontextmanager
async def sim(*words: str) -> AsyncIterator[tuple[list[str], asyncio.subprocess.Process]]:
    """A running `tandem sim`: its URLs and the process."""
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(*command(*words), stdout=pipe, stderr=pipe, env=ENVIRONMENT)
    try:
        assert child.stdout is not None
        yield json.loads(await child.stdout.readline())["urls"], child
    finally:
        if child.returncode is None:
            child.terminate()
        await child.communicate()


async def test_a_pair_of_processes_hands_over_and_prints_what_people_grep_for() -> None:
    def role(name: str) -> list[str]:
        return ["--port", "0", "--time-scale", "20", "--role", name, "--", *flags()]

    async with sim(*role("prefill")) as ((one,), first), sim(*role("decode")) as ((other,), second):
        body = {"model": "m", "prompt": FOX * 5, "temperature": 0, "max_tokens": 8}
        async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
            leg = await client.post(
                f"{one}/v1/completions", json={**body, "max_tokens": 1, "kv_transfer_params": REMOTE_DECODE}
            )
            params = leg.json()["kv_transfer_params"]
            answer = await client.post(f"{other}/v1/completions", json={**body, "kv_transfer_params": params})
            alone = await client.post(f"{one}/v1/completions", json=body)
        assert answer.json()["choices"] == alone.json()["choices"]
        logs = []
        for child in (first, second):
            child.terminate()
            logs.append((await child.communicate())[1].decode())
            assert child.returncode == 0
    assert re.findall(r"'pd_role': '[a-z]+'", logs[0]) == ["'pd_role': 'sender'"]
    assert re.findall(r"'pd_role': '[a-z]+'", logs[1]) == ["'pd_role': 'receiver'"]
    assert re.search(r"Retrieved.*tokens.*throughput", logs[1])


async def test_several_engines_with_their_own_ports(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text('{"step": 0.001}')
    words = ["--port", "0", "--engines", "3", "--profile", str(tmp_path / "p.json"), "--answer-tokens", "4"]
    async with sim(*words, "--fault", "delay=0.01", "--", *flags()) as (urls, _):
        assert len(set(urls)) == 3
        async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
            for url in urls:
                body = {"model": "m", "prompt": "x", "max_tokens": 50}
                answer = (await client.post(f"{url}/v1/completions", json=body)).json()
                assert answer["usage"]["completion_tokens"] == 5
                assert (await client.get(f"{url}/sim/faults")).json() == {"faults": ["delay=0.01"]}


async def test_model_files_are_served_when_asked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for switch, status in ((["--serve-model-files"], 200), ([], 404)):
        words = ["--port", "0", *switch, "--", "--model", str(tmp_path)]
        async with sim(*words) as ((url,), _), httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(f"{url}/tandem/model/config.json")).status_code == status


async def test_a_crashed_engine_ends_its_process_with_a_failure() -> None:
    async with sim("--port", "0", "--", *flags()) as ((url,), child):
        async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
            await client.post(f"{url}/sim/faults", content="crash")
        await child.wait()
        assert child.returncode == 1


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--", "--max-modle-len", "3"], 2, "tandem: unrecognized arguments: --max-modle-len"),
        (["--engines", "0", "--"], 2, "--engines"),
        (["--fault", "explode", "--port", "0", "--"], 2, "'explode': is no kind of fault"),
        (["--answer-tokens", "9-3", "--"], 2, "--answer-tokens"),
        (["--profile", "none.json", "--"], 2, "none.json"),
        (["--", "--num-gpu-blocks-override", "5"], 2, "5 KV blocks"),
        (["--port", "1", "--host", "192.0.2.1", "--"], 3, "tandem: "),
    ],
)
async def test_what_is_wrong_is_told_and_has_its_code(words: list[str], code: int, said: str) -> None:
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(*command(*words), stdout=pipe, stderr=pipe, env=ENVIRONMENT)
    out, err = await child.communicate()
    assert (child.returncode, out) == (code, b"")
    assert said in err.decode()
