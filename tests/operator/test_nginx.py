"""The reverse proxy's configuration in a real nginx."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.api import Role
from tandem.operator.model_files import NAMES as MODEL_FILES
from tandem.operator.nginx import nginx_conf

from .endpoints import VARIANTS, planned
from .nginx import Proxy, answer, engine, nginx, proxy

LIMITS = {"maxConcurrentRequests": 2, "maxQueueSize": 1, "overflowStatusCode": 429}
CHAT = "/v1/chat/completions"


def conf(variant: str = "dpd-s3", changes: dict[str, Any] | None = None, role: Role = Role.DECODE) -> str:
    name, own = VARIANTS[variant]
    plan = planned(name, {**own, **(changes or {})})
    return nginx_conf(plan, next(p for p in plan.pools if p.role in (role, None)))


async def echo(method: str, target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
    answer(writer, 200, json.dumps({"target": target, "bytes": len(body)}).encode())


@pytest.mark.parametrize("variant", VARIANTS)
def test_nginx_takes_every_configuration(variant: str, tmp_path: Path) -> None:
    for role in Role:
        file = tmp_path / "nginx.conf"
        file.write_text(conf(variant, role=role).replace("/tmp/", f"{tmp_path}/"), "utf-8")
        done = subprocess.run(
            [nginx(), "-t", "-c", file, "-p", tmp_path], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


async def test_inference_passes_and_engines_other_paths_do_not(tmp_path: Path) -> None:
    async with engine(echo) as behind, proxy(conf(), tmp_path, behind.port) as front:
        for path in (CHAT, "/v1/completions", "/invocations", "/tokenize"):
            reply = await front.client.post(path, json={"a": 1})
            assert (reply.status_code, reply.json()["target"]) == (200, path)
        for path in ("/health", "/v1/models", "/metrics", "/version"):
            reply = await front.client.get(path)
            assert (reply.status_code, reply.json()["target"]) == (200, path)
        asked = len(behind.asked)
        for path in (
            "/sleep",
            "/reset_prefix_cache",
            "/pause",
            "/v1",
            "/",
            "/v1/load_lora_adapter",
            "/collective_rpc",
        ):
            reply = await front.client.post(path)
            assert (reply.status_code, reply.json()["error"]["code"]) == (404, 404)
        assert len(behind.asked) == asked


@pytest.mark.parametrize(
    "target",
    ["/v1/../sleep", "/sleep/../v1/models", "/v1/%6dodels", "//v1//models", "/v1/models/../../sleep"],
)
async def test_no_spelling_of_a_path_reaches_another(target: str, tmp_path: Path) -> None:
    """What the proxy passes on it writes itself."""
    async with engine(echo) as behind, proxy(conf(), tmp_path, behind.port) as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(front.client.base_url.port or 0))
        writer.write(f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        await reader.read()
        writer.close()
        assert {t for _, t, _ in behind.asked} <= {"/v1/models"}


@pytest.mark.parametrize(
    ("given", "target"), [({"healthCheckPath": "/health"}, "/health"), (..., "/ping"), ({}, "/ping")]
)
async def test_ping_is_the_engines_health_path(given: Any, target: str, tmp_path: Path) -> None:
    own = conf(changes={"spec.loadBalancer": given})
    async with engine(echo) as behind, proxy(own, tmp_path, behind.port) as front:
        assert (await front.client.get("/ping")).json()["target"] == target
        assert (await front.client.get("/health")).json()["target"] == "/health"


async def test_the_invocation_endpoint_passes(tmp_path: Path) -> None:
    own = conf("without a router", {"spec.invocationEndpoint": "my/model/predict"})
    async with engine(echo) as behind, proxy(own, tmp_path, behind.port) as front:
        reply = await front.client.post("/my/model/predict", json={})
        assert reply.json()["target"] == "/my/model/predict"


async def test_a_query_is_passed_on(tmp_path: Path) -> None:
    async with engine(echo) as behind, proxy(conf(), tmp_path, behind.port) as front:
        reply = await front.client.get("/v1/models?a=b&c=%20")
        assert reply.json()["target"] == "/v1/models?a=b&c=%20"


async def test_a_stream_comes_as_the_engine_writes_it(tmp_path: Path) -> None:
    """Each piece arrives while the engine still waits to write the next."""
    seen = asyncio.Queue[None]()

    async def stream(method: str, target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for i in range(3):
            piece = f"data: {i}\n\n".encode()
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await writer.drain()
            await seen.get()
        writer.write(b"0\r\n\r\n")

    pieces = []
    async with (
        engine(stream) as behind,
        proxy(conf(), tmp_path, behind.port) as front,
        front.client.stream("POST", CHAT, json={}) as reply,
    ):
        async for piece in reply.aiter_raw():
            pieces.append(piece)
            seen.put_nowait(None)
    assert pieces == [b"data: 0\n\n", b"data: 1\n\n", b"data: 2\n\n"]


async def test_a_client_that_leaves_is_gone_for_the_engine_too(tmp_path: Path) -> None:
    async def silent(method: str, target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: 1\n\n")
        await asyncio.Event().wait()

    async with engine(silent) as behind, proxy(conf(), tmp_path, behind.port) as front:
        async with front.client.stream("POST", CHAT, json={}) as reply:
            assert await anext(reply.aiter_raw()) == b"data: 1\n\n"
        await asyncio.wait_for(behind.gone.wait(), 30)


async def test_bodies_of_10_mb_pass_and_larger_ones_are_refused(tmp_path: Path) -> None:
    async with engine(echo) as behind, proxy(conf(), tmp_path, behind.port) as front:
        reply = await front.client.post(CHAT, content=b"x" * 10_000_000)
        assert reply.json()["bytes"] == 10_000_000
        reply = await front.client.post(CHAT, content=b"x" * (10 * 1024 * 1024 + 1))
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, 413)
        assert len(behind.asked) == 1


@pytest.mark.parametrize(
    ("status", "path"),
    [
        *((429, CHAT), (503, "/v1/completions"), (502, CHAT), (404, CHAT), (429, "/invocations")),
        # Which nginx knows for itself, or has other words for
        *((status, CHAT) for status in (400, 413, 494, 495, 496, 497, 499, 500, 504, 599)),
    ],
)
async def test_requests_beyond_the_limit_get_the_overflow_body(
    status: int, path: str, tmp_path: Path
) -> None:
    inside, free = asyncio.Semaphore(0), asyncio.Event()

    async def held(method: str, target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if target == path:
            inside.release()
            await free.wait()
        answer(writer, 200, b"{}")

    limits = {**LIMITS, "overflowStatusCode": status}
    own = conf(changes={"spec.worker.requestLimits": limits})
    async with engine(held) as behind, proxy(own, tmp_path, behind.port) as front:
        running = [asyncio.ensure_future(front.client.post(path, json={})) for _ in range(3)]
        for _ in running:
            await inside.acquire()
        reply = await front.client.post(path, json={})
        assert reply.status_code == status
        assert reply.json() == {
            "error": "Too many concurrent requests",
            "max_concurrent": 2,
            "max_queue_size": 1,
            "current": 2,
        }
        assert int(reply.headers["retry-after"]) > 0
        assert (await front.client.get("/health")).status_code == 200, "questions are not counted"
        free.set()
        assert {r.status_code for r in await asyncio.gather(*running)} == {200}
        assert (await front.client.post(path, json={})).status_code == 200


async def test_the_engines_own_errors_pass_as_they_are(tmp_path: Path) -> None:
    """Also those with the overflow's status."""

    async def busy(method: str, target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        answer(writer, int(body), b'{"error":"mine"}')

    own = conf(changes={"spec.worker.requestLimits": LIMITS})
    async with engine(busy) as behind, proxy(own, tmp_path, behind.port) as front:
        for status in (400, 413, 429, 500, 502, 503, 504):
            reply = await front.client.post(CHAT, content=str(status))
            assert (reply.status_code, reply.content) == (status, b'{"error":"mine"}')


def test_nginx_takes_the_highest_limits_that_the_resource_may_have(tmp_path: Path) -> None:
    limits = {"maxConcurrentRequests": 2**31 - 1, "maxQueueSize": 2**31 - 1}
    file = tmp_path / "nginx.conf"
    text = conf(changes={"spec.worker.requestLimits": limits})
    file.write_text(text.replace("/tmp/", f"{tmp_path}/"), "utf-8")
    done = subprocess.run([nginx(), "-t", "-c", file, "-p", tmp_path], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_prefillers_have_no_limit_of_their_own() -> None:
    """The router admits requests by what decoders take."""
    assert "limit_conn requests" not in conf("limits", role=Role.PREFILL)
    assert "limit_conn requests 12;" in conf("limits", role=Role.DECODE)


async def test_an_engine_that_is_not_up_is_told(tmp_path: Path) -> None:
    async with engine(echo) as behind:
        port = behind.port
    async with proxy(conf(), tmp_path, port) as front:
        reply = await front.client.post(CHAT, json={})
        assert (reply.status_code, reply.json()["error"]["type"]) == (503, "server_error")
        assert int(reply.headers["retry-after"]) > 0


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    for name in (*MODEL_FILES, "model-00001-of-00030.safetensors", "secret.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    return folder


async def test_the_router_gets_the_tokenizers_files_and_nothing_else(weights: Path, tmp_path: Path) -> None:
    async with engine(echo) as behind, proxy(conf(), tmp_path, behind.port, weights) as front:
        for name in MODEL_FILES:
            reply = await front.client.get(f"/tandem/model/{name}")
            assert (reply.status_code, reply.text) == (200, name)
            again = await front.client.get(
                f"/tandem/model/{name}", headers={"if-none-match": reply.headers["etag"]}
            )
            assert again.status_code == 304
        for name in (
            "model-00001-of-00030.safetensors",
            "secret.txt",
            "",
            "../nginx.conf",
            "%2e%2e/nginx.conf",
        ):
            assert (await front.client.get(f"/tandem/model/{name}")).status_code in (400, 404)
        assert (await front.client.post("/tandem/model/config.json")).status_code == 403
        assert not behind.asked


@pytest.mark.parametrize("variant", ["without a router", "downloaded by the engine"])
def test_files_are_not_offered_where_nobody_needs_them_or_none_are(variant: str) -> None:
    assert "/tandem/model" not in conf(variant)


async def test_its_metrics_are_prometheus_text(tmp_path: Path) -> None:
    async with engine(echo) as behind, proxy(conf(), tmp_path, behind.port) as front:
        assert (await front.metrics.get("/healthz")).json() == {"status": "ok"}
        page = (await front.metrics.get("/metrics")).text
        values = dict(line.split(" ") for line in page.splitlines() if not line.startswith("#"))
        assert int(values["nginx_connections_active"]) >= 1
        before = int(values["nginx_connections_accepted"])
        async with httpx.AsyncClient(base_url=front.client.base_url) as other:
            await other.get("/health")
        page = (await front.metrics.get("/metrics")).text
        values = dict(line.split(" ") for line in page.splitlines() if not line.startswith("#"))
        assert int(values["nginx_connections_accepted"]) > before


async def test_told_to_end_it_finishes_what_it_has_begun(tmp_path: Path) -> None:
    inside, free = asyncio.Event(), asyncio.Event()

    async def held(method: str, target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        inside.set()
        await free.wait()
        answer(writer, 200, b"{}")

    async with engine(held) as behind, proxy(conf(), tmp_path, behind.port) as front:
        running = asyncio.ensure_future(front.client.post(CHAT, json={}))
        await inside.wait()
        front.process.send_signal(signal.SIGTERM)
        await _refuses(front)
        free.set()
        assert (await running).status_code == 200
        assert await asyncio.wait_for(front.process.wait(), 30) == 0


async def test_its_container_ends_when_nginx_does(tmp_path: Path) -> None:
    async with engine(echo) as behind:
        with pytest.raises(AssertionError, match="unknown directive"):
            async with proxy(conf() + "nonsense;", tmp_path, behind.port):
                pass


async def _refuses(front: Proxy) -> None:
    """Wait until nobody can connect any more."""
    async with httpx.AsyncClient(base_url=front.client.base_url) as other:
        while True:
            try:
                await other.get("/metrics")
            except httpx.ConnectError:
                return


async def test_time_outs_are_longer_than_the_routers_patience(tmp_path: Path) -> None:
    plan = planned("dpd-s3")
    found = next(line for line in conf().splitlines() if "proxy_read_timeout" in line)
    assert int(found.split()[1].rstrip("s;")) > plan.times.longest_silence
