"""One endpoint of real engines for the whole session: `tandem up` with the built-in model."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import yaml

from tandem.config import Subscription
from tandem.engine import cpu
from tandem.engine.kv_events import kv_events_config
from tandem.engine.roles import API_SERVER
from tandem.local import launch
from tandem.local.manifest import read_manifest
from tandem.prompt import PromptCounter, load
from tandem.sim import EngineSpec, Fleet, parse

from .pairs import Both, EventSource, Pair

START_SECONDS = 240
CONTEXT = 4096
KV_BLOCKS = 40


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder starts or shares real engines."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.timeout(START_SECONDS + 180))


@dataclass
class Up:
    """A `tandem up` process and what it started."""

    process: subprocess.Popen[bytes]
    url: str
    state: Path
    plan: dict[str, Any]
    prefill: list[str] = field(default_factory=list)
    decode: list[str] = field(default_factory=list)

    def log(self, name: str) -> str:
        (file,) = self.state.glob(f"**/{name}.log")
        return file.read_text("utf-8", "replace")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start_up(state: Path, *arguments: str) -> Up:
    """Run `tandem up ARGUMENTS` on a free port and wait until it is ready."""
    port = free_port()
    command = [sys.executable, "-m", "tandem", "up", "--port", str(port), *arguments]
    environment = {**os.environ, "XDG_STATE_HOME": str(state)}
    shown = subprocess.run(
        [*command, "--dry-run", "--json"], env=environment, capture_output=True, text=True, check=True
    )
    plan = json.loads(shown.stdout)
    with (state / "up.log").open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    up = Up(process, f"http://127.0.0.1:{port}", state, plan)
    try:
        wait_ready(up)
        (file,) = state.glob(f"**/{port}/state.json")
        urls = {process["name"]: process["url"] for process in json.loads(file.read_text())["processes"]}
    except BaseException:
        stop_up(up)
        raise
    for engine in plan["engines"]:
        engine["url"] = urls[engine["name"]]  # another endpoint may have taken the port that was planned
    for role in ("prefill", "decode"):
        setattr(up, role, [e["url"] for e in plan["engines"] if e["role"] == role])
    return up


def wait_ready(up: Up) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if up.process.poll() is not None:
            pytest.fail(f"tandem up ended with {up.process.returncode}:\n{(up.state / 'up.log').read_text()}")
        try:
            if httpx.get(f"{up.url}/ready", timeout=5, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.25)
    pytest.fail(f"tandem up was not ready in time:\n{(up.state / 'up.log').read_text()}")


def stop_up(up: Up, number: int = signal.SIGTERM) -> int:
    """Stop `tandem up`; returns its exit code."""
    if up.process.poll() is None:
        up.process.send_signal(number)
    return up.process.wait(60)


def group_of(up: Up) -> list[int]:
    """`tandem up` and everything below it."""
    found = [up.process.pid]
    for pid in found:
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            found += [int(child) for child in task.read_text().split()]
    return found


def with_kv_events(folder: Path) -> Path:
    """A manifest: the built-in endpoint, but that its engines publish KV events, and that their caches hold
    little more than one full context, which is half as long, so that a test can soon fill them."""
    manifest = read_manifest(None).raw
    for role, spec in (("prefill", "prefillSpec"), ("decode", "decodingSpec")):
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"ipc://{folder}/{role}",
            "replay_endpoint": f"ipc://{folder}/{role}-replay",
            "topic": "kv",
        }
        settings = manifest["spec"]["pdSpec"][spec]
        settings["args"] = [*settings.get("args", []), "--kv-events-config", json.dumps(events)]
    manifest["spec"]["worker"]["args"] += [
        *("--max-model-len", str(CONTEXT), "--num-gpu-blocks-override", str(KV_BLOCKS)),
    ]
    file = folder / "endpoint.yaml"
    file.write_text(yaml.safe_dump(manifest), "utf-8")
    return file


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """One prefiller and one decoder with SmolLM2-135M behind a router with a threshold of 1,024 tokens."""
    folder = tmp_path_factory.mktemp("smollm2")
    up = start_up(folder, "--file", str(with_kv_events(folder)))
    yield up
    assert stop_up(up) == 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both(smollm2: Up) -> AsyncIterator[Both]:
    """The real pair, and a simulated one started by the same command lines."""
    engines = smollm2.plan["engines"]
    roles = [engine["role"] for engine in engines]
    # The offset keeps the simulated engines away from where the real ones publish.
    specs = [EngineSpec(parse(engine["argv"]), events_offset=1) for engine in engines]
    limits = httpx.Limits(keepalive_expiry=2.0)  # gives connections up before vLLM does
    async with (
        Fleet(specs, environment={}) as fleet,
        httpx.AsyncClient(timeout=60.0, limits=limits, trust_env=False) as client,
    ):
        pairs = []
        for urls in ([engine["url"] for engine in engines], fleet.urls):
            sources = [(await client.get(f"{url}/kv_event_sources")).json()["0"] for url in urls]
            events = [EventSource(source["endpoint"], source["replay_endpoint"]) for source in sources]
            pairs.append(
                Pair(
                    client, **dict(zip(roles, urls, strict=True)), events=dict(zip(urls, events, strict=True))
                )
            )
        yield Both(*pairs)


@pytest.fixture(scope="session")
def tiny(smollm2: Up, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer model with SmolLM2's tokenizer; its weights are made up by `--load-format dummy`."""
    source, folder = Path(smollm2.plan["model"]), tmp_path_factory.mktemp("tiny")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(source / name, folder)
    config = json.loads((source / "config.json").read_text())
    config |= {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@contextmanager
def roleless_engines(
    python: str, model: Path, folder: Path, count: int, *flags: str
) -> Iterator[dict[str, EventSource]]:
    """Engines without a KV connector that publish KV events, by URL; each on one core.

    They serve the paths of vLLM's developer mode too."""
    processes: list[subprocess.Popen[bytes]] = []
    engines: dict[str, EventSource] = {}
    cores = sorted(os.sched_getaffinity(0))
    environment = {k: v for k, v in os.environ.items() if k not in cpu.NOT_INHERITED}
    environment |= cpu.default_environment(["--enforce-eager"]) | cpu.owned_environment(1)
    environment |= {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    try:
        for i in range(count):
            port = free_port()
            where = Subscription(f"ipc://{folder}/events-{i}", f"ipc://{folder}/replay-{i}")
            command = [
                *(sys.executable, "-I", launch.__file__, str(cores[i % len(cores)])),
                *(python, "-m", API_SERVER, "--host", "127.0.0.1", "--port", str(port)),
                *("--model", str(model), "--served-model-name", "smollm2", "--enforce-eager"),
                *("--distributed-executor-backend", "uni", "--enable-prompt-tokens-details"),
                *("--kv-events-config", kv_events_config(where), *flags),
            ]
            with (folder / f"engine-{i}.log").open("wb") as log:
                processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            engines[f"http://127.0.0.1:{port}"] = EventSource(where.events, str(where.replay))
        for i, url in enumerate(engines):
            wait_for(processes[i], f"{url}/health", folder / f"engine-{i}.log")
        yield engines
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(60)


def wait_for(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Until a page of a process is there."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(httpx.TransportError):
            if httpx.get(url, timeout=5, trust_env=False).status_code == 200:
                return
        time.sleep(0.25)
    pytest.fail(f"{url} did not start (exit code {process.poll()}):\n{log.read_text('utf-8', 'replace')}")


@pytest.fixture(scope="session")
def counter(smollm2: Up) -> PromptCounter:
    return load(Path(smollm2.plan["model"]))


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    """Gives connections up before vLLM does."""
    limits = httpx.Limits(keepalive_expiry=2.0)
    async with httpx.AsyncClient(timeout=180.0, limits=limits, trust_env=False) as client:
        yield client


@pytest.fixture(scope="session")
def always(smollm2: Up, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a second router before the same engines, which disaggregates every prompt."""
    log, port = tmp_path_factory.mktemp("always") / "router.log", free_port()
    command = [
        *(sys.executable, "-m", "tandem", "router", "--port", str(port)),
        *("--prefill", *smollm2.prefill, "--decode", *smollm2.decode, "--routing-threshold", "0"),
        *("--model-path", smollm2.plan["model"], "--explain", "--drain-timeout", "5"),
    ]
    with ready(command, port, log) as url:
        yield url


@contextmanager
def ready(
    command: Sequence[str], port: int, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """The URL of a router that a command starts on a port, once it is ready."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(process, f"{url}/ready", log)
        yield url
    finally:
        process.terminate()
        assert process.wait(60) == 0
