"""`tandem up`: what it would start, what it says of mistakes, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import tandem.engine
from tandem.engine import MachineError
from tandem.local import endpoint
from tandem.local.errors import LocalError

from .conftest import MANIFEST, Tandem


def test_a_dry_run_as_json_is_one_document_on_stdout(
    tandem_command: Tandem, manifest: Path, model: Path
) -> None:
    done = tandem_command("up", "-f", manifest, "--model", model, "--port", 9000, "--dry-run", "--json")
    assert (done.code, done.err) == (0, "")
    plan = json.loads(done.out)
    assert plan["url"] == "http://127.0.0.1:9000"
    assert [e["cpus"] for e in plan["engines"]] == [[0, 1], [2, 3]]
    assert plan["unusedFields"] == ["spec.loadBalancer", "spec.modelSourceConfig.s3Storage"]


def test_a_dry_run_prints_command_lines_that_could_be_typed(
    tandem_command: Tandem, manifest: Path, model: Path
) -> None:
    done = tandem_command(
        "up", "-f", manifest, "--model", model, "--vllm-python", "/gpu/bin/python", "--dry-run"
    )
    assert done.code == 0
    assert "ignored on one machine: spec.loadBalancer" in done.err
    lines = [x for x in done.out.splitlines() if x]
    assert lines[0] == "# prefill-0: http://127.0.0.1:8100, cores 0,1"
    assert lines[4] == "# router: http://127.0.0.1:8000"
    assert "/gpu/bin/python" in shlex.split(lines[1])
    assert shlex.split(lines[5])[1:4] == ["-m", "tandem", "router"]


def test_every_problem_of_a_manifest_is_listed(tandem_command: Tandem, manifest: Path) -> None:
    manifest.write_text(MANIFEST.replace("modelName", "modelname").replace("{containerPort: 8000}", "{}"))
    done = tandem_command("up", "-f", manifest, "--dry-run", "--json")
    assert (done.code, done.out) == (2, "")
    assert done.err.splitlines() == [
        f"tandem: {manifest} is not a valid InferenceEndpointConfig:",
        f"  {manifest}:4:1: error IEC102 spec.modelName: is required",
        f"  {manifest}:5:3: error IEC101 spec.modelname: is not a field; did you mean modelName?",
        f"  {manifest}:11:5: error IEC102 spec.worker.modelInvocationPort.containerPort: is required",
    ]


def test_a_manifest_that_cannot_be_read_is_told_by_name(tandem_command: Tandem, tmp_path: Path) -> None:
    done = tandem_command("up", "-f", tmp_path / "none.yaml", "--dry-run")
    assert (done.code, done.err) == (2, f"tandem: {tmp_path / 'none.yaml'}: No such file or directory\n")


@pytest.mark.parametrize("port", ["0", "65536", "-1", "http"])
def test_a_port_that_is_none_is_refused(tandem_command: Tandem, port: str) -> None:
    done = tandem_command("up", f"--port={port}", "--dry-run")
    assert done.code == 2
    assert f"'{port}' is not a port (1 to 65535)" in done.err


@pytest.mark.parametrize("words", [("up", "--dry-run"), ("demo",), ("sim",)], ids=lambda words: words[0])
def test_an_empty_host_is_not_everywhere(tandem_command: Tandem, words: tuple[str, ...]) -> None:
    done = tandem_command(*words, "--host", "")
    assert done.code == 2
    assert "argument --host: '' is no name or address of a host" in done.err


def test_a_model_that_is_not_there_is_told_with_the_way_out(tandem_command: Tandem, manifest: Path) -> None:
    done = tandem_command("up", "-f", manifest, "--dry-run")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("tandem: spec.modelSourceConfig: s3 is not read on one machine.")


def test_a_machine_without_vllm_is_told(
    tandem_command: Tandem, manifest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def detect(python: str) -> None:
        raise MachineError(f"{python} has no vLLM.")

    monkeypatch.setattr(tandem.engine, "detect", detect)
    done = tandem_command("up", "-f", manifest, "--vllm-python", "/p")
    assert (done.code, done.err) == (3, "tandem: /p has no vLLM.\n")


# A run, with a fake in the place of the processes.


class Running:
    """Stands for a RunningEndpoint: `at_work` is what happens once it runs."""

    def __init__(self, at_work: Callable[[], None]) -> None:
        self._at_work = at_work

    async def died(self) -> None:
        self._at_work()
        await asyncio.Event().wait()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], list[str]]:
    """Let endpoints start at once; returns the list of what happened to the next one."""

    def with_work(at_work: Callable[[], None]) -> list[str]:
        happened: list[str] = []

        @asynccontextmanager
        async def running(plan: Any, *, on_progress: Any) -> AsyncIterator[Running]:
            happened.append("started")
            on_progress({"decode-0": "answering", "router": "ready"})
            try:
                yield Running(at_work)
            finally:
                await asyncio.sleep(0)  # stopping takes its time and must not be cut short
                happened.append("stopped")

        monkeypatch.setattr(endpoint, "running", running)
        return happened

    return with_work


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_runs_until_it_is_signalled_and_then_stops_in_order(
    tandem_command: Tandem, manifest: Path, model: Path, run: Any, number: signal.Signals
) -> None:
    happened = run(lambda: os.kill(os.getpid(), number))
    done = tandem_command("up", "-f", manifest, "--model", model)
    assert done.code == 0
    assert happened == ["started", "stopped"]
    url, curl = done.out.splitlines()
    assert url == "http://127.0.0.1:8000"
    assert curl.startswith(f"curl {url}/v1/chat/completions ")
    assert "decode-0: answering" in done.err
    assert "ready after 0 s; logs in " in done.err


def test_a_process_that_dies_ends_it_with_the_cause(
    tandem_command: Tandem, manifest: Path, model: Path, run: Any
) -> None:
    def die() -> None:
        raise LocalError("decode-0 was killed by SIGKILL: it wrote nothing")

    happened = run(die)
    done = tandem_command("up", "-f", manifest, "--model", model)
    assert done.code == 3
    assert "tandem: decode-0 was killed by SIGKILL: it wrote nothing\n" in done.err
    assert happened == ["started", "stopped"]
