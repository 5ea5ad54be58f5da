"""`tandem up` before engines that run already."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tandem.local.ports import free_port
from tandem.sim import EngineSpec, Fleet, parse

from .conftest import Tandem
from .test_chat import chat


def engine(role: str, *more: str) -> EngineSpec:
    transfer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_load_failure_policy": "fail"}
    return EngineSpec(parse(["--model", "m", "--kv-transfer-config", json.dumps(transfer), *more]))


@asynccontextmanager
async def up(home: Path, *arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """`tandem up ARGUMENTS` on a free port, and its URL."""
    port = free_port(18000, "127.0.0.1")
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tandem", "up", "--port", str(port), *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "TANDEM_HOME": str(home)},
    )
    try:
        yield child, f"http://127.0.0.1:{port}"
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


async def test_the_router_serves_engines_that_run_already_and_leaves_them_running(tmp_path: Path) -> None:
    pair = [engine("kv_producer"), engine("kv_consumer")]
    async with Fleet(pair, environment={}, time_scale=50) as fleet:
        prefill, decode = fleet.urls
        async with up(tmp_path, "--prefill-url", prefill, "--decode-url", decode) as (child, url):
            assert child.stdout is not None
            assert (await child.stdout.readline()).decode().strip() == url
            long = " ".join(["word"] * 1100)
            done = await chat("--url", url, "--json", "--max-tokens", "8", said=f"hello\n/reset\n{long}\n")
            child.terminate()
            _, err = await child.communicate()
        assert child.returncode == 0
        assert b"router: sending canaries" in err
        async with httpx.AsyncClient(trust_env=False) as client:
            for engine_url in (prefill, decode):
                assert (await client.get(f"{engine_url}/health")).status_code == 200
    assert done.code == 0, done.err
    short_answer, long_answer = map(json.loads, done.out.splitlines())
    assert (short_answer["path"], long_answer["path"]) == ("decode_only", "disaggregated")
    assert [a["completion_tokens"] for a in (short_answer, long_answer)] == [8, 8]


async def test_engines_whose_canaries_fail_are_told_with_the_reason(tmp_path: Path) -> None:
    pair = [engine("kv_producer"), engine("kv_consumer")]
    async with Fleet(pair, environment={}) as fleet:
        prefill, decode = fleet.urls
        async with httpx.AsyncClient(trust_env=False) as client:
            await client.post(f"{prefill}/sim/faults", content="no-kv-params")
        async with up(tmp_path, "--prefill-url", prefill, "--decode-url", decode) as (child, _):
            assert child.stderr is not None
            said = b""
            while b"the prefill answer has no kv_transfer_params" not in said:
                line = await child.stderr.readline()
                assert line, said
                said += line
            child.terminate()
            await child.communicate()
        assert child.returncode == 0
    assert f"router: sending canaries: no prefill engine is ready: {prefill}: " in said.decode()


async def test_a_dry_run_shows_the_engines_and_the_router(tmp_path: Path) -> None:
    async with Fleet([engine("kv_both"), engine("kv_both")], environment={}) as fleet:
        prefill, decode = fleet.urls
        async with up(tmp_path, "--prefill-url", prefill, "--decode-url", decode, "--dry-run") as (child, _):
            out, err = await child.communicate()
    assert (child.returncode, err) == (0, b"")
    lines = [line for line in out.decode().splitlines() if line]
    assert lines[0] == f"# prefill, runs already: {prefill}"
    assert lines[1] == f"# decode, runs already: {decode}"
    assert lines[2].startswith("# router: ")
    assert f"--prefill {prefill} --decode {decode}" in lines[3]


@pytest.mark.parametrize("flag", ["--prefill-url", "--decode-url"])
def test_one_role_alone_is_refused(tandem_command: Tandem, flag: str) -> None:
    done = tandem_command("up", flag, "http://127.0.0.1:1")
    assert (done.code, done.out) == (2, "")
    assert done.err == "tandem: --prefill-url and --decode-url go together: one alone hands over to nobody\n"


def test_what_is_no_url_of_an_engine_is_told(tandem_command: Tandem) -> None:
    done = tandem_command("up", "--prefill-url", "https://p:1", "--decode-url", "http://d:1")
    assert done.code == 2
    assert "argument --prefill-url: 'https://p:1' is not an http:// URL" in done.err


def test_engines_that_do_not_run_are_told(tandem_command: Tandem) -> None:
    done = tandem_command("up", "--prefill-url", "http://127.0.0.1:1", "--decode-url", "http://127.0.0.1:2")
    assert (done.code, done.out) == (3, "")
    assert done.err.startswith("tandem: These engines cannot be used:\n  --prefill-url http://127.0.0.1:1: ")
