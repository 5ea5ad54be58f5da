"""`tandem up`: what it would start, what it says of mistakes, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import tandem.engine
from tandem.engine import MachineError
from tandem.local import endpoint, paths, preflight
from tandem.local.errors import LocalError

from .conftest import MANIFEST, Tandem
from .local_endpoints import up


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
    assert shlex.split(lines[5])[1:5] == ["-P", "-m", "tandem", "router"]


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

    def __init__(self, at_work: Callable[[], None], happened: list[str]) -> None:
        self._at_work = at_work
        self._happened = happened

    async def keep_up(self, tell: Callable[[str], None], *, hung_after: float) -> None:
        self._happened.append(f"kept up, hung after {hung_after:g} s")
        tell("decode-0 died [cause]; restart 1 in 1 s")
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
                yield Running(at_work, happened)
            finally:
                await asyncio.sleep(0)  # stopping takes its time and must not be cut short
                happened.append("stopped")

        monkeypatch.setattr(endpoint, "running", running)
        return happened

    return with_work


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_runs_until_it_is_signalled_and_then_stops_in_order(
    tandem_command: Tandem, manifest: Path, model: Path, run: Any, number: signal.Signals
) -> None:
    happened = run(lambda: os.kill(os.getpid(), number))
    done = tandem_command("up", "-f", manifest, "--model", model)
    assert done.code == 0
    assert happened == ["started", "kept up, hung after 300 s", "stopped"]
    url, curl = done.out.splitlines()
    assert url == "http://127.0.0.1:8000"
    assert curl.startswith(f"curl {url}/v1/chat/completions ")
    assert "decode-0: answering" in done.err
    assert re.search(r"^ready after \d+ s; logs in ", done.err, re.MULTILINE)
    assert re.search(r"^\d\d:\d\d:\d\d  decode-0 died \[cause\]; restart 1 in 1 s$", done.err, re.MULTILINE)


def test_a_hang_up_is_ignored_where_it_was_before(
    tandem_command: Tandem, manifest: Path, model: Path, run: Any
) -> None:
    """As under nohup."""

    def hang_up_and_end() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        raise LocalError("an end of another kind")

    run(hang_up_and_end)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        done = tandem_command("up", "-f", manifest, "--model", model)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert done.code == 3
    assert "an end of another kind" in done.err


def test_as_json_the_result_is_one_line_on_stdout(
    tandem_command: Tandem, manifest: Path, model: Path, run: Any, tmp_path: Path
) -> None:
    run(lambda: os.kill(os.getpid(), signal.SIGTERM))
    done = tandem_command("up", "-f", manifest, "--model", model, "--json")
    (line,) = done.out.splitlines()
    told = json.loads(line)
    assert told.pop("curl").startswith("curl http://127.0.0.1:8000/")
    assert told == {
        "name": "small",
        "url": "http://127.0.0.1:8000",
        "pid": os.getpid(),
        "logs": str(tmp_path / "home" / "small" / "8000"),
    }


@pytest.mark.parametrize(("given", "seconds"), [("0", "0"), ("42.5", "42.5")])
def test_how_long_one_may_hang_can_be_said(
    tandem_command: Tandem, manifest: Path, model: Path, run: Any, given: str, seconds: str
) -> None:
    happened = run(lambda: os.kill(os.getpid(), signal.SIGTERM))
    tandem_command("up", "-f", manifest, "--model", model, "--hung-after", given)
    assert happened[1] == f"kept up, hung after {seconds} s"


@pytest.mark.parametrize("given", ["-1", "inf", "nan", "soon"])
def test_what_is_no_time_is_refused(tandem_command: Tandem, given: str) -> None:
    done = tandem_command("up", f"--hung-after={given}")
    assert done.code == 2
    assert f"'{given}' is not a number of seconds from 0" in done.err


def test_a_second_one_is_told_of_the_first_before_its_port_is_missed(
    tandem_command: Tandem, manifest: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(port: int, host: str) -> None:
        raise LocalError("the port is taken")

    monkeypatch.setattr(preflight, "require_free", taken)
    for words in (("up", "--port", "8000"), ("up", "--detach")):
        with up():
            done = tandem_command(*words, "-f", manifest, "--model", model)
        assert (done.code, done.out) == (3, "")
        assert done.err.startswith(f"tandem: small is up on port 8000 already, as process {os.getpid()}. ")
        shutil.rmtree(paths.states())


def test_what_is_wrong_with_one_to_be_detached_is_told_at_once(
    tandem_command: Tandem, manifest: Path
) -> None:
    manifest.write_text(MANIFEST.replace("modelName", "modelname"))
    done = tandem_command("up", "-f", manifest, "--detach")
    assert (done.code, done.out) == (2, "")
    assert "spec.modelName: is required" in done.err
    assert tandem_command("up", "-f", "/nowhere.yaml", "--detach").code == 2


def test_a_process_that_dies_ends_it_with_the_cause(
    tandem_command: Tandem, manifest: Path, model: Path, run: Any
) -> None:
    def die() -> None:
        raise LocalError("decode-0 was killed by SIGKILL: it wrote nothing")

    happened = run(die)
    done = tandem_command("up", "-f", manifest, "--model", model)
    assert done.code == 3
    assert "tandem: decode-0 was killed by SIGKILL: it wrote nothing\n" in done.err
    assert happened[::2] == ["started", "stopped"]
