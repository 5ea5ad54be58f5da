"""How long an engine may take for its first answer: the longer, the more it has to compute before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from tandem.http import Headers, Responder, Response
from tandem.router.engines import Engine, EngineRole
from tandem.router.legs import Legs

from .conftest import LONG, SHORT, Endpoint, Start
from .fakes import SSE, FakeEngine, Seen, broken, chunk, eventually, hang, local_counter

# Seconds that nobody waits for here.
PREFILL, FIRST_TOKEN, IDLE = 1000.0, 2000.0, 3000.0
FLAGS = {
    "prefill_timeout": PREFILL,
    "first_token_timeout": FIRST_TOKEN,
    "stream_idle_timeout": IDLE,
    "seconds_per_1000_tokens": 1000.0,  # a second a token
    "routing_threshold": 100,
}


@dataclass
class Leg:
    role: str
    patience: float
    response: Response | None = None


@pytest.fixture
def legs(monkeypatch: pytest.MonkeyPatch) -> list[Leg]:
    """The legs that are sent for clients, with the longest wait for each one's answer."""
    sent: list[Leg] = []
    really_open = Legs.open

    @asynccontextmanager
    async def open_and_tell(
        self: Legs,
        engine: Engine,
        method: str,
        path: str,
        body: bytes,
        headers: Headers,
        *,
        head_timeout: float,
        **rest: Any,
    ) -> AsyncIterator[Response]:
        leg = Leg(engine.role.value, head_timeout)
        if method == "POST" and path != "/tokenize" and (b"x-tandem-canary", b"1") not in headers:
            sent.append(leg)
        opened = really_open(self, engine, method, path, body, headers, head_timeout=head_timeout, **rest)
        async with opened as response:
            leg.response = response
            yield response

    monkeypatch.setattr(Legs, "open", open_and_tell)
    return sent


def prompt(tokens: int) -> dict[str, Any]:
    return {**LONG, "prompt": "x" * tokens}


def waits(legs: list[Leg]) -> list[tuple[str, float]]:
    return [(leg.role, leg.patience) for leg in legs]


async def ahead(endpoint: Endpoint, legs: list[Leg], *bodies: dict[str, Any]) -> list[asyncio.Task[Any]]:
    """Requests under way, one after another."""
    tasks = []
    for body in bodies:
        number = len(legs)
        tasks.append(asyncio.create_task(endpoint.post(body)))

        async def sent(number: int = number) -> bool:
            return len(legs) > number

        await eventually(sent)
    return tasks


