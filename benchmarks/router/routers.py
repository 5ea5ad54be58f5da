"""The routers that are measured, each in front of the same prefill and decode engines (`fake_engines`).

All disaggregate every request by vLLM's NIXL hand-off: the prefill leg is answered before the decode leg is
sent. All choose engines in turn, keep metrics, and log as they do by default, into a file.

- Tandem: threshold 0 unless a part says otherwise.
- vllm-router 0.1.17: `--vllm-pd-disaggregation`.
- smg 1.13: `--pd-disaggregation`. It reads no KV connector from engines at fixed addresses, so its prefill
  leg does not ask for a hand-off; the decode leg carries what the prefiller answered.
- nginx: a plain proxy to the decoders, without any prefill: what a hop costs at least.
- direct: no router at all; the first decoder is asked.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import shutil
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fake_engines import TOKENS
from machine import cpu_seconds, free_ports, on_core, tree
from packages import program
from processes import end, last_words, start, until_ready
from streams import Clients
from texts import chat

from tandem.bench.load import ask
from tandem.http import Client, Origin

HERE = Path(__file__).resolve().parent
TANDEM, VLLM_ROUTER, SMG, NGINX, DIRECT = "Tandem", "vllm-router", "smg", "nginx", "direct"
DISAGGREGATING = (TANDEM, VLLM_ROUTER, SMG)
READY_SECONDS = 180.0
"""The most: many pairs of engines are proved one by one."""
_LOOK_SECONDS = 1.0
_AT_REST = 0.15
"""Of a core: more is no router without requests, even with 256 engines to look after."""
_READY_ANSWERS = 8
"""Of every router, in a row, before it is measured."""


@functools.cache
def cores() -> tuple[int, int]:
    """One for the router that is measured, and one for engines and clients. Raises SystemExit."""
    found = sorted(os.sched_getaffinity(0))
    if len(found) < 2:
        raise SystemExit("two cores are needed: one for the router, one for engines and clients")
    return found[-1], found[0]


# --- engines ---


class Engines:
    """The process of the engines."""

    def __init__(self, process: Process, prefill: Sequence[int], decode: Sequence[int]) -> None:
        self.process = process
        self.prefill = prefill
        self.decode = decode

    async def asked(self, **setting: float) -> dict[str, int]:
        """What came since the last look (see `fake_engines.Asked`). `setting`: of the answers from now on."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(setting).encode() + b"\n")
        found: dict[str, int] = json.loads(await self.process.stdout.readline())
        return found


@asynccontextmanager
async def engines(pairs: int = 1) -> AsyncIterator[Engines]:
    """So many prefillers and as many decoders, on the core of the clients."""
    ports = free_ports(2 * pairs)
    prefill, decode = ports[:pairs], ports[pairs:]
    with on_core(cores()[1]):
        command = [sys.executable, str(HERE / "fake_engines.py"), json.dumps(prefill), json.dumps(decode)]
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    try:
        assert process.stdout
        if not await process.stdout.readline():
            raise SystemExit("the engines ended at once")
        yield Engines(process, prefill, decode)
    finally:
        await end(process)


# --- routers ---


@dataclass(frozen=True)
class Setting:
    """What a router is started with."""

    prefill: Sequence[int]
    decode: Sequence[int]
    port: int
    spare: int
    """A port for its metrics."""
    folder: Path
    """For its files."""
    more: Sequence[str] = ()
    """Words for its command line."""


def nginx() -> str | None:
    """Where nginx is, if it is installed."""
    return shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


def known() -> list[str]:
    """The names of all that can be measured here."""
    return [*DISAGGREGATING, *([NGINX] if nginx() else ()), DIRECT]


def _tandem(s: Setting) -> list[str]:
    words = [sys.executable, "-m", "tandem", "router", "--host", "127.0.0.1", "--port", str(s.port)]
    words += ["--admin-port", str(s.spare), "--routing-strategy", "roundrobin"]
    if "--routing-threshold" not in s.more and "--model-path" not in s.more:
        words += ["--routing-threshold", "0"]
    return [*words, "--prefill", *_urls(s.prefill), "--decode", *_urls(s.decode), *s.more]


def _vllm_router(s: Setting) -> list[str]:
    words = [str(program("vllm-router")), "--host", "127.0.0.1", "--port", str(s.port)]
    words += ["--prometheus-port", str(s.spare), "--policy", "round_robin", "--vllm-pd-disaggregation"]
    return [*words, "--worker-startup-check-interval", "1", *_each(s, bootstrap=()), *s.more]


