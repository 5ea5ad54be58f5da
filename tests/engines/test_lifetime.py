"""What a local endpoint leaves behind, however it ends; several engines of a role. Tiny random models."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from tandem.prompt import load

from .answers import fresh_prompt, greedy, judge
from .conftest import Up, group_of, start_up, stop_up

pytestmark = pytest.mark.slow


def manifest(folder: Path, model: Path, *, prefill: int, decode: int) -> Path:
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
                "decodingSpec": {"replicas": decode},
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
    shared = shared_memory()
    up = start_up(tmp_path, "-f", str(manifest(tmp_path, tiny, prefill=1, decode=1)))
    processes = group_of(up)
    assert len(processes) >= 5  # tandem, the router, and two processes an engine
    sockets = sockets_of(up)
    assert len(sockets) == 4, "events and their replay, of two engines"
    assert all(path.is_socket() for path in sockets)
    assert sockets[0].parent.stat().st_mode & 0o777 == 0o700
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
    assert shared_memory() <= shared


def test_a_dead_engine_is_told_with_its_cause(tiny: Path, tmp_path: Path) -> None:
    up = start_up(tmp_path, "-f", str(manifest(tmp_path, tiny, prefill=1, decode=1)))
    engine = next(p for p in group_of(up) if f"--port {urlsplit(up.prefill[0]).port}" in command(p))
    os.kill(engine, signal.SIGKILL)
    assert up.process.wait(60) != 0
    said = (tmp_path / "up.log").read_text()
    assert "prefill-0 was killed by SIGKILL" in said
    assert "prefill-0.log" in said


async def test_two_prefillers_and_two_decoders_share_the_work(
    tiny: Path, tmp_path: Path, client: httpx.AsyncClient
) -> None:
    up = start_up(tmp_path, "-f", str(manifest(tmp_path, tiny, prefill=2, decode=2)))
    try:
        counter = load(tiny)
        used = set()
        for _ in range(8):
            prompt = fresh_prompt(counter, 600)
            answer = await greedy(client, up.url, prompt, max_tokens=16)
            prefiller, decoder = answer.headers["x-tandem-prefill-url"], answer.headers["x-tandem-decode-url"]
            used |= {prefiller, decoder}
            reference = await greedy(client, decoder, prompt, max_tokens=16, cache_salt="alone")
            assert judge(answer, reference, f"{prefiller} to {decoder}").acceptable
        assert used == {*up.prefill, *up.decode}
    finally:
        assert stop_up(up) == 0


def sockets_of(up: Up) -> list[Path]:
    """Where the engines publish KV events."""
    configs = [e["argv"][e["argv"].index("--kv-events-config") + 1] for e in up.plan["engines"]]
    endpoints = [json.loads(text)[name] for text in configs for name in ("endpoint", "replay_endpoint")]
    return [Path(endpoint.removeprefix("ipc://")) for endpoint in endpoints]


def what_is_left(processes: list[int], sockets: list[Path]) -> list[object]:
    return [*filter(alive, processes), *{path.parent for path in sockets if path.parent.exists()}]


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def shared_memory() -> set[str]:
    return {p.name for p in Path("/dev/shm").iterdir()}
