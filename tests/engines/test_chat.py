"""`tandem chat` with real engines, through a router that was attached to them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tandem.bench.proof import long_prompt

from .conftest import Up, free_port, ready, roleless_engines


@contextmanager
def attached(smollm2: Up, folder: Path) -> Iterator[str]:
    """The URL of a second router before the shared engines, which count the prompts."""
    log, port = folder / "up.log", free_port()
    command = [
        *(sys.executable, "-m", "tandem", "up", "--port", str(port)),
        *("--prefill-url", *smollm2.prefill, "--decode-url", *smollm2.decode),
    ]
    with ready(command, port, log, {**os.environ, "XDG_STATE_HOME": str(folder)}) as url:
        yield url


def test_a_chat_shows_the_path_of_a_short_and_of_a_long_prompt(smollm2: Up, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text(long_prompt("chat", tokens=1300))
    said = f"What is the capital of France?\n/file {tmp_path / 'notes.txt'}\nWhat is the capital of France?\n"
    with attached(smollm2, tmp_path) as url:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "tandem", "chat", "--url", url, "--json"),
                *("--temperature", "0", "--max-tokens", "32"),
            ],
            input=said,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    short, long = map(json.loads, done.stdout.splitlines())
    assert "Paris" in short["answer"]
    assert (short["path"], long["path"]) == ("decode_only", "disaggregated")
    assert short["prompt_tokens"] < 1024 < long["prompt_tokens"]
    for answer in (short, long):
        assert answer["completion_tokens"] > 1
        assert 0 < answer["itl_p50_ms"] <= answer["itl_max_ms"]
        assert answer["ttft_ms"] > 0
        assert 1 < answer["tokens_per_s"] < 1000


@pytest.mark.slow
def test_an_engine_without_a_connector_is_refused(smollm2: Up, tiny: Path, tmp_path: Path) -> None:
    """Its metrics tell; its answers would not."""
    flags = ("--load-format", "dummy", "--max-model-len", "1024", "--kv-cache-memory-bytes", "67108864")
    with roleless_engines(smollm2.plan["engines"][0]["argv"][0], tiny, tmp_path, 1, *flags) as engines:
        (url,) = engines
        done = subprocess.run(
            [
                *(sys.executable, "-m", "tandem", "up", "--dry-run"),
                *("--prefill-url", *smollm2.prefill, "--decode-url", url),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 3
    assert f"--decode-url {url}: has no NIXL connector" in done.stderr