async def left(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_leg_may_take_longer_for_a_longer_prompt(start: Start, legs: list[Leg]) -> None:
    endpoint = await start(local=local_counter(), **FLAGS)
    await endpoint.post(prompt(100))
    await endpoint.post(prompt(250))
    await endpoint.post(prompt(30))
    assert waits(legs) == [
        ("prefill", PREFILL + 100),
        ("decode", FIRST_TOKEN),  # the prompt comes with the hand-off
        ("prefill", PREFILL + 250),
        ("decode", FIRST_TOKEN),
        ("decode", FIRST_TOKEN + 30),
    ]


async def test_a_decoder_that_computes_a_long_prompt_after_all_is_given_the_time(
    start: Start, legs: list[Leg]
) -> None:
    endpoint = await start(local=local_counter(), **FLAGS)
    endpoint.prefill[0].on_generate = broken(500)
    await endpoint.post(prompt(250))
    assert waits(legs) == [("prefill", PREFILL + 250), ("decode", FIRST_TOKEN + 250)]


async def test_a_prompt_that_was_not_counted_counts_as_long_as_it_can_be(
    start: Start, legs: list[Leg]
) -> None:
    endpoint = await start(**{**FLAGS, "routing_threshold": 0})
    body = b'{"prompt": "%s"}' % (b"x" * 500)
    await endpoint.post(body)
    assert waits(legs) == [("prefill", PREFILL + len(body)), ("decode", FIRST_TOKEN)]


async def test_a_prompt_is_never_taken_for_longer_than_the_context(start: Start, legs: list[Leg]) -> None:
    def small(prefill: list[FakeEngine], decode: list[FakeEngine]) -> None:
        decode[0].max_model_len = 200

    endpoint = await start(before=small, **{**FLAGS, "routing_threshold": 0})
    await endpoint.post(b'{"prompt": "%s"}' % (b"x" * 500))
    assert waits(legs) == [("prefill", PREFILL + 200), ("decode", FIRST_TOKEN)]


async def test_prompts_that_a_prefiller_has_before_it_are_waited_for_too(
    start: Start, legs: list[Leg]
) -> None:
    endpoint = await start(local=local_counter(), **FLAGS)
    endpoint.prefill[0].on_generate = hang
    tasks = await ahead(endpoint, legs, prompt(300), prompt(100), prompt(200))
    assert waits(legs) == [("prefill", PREFILL + tokens) for tokens in (300, 400, 600)]
    await left(*tasks)


async def test_prompts_that_a_decoder_has_before_it_are_waited_for_until_they_are_computed(
    start: Start, legs: list[Leg]
) -> None:
    endpoint = await start(local=local_counter(), **FLAGS)
    go_on = asyncio.Event()

    async def when_told(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        if len(seen.body["prompt"]) != 70:
            return bool(await hang(engine, seen, responder))
        await go_on.wait()
        responder.start(200, SSE)
        responder.write(chunk("a"))
        return bool(await hang(engine, seen, responder))

    endpoint.decode[0].on_generate = when_told
    tasks = await ahead(endpoint, legs, {**prompt(70), "stream": True}, prompt(20))
    # One whose prompt was computed elsewhere waits for these as well: they share the engine.
    third = asyncio.create_task(endpoint.post(prompt(150)))

    async def is_handed_over() -> bool:
        return len(legs) == 4

    await eventually(is_handed_over)
    assert waits(legs) == [
        ("decode", FIRST_TOKEN + 70),
        ("decode", FIRST_TOKEN + 90),
        ("prefill", PREFILL + 150),
        ("decode", FIRST_TOKEN + 90),
    ]
    go_on.set()

    async def first_has_begun() -> bool:
        (engine,) = endpoint.app.fleet.of(EngineRole.DECODE)
        return engine.pending_tokens == 20

    await eventually(first_has_begun)
    tasks += await ahead(endpoint, legs, prompt(5))
    assert legs[-1].patience == FIRST_TOKEN + 25
    await left(*tasks, third)

    async def nothing_is_pending() -> bool:
        found = await endpoint.samples("tandem_pending_prompt_tokens", "role")
        return set(found.values()) == {0}

    await eventually(nothing_is_pending)


async def test_a_stream_that_has_begun_has_the_same_time_for_its_first_token_and_then_another(
    start: Start, legs: list[Leg]
) -> None:
    endpoint = await start(local=local_counter(), **FLAGS)
    go_on = asyncio.Event()

    async def in_two_steps(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        responder.start(200, SSE)
        await go_on.wait()
        responder.write(chunk("a"))
        return bool(await hang(engine, seen, responder))

    endpoint.decode[0].on_generate = in_two_steps
    (task,) = await ahead(endpoint, legs, {**SHORT, "prompt": "x" * 40, "stream": True})

    async def allows(seconds: float) -> bool:
        response = legs[0].response
        return response is not None and response.idle_timeout == seconds

    await eventually(lambda: allows(FIRST_TOKEN + 40))
    go_on.set()
    await eventually(lambda: allows(IDLE))
    await left(task)


async def test_tokens_that_are_only_believed_to_be_cached_are_waited_for_all_the_same(
    start: Start, legs: list[Leg]
) -> None:
    """The engine may have evicted them, or be another process by now."""
    endpoint = await start(
        local=local_counter(), explain=True, **{**FLAGS, "routing_strategy": "prefixaware"}
    )
    for tokens, cached in ((90, 0), (95, 64), (250, 64), (260, 192)):
        answer = await endpoint.post(prompt(tokens), x_tandem_explain="1")
        assert answer.headers["x-tandem-decode-expected-hit"] == str(cached)
    assert waits(legs) == [
        ("decode", FIRST_TOKEN + 90),
        ("decode", FIRST_TOKEN + 95),
        ("prefill", PREFILL + 250),
        ("decode", FIRST_TOKEN),  # what is handed over is computed already
        ("prefill", PREFILL + 260),
        ("decode", FIRST_TOKEN),
    ]
