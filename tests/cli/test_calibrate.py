"""`tandem calibrate`: from a running engine to a file that `tandem sim` reads."""

from __future__ import annotations

import json
import sys
from asyncio import create_subprocess_exec
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from tandem.sim import CostProfile, EngineSpec, Fleet, parse
from tandem.sim.cost import load

from .conftest import Result, Tandem

FAST = CostProfile(
    step=0.004, prefill_token=2e-5, prefill_attention=0, decode_sequence=1e-4, kv_handshake=0.01
)
FLAGS = ["--model", "m", "--max-model-len", "1024", "--block-size", "16", "--num-gpu-blocks-override", "80"]


async def run(*arguments: object) -> Result:
    """The command in a process of its own, so that this one can serve."""
    command = (sys.executable, "-m", "tandem", "calibrate", *map(str, arguments))
    child = await create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    out, err = await child.communicate()
    assert child.returncode is not None
    return Result(child.returncode, out.decode(), err.decode())


async def test_an_engine_becomes_a_profile_and_a_table(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    async with Fleet([EngineSpec(parse(FLAGS))], profile=FAST) as fleet:
        done = await run("--engine", fleet.urls[0], "--repeats", 1, "-o", file)
    assert done.code == 0, done.err
    profile = load(file)
    assert profile.block_size == 16
    assert profile.step > 0
    assert f"tandem sim --profile {file}" in done.out
    for what in ("prefill", "decode", "mixed", "stall"):
        assert what in done.out
    assert "a prompt of 512 tokens beside 4 streams" not in done.err
    assert "a prompt of 256 tokens beside 4 streams" in done.err


async def test_a_pair_tells_its_transfers_and_json_is_alone_on_stdout(tmp_path: Path) -> None:
    lines = [
        [*FLAGS, "--kv-transfer-config", json.dumps({"kv_connector": "NixlConnector", "kv_role": role})]
        for role in ("kv_producer", "kv_consumer")
    ]
    async with Fleet([EngineSpec(parse(line)) for line in lines], profile=FAST) as fleet:
        prefill, decode = fleet.urls
        arguments = ("--prefill", prefill, "--decode", decode, "--repeats", 1, "--json")
        done = await run(*arguments, "-o", tmp_path / "p.json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert load(tmp_path / "p.json").kv_bytes_per_token == FAST.kv_bytes_per_token
    assert result["profile"]["kv_bytes_per_token"] == FAST.kv_bytes_per_token
    assert len(result["transfers"]) >= 4
    assert result["error"] < 1


async def test_an_engine_that_cannot_be_measured_has_its_code(tmp_path: Path) -> None:
    async with Fleet([EngineSpec(parse(FLAGS))], profile=FAST) as fleet:
        done = await run("--engine", fleet.urls[0], "--model", "other", "-o", tmp_path / "p.json")
    assert (done.code, done.out) == (1, "")
    assert "does not serve other; it serves m" in done.err
    assert not (tmp_path / "p.json").exists()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["-o", "p.json"], 2, "name an engine by --engine"),
        (["--prefill", "http://p:1", "-o", "p.json"], 2, "--prefill and --decode go together"),
        (["--engine", "https://e", "-o", "p.json"], 2, "--engine: only http:// is supported"),
        (["--engine", "http://e", "-o", "/none/p.json"], 2, "there is no folder /none"),
        (["--engine", "http://e"], 2, "-o/--output"),
        (["--engine", "http://e", "-o", "p.json", "--repeats", "0"], 2, "'0' is not a whole number"),
        (["--engine", "http://127.0.0.1:9", "-o", "p.json"], 3, "Is the engine running?"),
    ],
)
def test_what_keeps_it_from_measuring_is_told_and_has_its_code(
    tandem_command: Tandem, words: list[str], code: int, said: str
) -> None:
    done = tandem_command("calibrate", *words)
    assert (done.code, done.out) == (code, "")
    assert said in done.err
