"""The admin port: what it tells of engines, and what else is and is not on it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest

from tandem.config import RouterConfig
from tandem.router.app import running

from .admin_fakes import LETTERS, ROUTE, Administer, Administered, Patient, admin_client, administering
from .conftest import LONG, SHORT, Endpoint, Start
from .fakes import FakeEngine, engines, eventually
from .lmcache_fakes import Hold


@pytest.fixture
async def administer(start: Start) -> AsyncIterator[Administer]:
    """See `administering`."""
    async with AsyncExitStack() as stack:
        yield administering(start, stack)


# /engines


async def test_an_engines_state_load_labels_and_models_are_told(administer: Administer) -> None:
    fake = FakeEngine("a")
    admin = await administer(fake, labels=",zone=a,tp=2", local=LETTERS, routing_strategy="prefixaware")
    hold = fake.on_generate = Hold()
    request = asyncio.create_task(admin.endpoint.post({**LONG, "max_tokens": 7}))
    await hold.holds()
    tokens = len(LONG["prompt"])
    assert await admin.get("/engines") == {
        "missing": None,
        "sources": [{"name": "command line", "engines": 1, "trouble": None, "age": None}],
        "engines": [
            {
                "url": fake.url,
                "role": "both",
                "labels": {"tp": "2", "zone": "a"},
                "state": "ready",
                "why": None,
                "models": ["m"],
                "requestsInFlight": 1,
                "requestsHeld": 1,
                "tokensInFlight": tokens + 7,
                "pendingPromptTokens": tokens,
                "failuresInARow": 0,
                "runningByItsMetrics": None,
                "waitingByItsMetrics": None,
                "kvUse": 0.0,
                "cacheTokens": None,
                "reserved": 0.0,
                "rampUp": 1.0,
            }
        ],
    }
    hold.go_on.set()
    await request
    await admin.told(fake, requestsInFlight=0, requestsHeld=0, tokensInFlight=0, pendingPromptTokens=0)


async def test_engines_come_by_url_with_the_prefillers_of_each_decoder(administer: Administer) -> None:
    admin = await administer(prefill=2, decode=2)
    told = (await admin.get("/engines"))["engines"]
    assert [e["url"] for e in told] == sorted(e["url"] for e in told)
    prefillers = sorted(e.url for e in admin.endpoint.prefill)
    for fake in admin.endpoint.decode:
        assert (await admin.engine(fake))["prefillers"] == prefillers
    for fake in admin.endpoint.prefill:
        assert "prefillers" not in await admin.engine(fake)


async def test_an_engine_that_cannot_be_reached_says_why(administer: Administer) -> None:
    there, gone = FakeEngine("a"), FakeEngine("b")
    admin = await administer(there, gone)
    assert gone.server is not None
    port = gone.server.port
    await gone.server.close()
    while (await admin.engine(gone))["state"] == "ready":
        await admin.endpoint.post(SHORT)
    lost = await admin.engine(gone)
    assert lost["state"] == "waiting"
    assert "connect" in lost["why"]
    assert str(port) in lost["why"]
    assert (await admin.get("/engines"))["missing"] is None, "there is another"


async def test_an_engine_that_fails_its_canary_says_why(administer: Administer) -> None:
    fake = FakeEngine("a", refuses=lambda seen: True)
    admin = await administer(fake, wait=False)

    async def failed() -> bool:
        return "HTTP 500" in (await admin.engine(fake))["why"]

    await eventually(failed)
    assert (await admin.engine(fake))["state"] == "waiting"
    assert fake.url in (await admin.get("/engines"))["missing"]


async def test_a_prefiller_without_a_decoder_says_that_it_waits_for_one(administer: Administer) -> None:
    def no_decoder(prefill: list[FakeEngine], decode: list[FakeEngine]) -> None:
        decode[0].refuses = lambda seen: True

    admin = await administer(prefill=1, decode=1, wait=False, before=no_decoder)
    await admin.told(
        admin.endpoint.prefill[0], why="answers, and waits for a decode engine to be proved with"
    )


async def test_a_suspect_engine_says_how_often_it_failed(administer: Administer) -> None:
    fake = Patient("a")
    fake.go_on.set()
    admin = await administer(fake, suspect_after=3)
    fake.go_on.clear()
    (engine,) = admin.endpoint.app.fleet.engines
    for _ in range(3):
        admin.endpoint.app.fleet.failed(engine)
    told = await admin.engine(fake)
    assert (told["state"], told["failuresInARow"]) == ("suspect", 3)
    assert told["why"] == "3 requests failed in a row"
    fake.go_on.set()
    await admin.told(fake, state="ready", why=None, failuresInARow=0)


async def test_engines_that_are_ready_and_get_nothing_say_why(administer: Administer) -> None:
    spare = FakeEngine("a")
    admin = await administer(spare, prefill=1, decode=1)
    assert "decode engines serve its models" in (await admin.engine(spare))["why"]
    (prefiller,), (decoder,) = admin.endpoint.prefill, admin.endpoint.decode
    assert (await admin.engine(prefiller))["why"] is None
    assert decoder.server is not None
    await decoder.server.close()
    while (await admin.engine(decoder))["state"] == "ready":
        await admin.endpoint.post(SHORT)
    assert (await admin.engine(spare))["why"] is None, "now it is used"
    told = await admin.engine(prefiller)
    assert (told["state"], told["why"]) == ("ready", "no decode engine that it was proved with is in use")


async def test_trouble_with_a_source_of_engines_is_told(administer: Administer, tmp_path: Path) -> None:
    path = tmp_path / "engines.json"
    path.write_text('{"engines": [')
    admin = await administer(FakeEngine("a"), discover_file=str(path))

    async def troubled() -> bool:
        return any(source["trouble"] for source in (await admin.get("/engines"))["sources"])

    await eventually(troubled)
    line, file = (await admin.get("/engines"))["sources"]
    assert line == {"name": "command line", "engines": 1, "trouble": None, "age": None}
    assert (file["name"], file["engines"]) == (f"file {path}", 0)
    assert "until then there are none from it" in file["trouble"]


async def test_only_kvaware_tells_of_an_index(administer: Administer, tmp_path: Path) -> None:
    plain = await administer(FakeEngine("a"))
    assert "kvIndex" not in (await plain.get("/engines"))["engines"][0]
    fake = FakeEngine("b")
    admin = await administer(
        fake, routing_strategy="kvaware", kv_events=f"ipc://{tmp_path}/events", local=LETTERS
    )
    told = await admin.engine(fake)
    assert (told["kvEvents"], told["kvIndex"]) == (f"ipc://{tmp_path}/events", [])


# The port


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("POST", "/engines", "GET, HEAD"),
        ("DELETE", "/engines", "GET, HEAD"),
        ("POST", "/metrics", "GET, HEAD"),
        ("GET", ROUTE, "POST"),
        ("PUT", ROUTE, "POST"),
    ],
)
async def test_pages_take_their_methods_alone(
    administer: Administer, method: str, path: str, allow: str
) -> None:
    admin = await administer(FakeEngine("a"))
    answer = await admin.client.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allow)
    assert answer.json()["error"]["message"] == f"{path} takes {allow.replace(', ', ' and ')}."


async def test_there_is_nothing_else_on_it(administer: Administer) -> None:
    fake = FakeEngine("a")
    admin = await administer(fake)
    for path in (
        "/",
        "/v1/completions",
        "/v1/chat/completions",
        "/admin",
        "/engines/",
        "/ready",
        "/tokenize",
    ):
        for method in ("GET", "POST"):
            answer = await admin.client.request(method, path, json=SHORT)
            assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
    assert fake.requests == []


async def test_its_pages_answer_head(administer: Administer) -> None:
    admin = await administer(FakeEngine("a"))
    for path in ("/engines", "/metrics"):
        got, head = await admin.client.get(path), await admin.client.head(path)
        assert (got.status_code, head.status_code) == (200, 200)
        assert head.content == b""
        assert head.headers["content-type"] == got.headers["content-type"]


async def test_with_it_the_public_port_names_no_engine(administer: Administer) -> None:
    admin = await administer(prefill=1, decode=1)
    public = admin.endpoint.client
    assert (await public.get("/metrics")).status_code == 404
    assert (await public.get("/engines")).status_code == 404
    assert (await public.post(ROUTE, json=SHORT)).status_code == 404
    assert (await public.get("/ready")).json() == {"ready": True, "reason": None}
    assert "tandem_requests_total" in await admin.metrics()
    for fake in (*admin.endpoint.prefill, *admin.endpoint.decode):
        assert fake.server is not None
        await fake.server.close()
    await admin.endpoint.post(SHORT)
    for page in ("/ready", "/health", "/v1/models"):
        text = (await public.get(page)).text
        assert "127.0.0.1" not in text
    assert (await public.get("/ready")).json() == {"ready": False, "reason": "no decode engine is ready"}


async def test_without_it_there_is_no_admin_page(start: Start) -> None:
    endpoint = await start()
    assert endpoint.app.admin is None
    assert (await endpoint.client.get("/engines")).status_code == 404
    assert (await endpoint.client.post(ROUTE, json=SHORT)).status_code == 404


async def test_it_listens_on_the_loopback_address_alone(administer: Administer) -> None:
    admin = await administer(FakeEngine("a"))
    assert admin.endpoint.app.admin is not None
    listener = admin.endpoint.app.admin._listener
    assert [s.getsockname()[0] for s in listener.sockets] == ["127.0.0.1"]
    assert RouterConfig(decode=("http://d:1",), host="0.0.0.0").admin_host == "127.0.0.1"


async def test_a_port_that_is_taken_is_named(no_task_left: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = RouterConfig(port=0, decode=("http://127.0.0.1:1",), admin_port=port)
        with pytest.raises(OSError, match=f"{port}.*address already in use"):
            async with running(config, None):
                pass


async def test_a_body_that_is_too_large_is_refused(administer: Administer) -> None:
    """As on the public port: 64 MiB."""
    admin = await administer(FakeEngine("a"))
    assert admin.endpoint.app.admin is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", admin.endpoint.app.admin.port)
    size = (64 << 20) + 1
    writer.write(b"POST /admin/route HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size)
    status = await reader.readline()
    assert b" 413 " in status
    writer.close()
    await writer.wait_closed()


async def test_it_answers_while_the_router_drains() -> None:
    fake = FakeEngine("a")
    stop, serving = asyncio.Event(), asyncio.get_running_loop().create_future()

    async def serve() -> None:
        config = RouterConfig(port=0, engine=(fake.url,), admin_port=0, drain_timeout=20.0)
        async with running(config, None, waiting_interval=0.01) as (server, app):
            serving.set_result((server, app))
            await stop.wait()

    async with engines(fake):
        router = asyncio.create_task(serve())
        server, app = await serving
        public = httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=20.0, trust_env=False)
        async with public, admin_client(app) as client:
            admin = Administered(Endpoint(public, app, [], []), client, [fake])
            await admin.told(fake, state="ready")
            hold = fake.on_generate = Hold()
            request = asyncio.create_task(public.post("/v1/completions", json=SHORT))
            await hold.holds()
            stop.set()

            async def draining() -> bool:
                return bool(app.draining)

            await eventually(draining)
            assert (await admin.engine(fake))["requestsInFlight"] == 1
            assert "tandem_requests_running 1.0" in await admin.metrics()
            assert (await admin.chosen(SHORT))["decode"]["url"] == fake.url
            hold.go_on.set()
            assert (await request).status_code == 200
        await router
    with pytest.raises(OSError, match="onnect"):
        await asyncio.open_connection("127.0.0.1", app.admin.port)
