"""A router before engines that run already: what it is told, and which engines are refused, in words."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tandem.api import parse_endpoint
from tandem.config import RouterConfig
from tandem.http import Request, Responder, serve
from tandem.local import attach, supervisor
from tandem.local.attach import attach_plan
from tandem.local.endpoint import what_router_waits_for
from tandem.local.errors import LocalError, ResourceError
from tandem.local.manifest import read_manifest
from tandem.local.plan import LocalPlan
from tandem.sim import EngineSpec, Fleet, parse

from ..api.manifests import COLOCATED, NVME, S3


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(attach, "require_free", lambda port, host: None)
    return tmp_path / "home"


def engine(*more: str, role: str | None = "kv_both", name: str = "m") -> EngineSpec:
    """A simulated engine; `role` None: without a KV connector."""
    flags = ["--model", "/weights", "--served-model-name", name, "--block-size", "32", *more]
    if role is not None:
        flags += ["--kv-transfer-config", json.dumps({"kv_connector": "NixlConnector", "kv_role": role})]
    return EngineSpec(parse(flags))


@asynccontextmanager
async def engines(*specs: EngineSpec) -> AsyncIterator[list[str]]:
    async with Fleet(specs, environment={}) as fleet:
        yield fleet.urls


async def planned(
    prefill: list[str], decode: list[str], manifest: str | None = None, **more: Any
) -> LocalPlan:
    """A plan; None stands for the built-in endpoint."""
    if manifest is None:
        builtin = read_manifest(None)
        endpoint, raw = attach.renamed(builtin.endpoint), builtin.raw
    else:
        endpoint, raw = parse_endpoint(manifest, source="endpoint.yaml")
    options = {"given": manifest is not None, **more}
    return await asyncio.to_thread(attach_plan, endpoint, raw, prefill, decode, "/venv/bin/python", **options)


async def refused(prefill: list[str], decode: list[str], manifest: str | None = None, **more: Any) -> str:
    with pytest.raises(LocalError) as error:
        await planned(prefill, decode, manifest, **more)
    return str(error.value)


async def test_only_the_router_is_started_and_it_has_the_engines() -> None:
    async with engines(engine(role="kv_producer"), engine(), engine(role="kv_consumer")) as (one, two, three):
        plan = await planned([one, two], [three])
    assert [p.name for p in plan.processes] == ["router"]
    assert plan.router == RouterConfig(
        prefill=(one, two),
        decode=(three,),
        invocation_path="/v1/chat/completions",
        routing_threshold=1024,
        routing_strategy="roundrobin",
        kv_block_size=32,
        explain=True,
    )
    assert (plan.notes, plan.unused_fields) == ((), ())
    assert (plan.served_name, plan.model, plan.logs.parts[-2:]) == ("m", None, ("attached", "8000"))
    data = json.loads(json.dumps(plan.as_dict()))
    assert data["engines"] == []
    assert data["attached"] == [
        {"role": "prefill", "url": one},
        {"role": "prefill", "url": two},
        {"role": "decode", "url": three},
    ]


async def test_a_manifest_says_how_to_route_and_whose_tokenizer_counts(model: Path) -> None:
    raw = yaml.safe_load(NVME)
    spec = raw["spec"]
    spec["pdSpec"]["routingThreshold"] = 77
    spec["intelligentRoutingSpec"] = {"enabled": True, "routingStrategy": "prefixaware"}
    spec["worker"] |= {
        "args": ["--served-model-name", "m", "--chat-template", "t.jinja", "--max-model-len", "99"],
        "requestLimits": {"maxConcurrentRequests": 5},
    }
    spec["kubernetes"]["volumes"][0]["hostPath"] = {"path": str(model)}
    async with engines(engine(), engine()) as (one, two):
        plan = await planned([one], [two], yaml.safe_dump(raw))
    router = plan.router
    assert (router.routing_threshold, router.routing_strategy) == (77, "prefixaware")
    assert (router.max_concurrent_requests, router.chat_template) == (5, "t.jinja")
    assert (router.model_path, plan.model) == (str(model), model)
    assert router.max_model_len is None, "the engines know their own"
    assert plan.name == raw["metadata"]["name"]


async def test_a_model_folder_on_the_command_line_counts(model: Path) -> None:
    async with engines(engine(), engine()) as (one, two):
        plan = await planned([one], [two], model=model)
        assert plan.router.model_path == str(model)
        said = await refused([one], [two], model=model / "none")
    assert said.startswith(f"--model: {model / 'none'} is not a folder on this machine.")


NAMED = S3.replace('"--model", "/opt/ml/model"', '"--served-model-name", "m"')


async def test_without_a_tokenizer_here_engines_count() -> None:
    async with engines(engine(), engine()) as (one, two):
        plan = await planned([one], [two], NAMED)
    assert plan.router.model_path is None
    first, *more = plan.notes
    assert first.startswith("LMCache, as the image lmcache/vllm-openai:v0.4.3 carries it; engines that run")
    assert more[0].startswith(
        "engines count the prompts, as no tokenizer is here: spec.modelSourceConfig: s3"
    )


async def test_engines_that_do_not_answer_are_all_told_with_what_to_do() -> None:
    async with engines(engine()) as (one,):
        said = await refused([one, "http://127.0.0.1:1"], ["http://127.0.0.1:2"])
    lines = said.splitlines()
    assert lines[0] == "These engines cannot be used:"
    assert lines[1].startswith("  --prefill-url http://127.0.0.1:1: cannot be reached: ")
    assert lines[2].startswith("  --decode-url http://127.0.0.1:2: cannot be reached: ")
    assert lines[2].endswith(". Start the engine first, or correct the URL")


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engine_without_a_connector_is_refused_with_the_flag_that_it_lacks(role: str) -> None:
    """A decoder without one would answer every canary, and compute every prompt itself."""
    async with engines(engine(), engine(role=None)) as (good, bad):
        said = await refused(*(([bad], [good]) if role == "prefill" else ([good], [bad])))
    assert f"--{role}-url {bad}: has no NIXL connector" in said
    flag = said.partition("--kv-transfer-config '")[2].partition("'")[0]
    kv_role = {"prefill": "kv_producer", "decode": "kv_consumer"}[role]
    assert json.loads(flag)["kv_role"] == kv_role
    async with engines(engine(), EngineSpec(parse(["--model", "m", "--kv-transfer-config", flag]))) as urls:
        assert urls


@asynccontextmanager
async def answering(pages: dict[str, tuple[int, bytes]]) -> AsyncIterator[str]:
    async def answer(request: Request, responder: Responder) -> None:
        status, body = pages.get(request.path, (404, b""))
        responder.send(status, [], body)

    server = await serve(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        await server.close()


MODELS = (200, b'{"data": [{"id": "m"}]}')


@pytest.mark.parametrize(
    ("pages", "said"),
    [
        ({}, "answers /v1/models with HTTP 404: is it a vLLM engine, and ready?"),
        ({"/v1/models": (401, b"")}, "asks for an API key, which the router does not have"),
        ({"/v1/models": (200, b"<html>")}, "is no vLLM engine: its /v1/models is not a list of models"),
        ({"/v1/models": (200, b'{"data": ["m"]}')}, "is no vLLM engine: its /v1/models is not a list"),
        ({"/v1/models": (200, b"[" * 100_000)}, "is no vLLM engine: its /v1/models is not a list"),
        ({"/v1/models": (200, b" " * (33 << 20))}, "answers /v1/models with more than 32 MiB"),
        ({"/v1/models": (200, b'{"data": []}')}, "its /v1/models names no model"),
        ({"/v1/models": MODELS, "/metrics": (200, b"up 1\n")}, "is no vLLM engine: its /metrics has none"),
        ({"/v1/models": MODELS, "/metrics": (200, b"{]\n")}, "is no vLLM engine: its /metrics has none"),
    ],
)
async def test_what_is_no_engine_is_told_by_what_it_answers(
    pages: dict[str, tuple[int, bytes]], said: str
) -> None:
    async with engines(engine()) as (one,), answering(pages) as url:
        assert f"--decode-url {url}: {said}" in await refused([one], [url])


@asynccontextmanager
async def dripping() -> AsyncIterator[str]:
    """Something whose answer never ends, a byte at a time."""

    answers: list[asyncio.Task[Any] | None] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers.append(asyncio.current_task())
        with suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while not writer.is_closing():
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.01)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await asyncio.gather(*(task for task in answers if task))


async def test_an_answer_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.local.attached._WHOLE_SECONDS", 0.2)
    monkeypatch.setattr("tandem.local.endpoint._ANSWER_SECONDS", 0.2)
    monkeypatch.setattr("tandem.local.supervisor._ANSWER_SECONDS", 0.1)
    async with dripping() as url, httpx.AsyncClient(trust_env=False) as client:
        assert "has not come to the end of /v1/models in 0.2 s: does it hang?" in await refused([url], [url])
        assert await what_router_waits_for(client, url) == "the router does not answer"
        assert await supervisor._health(client, url) == 0


async def test_engines_of_different_models_are_refused() -> None:
    async with engines(engine(name="a"), engine(name="b")) as (one, two):
        said = await refused([one], [two])
    assert said.startswith(f"--prefill-url {one} serves a, and the engines of the other role serve b.")


async def test_a_manifest_of_another_model_is_refused() -> None:
    async with engines(engine(), engine()) as (one, two):
        with pytest.raises(ResourceError) as error:
            await planned([one], [two], S3)
    assert str(error.value).startswith("spec.worker.args: names the model '/opt/ml/model' (")
    assert "the engines serve m." in str(error.value)


async def test_urls_that_are_mixed_up_are_doubted_and_used() -> None:
    async with engines(engine(role="kv_consumer"), engine(role="kv_producer")) as (consumer, producer):
        (note,) = (await planned([consumer], [producer])).notes
        assert (await planned([producer], [consumer])).notes == ()
    assert note.startswith(f"--decode-url {producer}: was started as kv_producer")


async def test_kvaware_asks_where_the_events_are() -> None:
    manifest = NAMED.replace("prefixaware", "kvaware")
    async with engines(engine(), engine()) as (one, two):
        plan = await planned([f"{one},kv-events=tcp://127.0.0.1:5557"], [two], manifest)
    assert plan.router.prefill == (f"{one},kv-events=tcp://127.0.0.1:5557",)
    (note,) = [n for n in plan.notes if "kvaware" in n]
    assert note.endswith(f"give {two},kv-events=tcp://HOST:PORT")


async def test_one_engine_cannot_have_both_roles() -> None:
    async with engines(engine()) as (one,):
        with pytest.raises(ValueError, match=rf"--prefill and --decode: {one} is in both"):
            await planned([one], [one])


async def test_a_colocated_endpoint_is_refused_by_the_field() -> None:
    assert (await refused([], [], COLOCATED)).startswith("spec.pdSpec is missing")
