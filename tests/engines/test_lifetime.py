"""What a local endpoint leaves behind, however it ends; several engines of a role. Tiny random models."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from tandem.prompt import PromptCounter, load

from .answers import fresh_prompt, greedy, judge
from .conftest import START_SECONDS, Up, free_port, group_of, start_up, stop_up
from .pairs import REMOTE_DECODE
from .processes import unused_shared_memory

pytestmark = pytest.mark.slow


def manifest(
    folder: Path, model: Path, *, prefill: int, decode: int, of_decoders: Sequence[str] = ()
) -> Path:
    """An endpoint whose model lies on a kubernetesVolume with a hostPath, as one on a node's disk does."""
    resource = {
        "apiVersion": "inference.sagemaker.aws.amazon.com/v1",
        "kind": "InferenceEndpointConfig",
        "metadata": {"name": "tiny"},
        "spec": {
            "modelName": "tiny",
            "modelSourceConfig": {"modelSourceType": "kubernetesVolume"},
            "kubernetes": {"volumes": [{"name": "weights", "hostPath": {"path": str(model)}}]},
            "intelligentRoutingSpec": {"enabled": True, "routingStrategy": "kvaware"},
            "pdSpec": {
                "routingThreshold": 100,
                "prefillSpec": {"replicas": prefill},
                "decodingSpec": {"replicas": decode, "args": [*of_decoders]},
            },
            "worker": {
                "image": "vllm",
                "args": [
                    *("--model", "/opt/ml/model", "--served-model-name", "smollm2"),
                    *("--load-format", "dummy", "--max-model-len", "4096"),
                    *("--kv-cache-memory-bytes", "67108864"),
                ],
                "modelInvocationPort": {"containerPort": 8000},
                "modelVolumeMount": {"name": "weights"},
                "resources": {},
            },
        },
    }
    file = folder / "endpoint.yaml"
    file.write_text(yaml.safe_dump(resource))
    return file


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_however_the_endpoint_ends(
    tiny: Path, tmp_path: Path, ending: signal.Signals
) -> None:
    shared = unused_shared_memory()
    up = start_up(tmp_path, "-f", str(manifest(tmp_path, tiny, prefill=1, decode=1)))
    try:
        processes = group_of(up)
        assert len(processes) >= 5  # tandem, the router, and two processes an engine
        sockets = sockets_of(up)
        assert len(sockets) == 4, "events and their replay, of two engines"
        assert all(path.is_socket() for path in sockets)
        assert sockets[0].parent.stat().st_mode & 0o777 == 0o700
    finally:
        code = stop_up(up, ending)
    assert code == (-9 if ending is signal.SIGKILL else 0)
    deadline = time.monotonic() + 30
    while (left := what_is_left(processes, sockets)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []
    for url in [up.url, *up.prefill, *up.decode]:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", urlsplit(url).port))
    assert unused_shared_memory() <= shared


def test_a_port_for_nixl_that_is_taken_meanwhile_ends_the_start(tiny: Path, tmp_path: Path) -> None:
    """vLLM waits for ever then; what is known of that is what it says."""

    def pid() -> int | None:
        """Of the decoder, once it has begun."""
        endpoints = json.loads(tandem(tmp_path, "status", "--json").stdout)
        return next((p["pid"] for e in endpoints for p in e["processes"] if p["name"] == "decode-0"), None)

    command = [sys.executable, "-m", "tandem", "up", "--port", str(free_port())]
    command += ["-f", str(manifest(tmp_path, tiny, prefill=1, decode=1))]
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    up = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(pid)
        settings = Path(f"/proc/{pid()}/environ").read_text().split("\0")
        (port,) = (int(s.partition("=")[2]) for s in settings if s.startswith("VLLM_NIXL_SIDE_CHANNEL_PORT="))
        with socket.create_server(("127.0.0.1", port)):
            said = up.communicate(timeout=START_SECONDS)[1]
    finally:
        up.terminate()
        up.wait(60)
    assert f"decode-0 cannot listen on port {port}: it was taken meanwhile " in said
    assert f"(process {os.getpid()}: " in said
    assert up.returncode == 3


def test_an_engine_that_does_not_start_is_told_of_in_its_own_words(tiny: Path, tmp_path: Path) -> None:
    """Its flags are well-formed: that they do not go together shows when it is about to load the model."""
    wrong = ("--model-loader-extra-config", '{"concurrency": 4}')
    file = manifest(tmp_path, tiny, prefill=1, decode=1, of_decoders=wrong)
    done = tandem(tmp_path, "up", "--port", str(free_port()), "-f", str(file))
    error = "ValueError: Model loader extra config is not supported for load format dummy"
    assert done.returncode == 1
    (log,) = tmp_path.glob("**/decode-0.log")
    assert done.stderr.endswith(f"tandem: decode-0 ended with exit code 1: {error}\nIts log: {log}\n")
    shown = tandem(tmp_path, "status")
    assert shown.returncode == 3
    assert f": decode-0 ended with exit code 1: {error} Its log: {log}\n" in shown.stdout
    assert error in tandem(tmp_path, "logs", "decode-0").stdout


@pytest.mark.timeout(4 * START_SECONDS)  # it starts, and then each process once more
async def test_each_process_that_is_killed_comes_back_and_long_prompts_disaggregate_again(
    tiny: Path, tmp_path: Path, client: httpx.AsyncClient
) -> None:
    shared = unused_shared_memory()
    counter = load(tiny)
    up = start_up(tmp_path, "-f", str(manifest(tmp_path, tiny, prefill=1, decode=1)))
    try:
        await disaggregates(up, client, counter)
        identities = {await nixl_identity(up.prefill[0], client)}
        for name in ("prefill-0", "decode-0", "router"):
            before = processes_of(up)[name]
            os.kill(before["pid"], signal.SIGKILL)
            if name == "prefill-0":  # what is left serves
                answer = await greedy(client, up.url, fresh_prompt(counter, 600), max_tokens=4)
                assert "x-tandem-prefill-url" not in answer.headers
            wait_until(lambda name=name: processes_of(up)[name]["restarts"] == 1)  # type: ignore[misc]
            wait_until(lambda: status(up).returncode == 0)
            after = processes_of(up)[name]
            assert after["pid"] != before["pid"]
            assert after["port"] == before["port"]
            assert f"{name} was killed by SIGKILL: " in after["cause"]
            await disaggregates(up, client, counter)
            identities.add(await nixl_identity(up.prefill[0], client))
        assert len(identities) == 2, "the prefiller's first one, and the one after its restart"
        said = (tmp_path / "up.log").read_text()
        for name in ("prefill-0", "decode-0", "router"):
            assert re.search(
                rf"{name} was killed by SIGKILL: .*; restart 1 in 1 s\. Its log: .*/{name}.log\n", said
            )
            assert re.search(rf"{name} is back after \d+ s \(restart 1\)\n", said)
        processes, sockets = group_of(up), sockets_of(up)
    finally:
        assert stop_up(up) == 0
    wait_until(lambda: what_is_left(processes, sockets) == [], seconds=30)
    assert unused_shared_memory() <= shared


@pytest.mark.timeout(3 * START_SECONDS)
async def test_an_engine_that_hangs_is_restarted(
    tiny: Path, tmp_path: Path, client: httpx.AsyncClient
) -> None:
    folder = str(manifest(tmp_path, tiny, prefill=1, decode=1))
    up = start_up(tmp_path, "-f", folder, "--hung-after", "30")
    try:
        assert all(p["memory_bytes"] > 100 << 20 for n, p in processes_of(up).items() if n != "router")
        pid = processes_of(up)["decode-0"]["pid"]
        os.killpg(pid, signal.SIGSTOP)
        wait_until(lambda: processes_of(up)["decode-0"]["state"] == "hung")
        assert processes_of(up)["decode-0"]["requests"] is None
        wait_until(lambda: processes_of(up)["decode-0"]["restarts"] == 1)
        wait_until(lambda: status(up).returncode == 0)
        assert "decode-0 was hung: for " in (tmp_path / "up.log").read_text()
        assert not alive(pid)
        await disaggregates(up, client, load(tiny))
    finally:
        assert stop_up(up) == 0


async def test_a_detached_one_outlives_a_hang_up_and_is_stopped(tiny: Path, tmp_path: Path) -> None:
    port = str(free_port())
    words = ("up", "--detach", "--port", port, "-f", str(manifest(tmp_path, tiny, prefill=1, decode=1)))
    shared = unused_shared_memory()
    done = tandem(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    try:
        assert done.stdout.startswith(f"http://127.0.0.1:{port}\n")
        (endpoint,) = json.loads(tandem(tmp_path, "status", "--json").stdout)
        os.killpg(endpoint["pid"], signal.SIGHUP)
        assert tandem(tmp_path, "status").returncode == 0
        assert "Application startup complete" in tandem(tmp_path, "logs", "decode-0").stdout
    finally:
        down = tandem(tmp_path, "down")
    assert down.returncode == 0, down.stderr
    assert "did not end" not in down.stderr
    assert not any(alive(pid) for pid in [endpoint["pid"], *(p["pid"] for p in endpoint["processes"])])
    assert unused_shared_memory() <= shared


async def test_two_prefillers_and_two_decoders_share_the_work(
    tiny: Path, tmp_path: Path, client: httpx.AsyncClient
) -> None:
    up = start_up(tmp_path, "-f", str(manifest(tmp_path, tiny, prefill=2, decode=2)))
    try:
        counter = load(tiny)
        used: set[str] = set()
        for number in range(60):  # at first less is sent to the engine that came up last
            if number >= 8 and used == {*up.prefill, *up.decode}:
                break
            prompt = fresh_prompt(counter, 600)
            answer = await greedy(client, up.url, prompt, max_tokens=16)
            prefiller, decoder = answer.headers["x-tandem-prefill-url"], answer.headers["x-tandem-decode-url"]
            used |= {prefiller, decoder}
            reference = await greedy(client, decoder, prompt, max_tokens=16, cache_salt="alone")
            assert judge(answer, reference, f"{prefiller} to {decoder}").acceptable
        assert used == {*up.prefill, *up.decode}
    finally:
        assert stop_up(up) == 0


def tandem(state: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XDG_STATE_HOME": str(state)}
    command = [sys.executable, "-m", "tandem", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def status(up: Up) -> subprocess.CompletedProcess[str]:
    return tandem(up.state, "status", "--json")


def processes_of(up: Up) -> dict[str, Any]:
    """As `tandem status` has them, by name."""
    (endpoint,) = json.loads(status(up).stdout)
    return {process["name"]: process for process in endpoint["processes"]}


def wait_until(holds: Callable[[], object], seconds: float = START_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.25)


async def disaggregates(up: Up, client: httpx.AsyncClient, counter: PromptCounter) -> None:
    """A long prompt goes through both engines, and its answer is the decoder's own."""
    prompt = fresh_prompt(counter, 600)
    answer = await greedy(client, up.url, prompt, max_tokens=16)
    assert answer.headers["x-tandem-prefill-url"] == up.prefill[0]
    reference = await greedy(client, up.decode[0], prompt, max_tokens=16, cache_salt="alone")
    assert judge(answer, reference, "disaggregated").acceptable


async def nixl_identity(prefiller: str, client: httpx.AsyncClient) -> str:
    """What decoders know a prefiller by."""
    body = {"prompt": "x", "max_tokens": 1, "kv_transfer_params": REMOTE_DECODE}
    answer = await client.post(f"{prefiller}/v1/completions", json=body)
    identity: str = answer.json()["kv_transfer_params"]["remote_engine_id"]
    return identity


def sockets_of(up: Up) -> list[Path]:
    """Where the engines publish KV events."""
    configs = [e["argv"][e["argv"].index("--kv-events-config") + 1] for e in up.plan["engines"]]
    endpoints = [json.loads(text)[name] for text in configs for name in ("endpoint", "replay_endpoint")]
    return [Path(endpoint.removeprefix("ipc://")) for endpoint in endpoints]


def what_is_left(processes: list[int], sockets: list[Path]) -> list[object]:
    return [*filter(alive, processes), *{path.parent for path in sockets if path.parent.exists()}]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
