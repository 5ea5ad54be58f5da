"""`tandem demo`: the proof as a person and as a program read it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.bench import proof as proof_module
from tandem.bench.proof import Proof, ProofError, Shot
from tandem.bench.stream import RequestFailed
from tandem.local import endpoint
from tandem.local.errors import LocalError
from tandem.local.ports import free_port

from ..bench.fakes import Endpoint, serving
from .conftest import Result, Tandem


async def demo(*arguments: str) -> Result:
    """The command in a process of its own, so that this one can serve."""
    command = (sys.executable, "-m", "tandem", "demo", *arguments)
    child = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await child.communicate()
    assert child.returncode is not None
    return Result(child.returncode, out.decode(), err.decode())


async def test_a_running_endpoint_is_proved_in_a_table() -> None:
    async with serving(Endpoint()) as served:
        done = await demo("--url", f"{served.url}/")
    assert done.code == 0
    assert "FAILED" not in done.out
    assert done.out.count("  ok  ") == 10
    assert "sending a long prompt" in done.err
    assert done.out.rstrip().endswith(f"The endpoint is {served.url}")


async def test_a_proof_that_fails_has_its_code_also_as_json() -> None:
    async with serving(Endpoint("the answer is another")) as served:
        done = await demo("--url", served.url, "--json")
    assert done.code == 1
    checks = json.loads(done.out)["checks"]
    assert [c["claim"] for c in checks if not c["held"]] == ["long: the answer is the decoder's own"]


def proved(*, held: bool = True) -> Proof:
    proof = Proof("http://127.0.0.1:8000")
    proof.shots.append(Shot("short", "decode_only", "short", 7, 7, 1.0, 2.0, 3.0, "[bold]Paris"))
    proof.check("short: a claim", held, "7 = 7 [red]")
    return proof


def fake_prove(monkeypatch: pytest.MonkeyPatch, outcome: Proof | Exception) -> None:
    async def prove(url: str, **options: Any) -> Proof:
        options["on_step"]("a short prompt")
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(proof_module, "prove", prove)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ProofError("nothing to prove"), 1, "nothing to prove"),
        (RequestFailed("http://r answered HTTP 500"), 1, "http://r answered HTTP 500"),
        (
            httpx.ConnectError("refused"),
            3,
            "http://r cannot be reached: refused. Start one with `tandem up`.",
        ),
        (httpx.ReadTimeout(""), 3, "http://r cannot be reached: ReadTimeout. Start one with `tandem up`."),
        (
            httpx.ConnectError("refused", request=httpx.Request("GET", "http://r/metrics")),
            3,
            "http://r cannot be reached: refused. Start one with `tandem up`.",
        ),
        (
            httpx.ConnectError("refused", request=httpx.Request("GET", "http://r:8100/metrics")),
            3,
            "http://r:8100, an engine of http://r, cannot be reached: refused. "
            "`tandem status` tells whether it is being started.",
        ),
        (httpx.InvalidURL("Invalid port: 'x'"), 2, "--url http://r: Invalid port: 'x'"),
    ],
)
def test_what_keeps_it_from_proving_is_told_and_has_its_code(
    tandem_command: Tandem, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, said: str
) -> None:
    fake_prove(monkeypatch, error)
    done = tandem_command("demo", "--url", "http://r", "--json")
    assert (done.code, done.out) == (code, "")
    assert done.err.splitlines()[-1] == f"tandem: {said}"


def test_an_answer_is_shown_as_it_is_and_not_as_markup(
    tandem_command: Tandem, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_prove(monkeypatch, proved())
    out = tandem_command("demo", "--url", "http://r").out
    assert "short answer: [bold]Paris" in out
    assert "7 = 7 [red]" in out


# With an endpoint of its own, for which a fake stands in.


class Running:
    async def while_alive(self, work: Coroutine[Any, Any, None]) -> None:
        await work


def fake_running(monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> list[str]:
    happened: list[str] = []

    @asynccontextmanager
    async def running(plan: Any, *, on_progress: Any) -> AsyncIterator[Running]:
        if error is not None:
            raise error
        try:
            yield Running()
        finally:
            happened.append("stopped")

    monkeypatch.setattr(endpoint, "running", running)
    return happened


@pytest.mark.parametrize("held", [True, False])
def test_an_endpoint_is_started_proved_and_stopped(
    tandem_command: Tandem, manifest: Path, model: Path, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    happened = fake_running(monkeypatch)
    fake_prove(monkeypatch, proved(held=held))
    port = free_port(9000, "127.0.0.1")
    done = tandem_command("demo", "-f", manifest, "--model", model, "--port", str(port))
    assert done.code == (0 if held else 1)
    assert happened == ["stopped"]
    assert (f"curl http://127.0.0.1:{port}/v1/chat/completions" in done.out) is held
    assert ("tandem: 1 of 1 proofs failed: short: a claim" in done.err) is not held
    assert ("FAILED" in done.out) is not held


def test_json_is_alone_on_stdout(
    tandem_command: Tandem, manifest: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_running(monkeypatch)
    fake_prove(monkeypatch, proved())
    done = tandem_command("demo", "-f", manifest, "--model", model, "--json")
    assert json.loads(done.out)["shots"][0]["engine_tokens"] == 7
    assert "ignored on one machine: spec.loadBalancer" in done.err


def test_an_endpoint_that_does_not_come_up_is_told(
    tandem_command: Tandem, manifest: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_running(monkeypatch, LocalError("prefill-0 ended with exit code 1: ValueError: no room"))
    done = tandem_command("demo", "-f", manifest, "--model", model, "--json")
    assert (done.code, done.out) == (3, "")
    assert "tandem: prefill-0 ended with exit code 1: ValueError: no room\n" in done.err


def test_being_interrupted_has_the_shells_code(
    tandem_command: Tandem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(proof_module, "prove", interrupted)
    assert tandem_command("demo", "--url", "http://r").code == 130
