"""The load of `make bench-router`: its engines and clients work with a router, and a faulty answer is one."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tandem.config import RouterConfig
from tandem.router.app import running

from .scripts import scripts

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
TOKEN = b"data: {}\n\n"
DONE = b"data: [DONE]\n\n"


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    with scripts("router", "fake_engines", "streams", "texts") as found:
        yield found


@asynccontextmanager
async def serving(modules: dict[str, ModuleType], **setting: Any) -> AsyncIterator[tuple[Any, int, int]]:
    """Answers of a prefiller and a decoder, and their ports."""
    fake = modules["fake_engines"]
    answers = fake.Answers()
    answers.set(**{"tokens": 5, "interval": 0.0, **setting})
    loop = asyncio.get_running_loop()
    servers = [
        await loop.create_server(lambda prefills=prefills: fake.Engine(answers, prefills), "127.0.0.1", 0)
        for prefills in (True, False)
    ]
    try:
        prefill, decode = (server.sockets[0].getsockname()[1] for server in servers)
        yield answers, prefill, decode
    finally:
        for server in servers:
            server.close()


@pytest.mark.parametrize("interval", [0.0, 0.005])
async def test_every_request_is_disaggregated_and_comes_whole(
    modules: dict[str, ModuleType], interval: float
) -> None:
    streams, texts = modules["streams"], modules["texts"]
    async with serving(modules, interval=interval) as (answers, prefill, decode):
        config = RouterConfig(
            port=0,
            prefill=(f"http://127.0.0.1:{prefill}",),
            decode=(f"http://127.0.0.1:{decode}",),
            routing_threshold=0,
            routing_strategy="roundrobin",
        )
        async with running(config, None, waiting_interval=0.01) as (router, app):
            while app.fleet.missing:
                await asyncio.sleep(0.01)
            answers.asked = modules["fake_engines"].Asked()
            clients = streams.Clients(router.port, tokens=5)
            bodies = [texts.chat(text, 5) for text in itertools.islice(texts.prose(1000, 8000, seed=1), 6)]
            await clients.in_turn(2, bodies[:3])
            await clients.at_rate(1000, bodies[3:])
            clients.close()
    assert [answer.fault for answer in clients.answers] == [""] * 6
    assert all(answer.sent < answer.first <= answer.ended for answer in clients.answers)
    asked = answers.asked
    assert (asked.prefills, asked.handed_over, asked.alone, asked.open) == (6, 6, 0, 0)
    assert (asked.most_open > 0) is (interval > 0)


async def test_a_client_who_leaves_is_no_open_stream(modules: dict[str, ModuleType]) -> None:
    async with serving(modules, interval=5.0) as (answers, _, decode):
        clients = modules["streams"].Clients(decode, tokens=5)
        asking = asyncio.create_task(clients.ask(modules["texts"].chat("a", 5)))
        while not answers.asked.open:
            await asyncio.sleep(0.01)
        clients.close()
        assert (await asking).fault == "broken off"
        while answers.asked.open:
            await asyncio.sleep(0.01)
        assert answers.asked.most_open == 1


async def test_nobody_there_is_a_fault(modules: dict[str, ModuleType]) -> None:
    async with serving(modules) as (_, _, decode):
        pass
    clients = modules["streams"].Clients(decode, tokens=5)
    assert (await clients.ask(b"{}")).fault.startswith("cannot connect")
    assert len(clients.answers) == 1


def chunked(*parts: bytes) -> bytes:
    return HEAD + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (*parts, b""))


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (chunked(TOKEN * 2, TOKEN, DONE), ""),
        (chunked(TOKEN + TOKEN[:3], TOKEN[3:] + TOKEN + DONE), ""),  # split within an event
        (chunked(TOKEN * 2, DONE), "1 tokens instead of 2"),
        (chunked(TOKEN * 3), "broken off"),  # no [DONE]
        (chunked(TOKEN * 3, DONE)[:-5], "broken off"),
        (b"", "no answer"),
        (b"HTTP/1.1 503 Busy\r\n\r\nlater", "HTTP/1.1 503 Busy later"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", "an answer that is no stream"),
    ],
)
def test_what_is_wrong_with_an_answer_is_said(
    modules: dict[str, ModuleType], data: bytes, fault: str
) -> None:
    assert modules["streams"].fault(data, tokens=2) == fault


def test_no_two_prompts_begin_alike(modules: dict[str, ModuleType]) -> None:
    def some() -> list[str]:
        return list(itertools.islice(modules["texts"].prose(1000, 8000, seed=3), 50))

    assert len({text[:12] for text in some()}) == 50
    assert all(1000 <= len(text) <= 8000 for text in some())
    assert some() == some()


def test_each_piece_of_code_is_asked_once(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    numbers = range(1000, 10_000)
    for at in range(3):
        (tmp_path / f"{at}.py").write_text("".join(map(str, numbers[at::3])))
    code = list(modules["texts"].code(sorted(tmp_path.glob("*.py")), 1_000, 2_000, seed=3))
    whole = "".join(code)
    assert all(1_000 <= len(text) <= 2_000 for text in code)
    assert len({whole[at : at + 4] for at in range(0, len(whole) - 3, 4)}) == len(whole) // 4 >= 8_500
