"""The header Authorization towards engines: the client's, none, or the router's own key, on every call."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tandem.config import RouterConfig
from tandem.http import Request, Responder
from tandem.router.app import running
from tandem.router.engine_authorization import EngineAuthorization
from tandem.router.engines import State

from .conftest import CHAT, LONG, SHORT, Start
from .discovery_fakes import Time
from .fakes import JSON, FakeEngine, engines, eventually
from .key_fakes import KEY_A, listed, replace


@dataclass
class LockedEngine(FakeEngine):
    """Asks for a key, as vLLM with `--api-key`."""

    key: str = "k1"
    calls: list[tuple[str, str | None]] = field(default_factory=list)
    """Paths, and what came as Authorization."""

    async def __call__(self, request: Request, responder: Responder) -> None:
        given = request.header(b"authorization")
        self.calls.append((request.path, None if given is None else given.decode()))
        if request.path.startswith("/v1") and given != f"Bearer {self.key}".encode():
            responder.send(401, JSON, b'{"error":"Unauthorized"}')
            return
        await super().__call__(request, responder)


def locked(prefill: list[FakeEngine], decode: list[FakeEngine]) -> None:
    for fakes in (prefill, decode):
        fakes[:] = [LockedEngine(fake.name) for fake in fakes]


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    replace(path, "k1\n")
    return path


def authorizations(fakes: list[FakeEngine]) -> set[str | None]:
    """What came with requests of clients."""
    return {seen.headers.get("authorization") for fake in fakes for seen in fake.requests}


@pytest.mark.parametrize(
    ("options", "sent"),
    [
        ({}, KEY_A["authorization"]),
        ({"engine_authorization": "pass"}, KEY_A["authorization"]),
        ({"engine_authorization": "drop"}, None),
        ({"api_keys_file": "keys"}, None),
        ({"api_keys_file": "keys", "engine_authorization": "drop"}, None),
        ({"api_keys_file": "keys", "engine_authorization": "pass"}, KEY_A["authorization"]),
        ({"engine_key_file": "key"}, "Bearer k1"),
        ({"api_keys_file": "keys", "engine_key_file": "key"}, "Bearer k1"),
        ({"engine_key_file": "key", "engine_authorization": "drop"}, "Bearer k1"),
    ],
    ids=str,
)
async def test_what_engines_get_of_a_clients_authorization(
    start: Start, tmp_path: Path, key: Path, options: dict[str, str], sent: str | None
) -> None:
    replace(tmp_path / "keys", listed(a={}))
    files = {name: str(tmp_path / v) if name.endswith("file") else v for name, v in options.items()}
    endpoint = await start(**files)
    for body, path in ((SHORT, "/v1/completions"), (LONG, "/v1/completions"), (CHAT, "/v1/chat/completions")):
        assert (await endpoint.post(body, path, **KEY_A)).status_code == 200
    assert authorizations(endpoint.prefill) == authorizations(endpoint.decode) == {sent}


async def test_every_call_to_an_engine_carries_the_routers_key(start: Start, key: Path) -> None:
    endpoint = await start(engine_key_file=str(key), before=locked)
    for body, path in ((LONG, "/v1/completions"), (CHAT, "/v1/chat/completions")):
        assert (await endpoint.post(body, path, authorization="Bearer x")).status_code == 200
    for engine in (*endpoint.prefill, *endpoint.decode):
        assert isinstance(engine, LockedEngine)
        assert {"/health", "/v1/models", "/metrics", "/v1/completions"} <= {path for path, _ in engine.calls}
        assert {given for _, given in engine.calls} == {"Bearer k1"}


async def test_engines_that_are_discovered_get_it_too(tmp_path: Path, key: Path) -> None:
    engine = LockedEngine("e")
    async with engines(engine):
        found = tmp_path / "engines.yaml"
        replace(found, f"engines: [{{url: '{engine.url}', role: both}}]")
        config = RouterConfig(port=0, discover_file=str(found), engine_key_file=str(key), drain_timeout=0.0)
        async with running(config, None, waiting_interval=0.01) as (_, app):

            async def ready() -> bool:
                return any(e.state is State.READY for e in app.fleet.engines)

            await eventually(ready)
    assert {given for _, given in engine.calls} == {"Bearer k1"}


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({}, "HTTP 401: give the key that it asks for by --engine-key-file"),
        ({"engine_authorization": "drop"}, "HTTP 401: give the key that it asks for by --engine-key-file"),
        ({"engine_key_file": "key"}, "HTTP 401: its key is not that of "),
    ],
    ids=str,
)
async def test_an_engine_that_wants_another_key_says_which_flag_is_for_it(
    start: Start, tmp_path: Path, options: dict[str, str], what: str
) -> None:
    replace(tmp_path / "key", "another")
    files = {name: str(tmp_path / v) if name.endswith("file") else v for name, v in options.items()}
    endpoint = await start(prefill=0, before=locked, wait=False, **files)

    async def told() -> bool:
        return what in str((await endpoint.client.get("/ready")).json()["reason"])

    await eventually(told)


async def test_a_client_does_not_pay_for_the_routers_wrong_key(start: Start, key: Path) -> None:
    """Told 401, it would look for the fault in its own."""
    endpoint = await start(engine_key_file=str(key), before=locked)
    for body in (SHORT, LONG):
        for engine in (*endpoint.prefill, *endpoint.decode):
            assert isinstance(engine, LockedEngine)
            engine.key = "k2"
        answer = await endpoint.post(body)
        assert answer.status_code in (502, 503)
        for engine in (*endpoint.prefill, *endpoint.decode):
            assert isinstance(engine, LockedEngine)
            engine.key = "k1"
        await endpoint.ready()
    assert {cause for _, cause in await endpoint.failures()} == {"unauthorized"}


async def test_a_clients_own_wrong_key_is_its_own_matter(start: Start) -> None:
    endpoint = await start()
    for engine in (*endpoint.prefill, *endpoint.decode):
        engine.on_generate = lambda engine, seen, responder: (
            responder.send(401, JSON, b'{"error":{"message":"who?"}}') or True
        )
    answer = await endpoint.post(LONG, authorization="Bearer x")
    assert (answer.status_code, answer.json()) == (401, {"error": {"message": "who?"}})


class Followed:
    def __init__(self, path: Path) -> None:
        self._time = Time()
        config = RouterConfig(decode=("http://a:1",), engine_key_file=str(path))
        self.authorization = EngineAuthorization(config, sleep=self._time.sleep)
        self._task = asyncio.create_task(self.authorization.follow())

    async def look(self) -> None:
        for seconds in (1.0, 0.1):
            await self._time.asleep.wait()
            self._time.advance(seconds)
        await self._time.asleep.wait()

    @property
    def sent(self) -> bytes:
        ((name, value),) = self.authorization.applied([(b"authorization", b"Bearer x")])
        assert name == b"authorization"
        return value

    async def stop(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task


async def test_the_engines_key_follows_its_file(key: Path, caplog: pytest.LogCaptureFixture) -> None:
    followed = Followed(key)
    await followed.look()
    assert followed.sent == b"Bearer k1"
    replace(key, " k2 \n\n")
    await followed.look()
    assert followed.sent == b"Bearer k2"
    replace(key, "k 3")
    await followed.look()
    assert followed.sent == b"Bearer k2"
    key.unlink()
    await followed.look()
    assert followed.sent == b"Bearer k2"
    assert [record.getMessage() for record in caplog.records] == [
        f"the engines' key of the file {key}: {what}; until then the key that it had before stays"
        for what in (
            "it is not one word of printable ASCII. Put the engines' key there, and nothing else",
            "it does not exist. Create it",
        )
    ]
    await followed.stop()


@pytest.mark.parametrize("content", [b"", b"\n", b"a b", b"a\nb", b"\xc3\xa9", b"a\0", b"x" * 5000, None])
def test_a_router_does_not_start_with_a_key_that_is_none(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    config = RouterConfig(decode=("http://a:1",), engine_key_file=str(path))
    with pytest.raises(ValueError, match=f"--engine-key-file: {path}: it "):
        EngineAuthorization(config)