def _smg(s: Setting) -> list[str]:
    words = [str(program("smg")), "launch", "--host", "127.0.0.1", "--port", str(s.port), "--backend", "vllm"]
    words += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(s.spare)]
    # As many as the most streams here; else it takes 4,096 at once.
    words += ["--max-concurrent-requests", "8192", "--policy", "round_robin", "--pd-disaggregation"]
    return [*words, *_each(s, bootstrap=("none",)), *s.more]


def _urls(ports: Sequence[int]) -> list[str]:
    return [f"http://127.0.0.1:{port}" for port in ports]


def _each(s: Setting, bootstrap: Sequence[str]) -> Iterator[str]:
    for url in _urls(s.prefill):
        yield from ("--prefill", url, *bootstrap)
    for url in _urls(s.decode):
        yield from ("--decode", url)


_NGINX = """
daemon off;
worker_processes 1;
worker_rlimit_nofile 20000;
pid {folder}/pid;
error_log {folder}/error.log;
events {{ worker_connections 16000; }}
http {{
  access_log {folder}/access.log;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  client_body_buffer_size 64k;
  keepalive_requests 1000000;
  upstream decoders {{
    {servers}
    keepalive 512;
    keepalive_requests 1000000;
  }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location = /status {{ stub_status; access_log off; }}
    location / {{
      proxy_pass http://decoders;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
    }}
  }}
}}
"""


def _nginx(s: Setting) -> list[str]:
    servers = " ".join(f"server 127.0.0.1:{port};" for port in s.decode)
    config = s.folder / "nginx.conf"
    config.write_text(_NGINX.format(folder=s.folder, port=s.port, servers=servers))
    found = nginx()
    assert found is not None
    return [found, "-p", str(s.folder), "-c", str(config), "-e", str(s.folder / "error.log"), *s.more]


_COMMANDS = {TANDEM: _tandem, VLLM_ROUTER: _vllm_router, SMG: _smg, NGINX: _nginx}


@dataclass
class Running:
    """A router that serves; `pid` is None where there is none."""

    name: str
    port: int
    pid: int | None

    def processes(self) -> list[int]:
        return tree(self.pid) if self.pid is not None else []


@asynccontextmanager
async def serving(name: str, behind: Engines, more: Sequence[str] = ()) -> AsyncIterator[Running]:
    """Start a router on its own core, and wait until it uses all engines. Raises SystemExit after its last
    words."""
    if name == DIRECT:
        yield Running(name, behind.decode[0], None)
        return
    port, spare = free_ports(2)
    process: Process | None = None
    try:
        with _folder() as folder, last_words() as log:
            s = Setting(behind.prefill, behind.decode, port, spare, folder, more)
            with on_core(cores()[0]):
                process = await start(_COMMANDS[name](s), stdout=log, stderr=log)
            await _until_ready(name, s, process)
            await _until_at_rest(name, process.pid)
            yield Running(name, port, process.pid)
    finally:
        if process is not None:
            await end(process)


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)  # nginx's workers are another user's
        yield folder


async def _until_ready(name: str, s: Setting, process: Process) -> None:
    client = Client()
    try:
        await until_ready(name, process, lambda: _knows_all(client, name, s), READY_SECONDS)
    finally:
        await client.aclose()
    clients = Clients(s.port, tokens=TOKENS)
    for number in range(_READY_ANSWERS * len(s.decode)):
        answer = await clients.ask(chat(f"ready {number}", TOKENS))
        if answer.fault:
            raise SystemExit(f"{name} does not serve: {answer.fault}")
    clients.close()


async def _until_at_rest(name: str, pid: int) -> None:
    """Helper processes load what they need after a router is ready."""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        before, begun = cpu_seconds(pid), time.monotonic()
        await asyncio.sleep(_LOOK_SECONDS)
        if cpu_seconds(pid) - before < _AT_REST * (time.monotonic() - begun):
            return
    raise SystemExit(f"{name} has not come to rest in {READY_SECONDS:.0f} s")


async def _knows_all(client: Client, name: str, s: Setting) -> bool:
    async def told(port: int, path: str) -> Any:
        return await ask(client, Origin.parse(f"http://127.0.0.1:{port}"), path)

    match name:
        case "Tandem":
            engines = json.loads(await told(s.spare, "/engines"))["engines"]
            pairs = sum(len(engine.get("prefillers", ())) for engine in engines)
            return pairs == len(s.prefill) * len(s.decode)
        case "smg":
            workers = json.loads(await told(s.port, "/workers"))["workers"]
            return sum(bool(w.get("is_healthy")) for w in workers) == len(s.prefill) + len(s.decode)
        case "nginx":
            await told(s.port, "/status")
        case _:
            await told(s.port, "/health")
    return True
