"""Engines that fail one request after another are left alone until a canary has shown whether it was their
fault. Requests alone never take the last engine out of use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from tandem.http import Request, Responder
from tandem.router.budgets import Budgets
from tandem.router.canary import Prober
from tandem.router.connectors import Nixl
from tandem.router.counting import Counter
from tandem.router.engines import Engine, EngineRole, State
from tandem.router.handover import Handovers
from tandem.router.notifications import Notifications

from .conftest import LONG, SHORT, Endpoint, Start
from .fakes import (
    JSON,
    SSE,
    FakeEngine,
    OnGenerate,
    Seen,
    broken,
    chunk,
    engines,
    eventually,
    local_counter,
    reads_kv,
)
from .test_canary import Probed, Subject, until, visited

FIVE = 5


# What a canary decides


class Watched(Probed):
    """As `Probed`, in a time that passes only while a suspect engine is left alone."""

    def __init__(self, prefill: int = 1, decode: int = 1) -> None:
        super().__init__(prefill, decode)
        self.now = 5000.0
        self.holds: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.holds.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)

    def fail(self, subject: Subject, times: int = FIVE) -> None:
        """Requests fail there in a row."""
        for _ in range(times):
            self.fleet.failed(self.of(subject))

    def state(self, subject: Subject) -> State:
        return self.of(subject).state


Watch = Callable[..., Awaitable[Watched]]


@pytest.fixture
async def watch() -> AsyncIterator[Watch]:
    """Start a prober and wait until every pair is proved."""
    async with AsyncExitStack() as stack:

        async def start(*, canary_timeout: float = 20.0, **sizes: int) -> Watched:
            watched = Watched(**sizes)
            await stack.enter_async_context(engines(*watched.prefill, *watched.decode))
            stack.push_async_callback(watched.client.aclose)
            prober = Prober(
                watched.members,
                watched.fleet,
                watched.legs,
                Counter(None, watched.legs, watched.fleet),
                Handovers(Nixl(), watched.legs, watched.fleet, Notifications(), notification_timeout=1.0),
                Budgets(),
                waiting_interval=0.001,
                ready_interval=0.002,
                canary_timeout=canary_timeout,
                clock=lambda: watched.now,
                sleep=watched.sleep,
            )
            running = asyncio.create_task(prober.run())

            async def stop() -> None:
                running.cancel()
                with suppress(asyncio.CancelledError):
                    await running

            stack.push_async_callback(stop)
            watched.announce()
            await until(lambda: len(watched.pairs()) == len(watched.prefill) * len(watched.decode))
            return watched

        yield start


def of_role(watched: Watched, role: str) -> Subject:
    subject: Subject = getattr(watched, role)[0]
    return subject


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_canary_brings_a_suspect_engine_back(watch: Watch, role: str) -> None:
    watched = await watch()
    subject = of_role(watched, role)
    canaries = len(subject.seen)
    watched.fail(subject, FIVE - 1)
    assert watched.state(subject) is State.READY
    watched.fail(subject, 1)
    assert watched.state(subject) is State.SUSPECT
    assert watched.of(subject).why == "5 requests failed in a row"
    await until(lambda: watched.state(subject) is State.READY)
    assert len(subject.seen) == canaries + 1
    assert watched.pairs() == {("p0", "d0")}, "nothing has to be proved anew"
    watched.fail(subject, FIVE - 1)
    assert watched.state(subject) is State.READY, "it has a clean slate"


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_canary_that_is_answered_with_a_failure_takes_the_engine_out_of_use(
    watch: Watch, role: str
) -> None:
    watched = await watch()
    subject = of_role(watched, role)
    subject.refuses = lambda seen: True
    watched.fail(subject)
    await until(lambda: watched.state(subject) is State.WAITING)
    assert "/v1/completions answered HTTP 500" in (watched.fleet.missing or "")
    assert watched.pairs() == set()
    await visited(subject)
    assert watched.state(subject) is State.WAITING
    subject.refuses = lambda seen: False
    await until(watched.pairs)
    watched.fail(subject, FIVE - 1)
    assert watched.state(subject) is State.READY, "it has a clean slate"


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_what_fails_while_an_engine_is_out_of_use_is_not_held_against_it_later(
    watch: Watch, role: str
) -> None:
    """Requests that were under way when it was lost fail after that."""
    watched = await watch()
    subject = of_role(watched, role)
    subject.health = "fails"
    await until(lambda: watched.state(subject) is State.WAITING)
    watched.fail(subject, 100)
    subject.health = "fine"
    await until(watched.pairs)
    watched.fail(subject, 1)
    assert watched.state(subject) is State.READY


@pytest.mark.parametrize(
    ("role", "silent"), [("prefill", "prefill"), ("prefill", "decode"), ("decode", "decode")]
)
async def test_a_canary_that_is_not_answered_may_be_behind_other_work_and_leaves_the_engine_suspect(
    watch: Watch, role: str, silent: str
) -> None:
    watched = await watch(canary_timeout=0.05)
    subject, mute = of_role(watched, role), of_role(watched, silent)
    mute.hold = asyncio.Event()
    watched.fail(subject)
    for _ in range(2):
        mute.held.clear()
        await mute.held.wait()
        assert watched.state(subject) is State.SUSPECT
    assert watched.fleet.ready(watched.of(subject).role) == [watched.of(subject)], "there is no other"
    mute.hold.set()
    await until(lambda: watched.state(subject) is State.READY)


async def test_a_suspect_engine_that_cannot_be_reached_is_lost(watch: Watch) -> None:
    watched = await watch()
    (decoder,) = watched.decode
    await decoder.die()
    watched.fail(decoder)
    await until(lambda: watched.state(decoder) is State.WAITING)
    await decoder.come_back()
    await until(watched.pairs)


async def test_a_suspect_prefiller_is_not_cleared_without_a_decoder_to_show_it_with(watch: Watch) -> None:
    watched = await watch()
    (prefiller,), (decoder,) = watched.prefill, watched.decode
    decoder.health = "fails"
    await until(lambda: watched.state(decoder) is State.WAITING)
    watched.fail(prefiller)
    await visited(prefiller)
    assert watched.state(prefiller) is State.SUSPECT
    decoder.health = "fine"
    await until(watched.pairs)
    await until(lambda: watched.state(prefiller) is State.READY)


async def test_a_suspect_prefiller_is_tried_with_every_decoder_and_used_with_those_it_works_with(
    watch: Watch,
) -> None:
    watched = await watch(decode=2)
    (prefiller,) = watched.prefill
    bad, good = watched.decode
    bad.refuses = reads_kv
    watched.fail(prefiller)
    await until(lambda: watched.pairs() == {("p0", good.name)})
    assert watched.state(prefiller) is State.READY
    assert watched.ready(bad), "it serves others, and short prompts"
    bad.refuses = lambda seen: False
    await until(lambda: len(watched.pairs()) == 2)


@pytest.mark.parametrize("apart", [0.0, 40.0])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engine_that_passes_canaries_and_fails_requests_is_left_alone_ever_longer(
    watch: Watch, role: str, apart: float
) -> None:
    watched = await watch()
    subject = of_role(watched, role)

    async def suspect_again(after: float) -> None:
        watched.now += after
        watched.fail(subject)
        await until(lambda: watched.state(subject) is State.READY)

    for _ in range(7):
        await suspect_again(apart)
    assert watched.holds == [0, 1, 3, 7, 15, 30, 30]
    await suspect_again(60.0)
    await suspect_again(apart)
    assert watched.holds[7:] == [0, 1], "after a good minute it is as any other"


# What requests notice


@dataclass
class Moody(FakeEngine):
    """Its canaries wait, once it is told so."""

    silent: bool = False
    speak: asyncio.Event = field(default_factory=asyncio.Event)

    async def _generate(self, request: Request, responder: Responder) -> None:
        if self.silent and request.header(b"x-tandem-canary") == b"1":
            await self.speak.wait()
        await super()._generate(request, responder)

    @property
    def canaries(self) -> int:
        return len(self.seen) - len(self.requests)


def all_moody(prefill: list[FakeEngine], decode: list[FakeEngine]) -> None:
    for fakes in (prefill, decode):
        fakes[:] = [Moody(e.name) for e in fakes]


def moody(fake: FakeEngine) -> Moody:
    assert isinstance(fake, Moody)
    return fake


def known(endpoint: Endpoint, fake: FakeEngine) -> Engine:
    return next(e for e in endpoint.app.fleet.engines if e.url == fake.url)


async def ready(endpoint: Endpoint, *fakes: FakeEngine) -> None:
    async def are_ready() -> bool:
        return all(known(endpoint, fake).state is State.READY for fake in fakes)

    await eventually(are_ready)


def closes(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
    responder.abort()
    return True


def lies(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
    responder.send(200, JSON, b'{"error": {"message": "no"}}')
    return True


def breaks_off(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
    responder.start(200, SSE)
    responder.write(chunk("a"))
    responder.abort()
    return True


def errs(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
    responder.start(200, SSE)
    responder.write(chunk("a") + b'data: {"error": {"message": "no", "code": 500}}\n\n')
    responder.finish()
    return True


@pytest.mark.parametrize("how", [broken(500), broken(503), closes, lies, breaks_off, errs])
async def test_a_decoder_that_fails_five_times_in_a_row_is_left_out_until_a_canary_brings_it_back(
    start: Start, how: OnGenerate
) -> None:
    endpoint = await start(decode=2, before=all_moody, local=local_counter())
    bad, good = (moody(d) for d in endpoint.decode)
    bad.on_generate, bad.silent = how, True
    body = {**SHORT, "stream": how in (breaks_off, errs)}
    for _ in range(20):
        await send(endpoint, body)
    assert sum((await endpoint.failures()).values()) == FIVE
    assert len(good.requests) >= 15
    assert await endpoint.metric(f'tandem_engine_ready{{engine="{bad.url}",role="decode"}}') == 0
    assert (await endpoint.client.get("/ready")).status_code == 200
    bad.on_generate = None
    bad.speak.set()
    await ready(endpoint, bad)
    before = len(bad.requests)
    for _ in range(4):
        assert (await endpoint.post(SHORT)).status_code == 200
    assert len(bad.requests) == before + 2


async def send(endpoint: Endpoint, body: dict[str, Any]) -> None:
    """A request of which it does not matter how it ends."""
    if body.get("stream"):
        await endpoint.stream(body)
    else:
        await endpoint.post(body)


@pytest.mark.parametrize("how", [broken(500), closes])
async def test_a_prefiller_that_fails_five_times_in_a_row_is_left_out(start: Start, how: OnGenerate) -> None:
    endpoint = await start(prefill=2, before=all_moody, local=local_counter())
    bad, good = (moody(p) for p in endpoint.prefill)
    bad.on_generate, bad.silent = how, True
    for _ in range(20):
        assert (await endpoint.post(LONG)).status_code == 200
    assert sum((await endpoint.failures()).values()) == FIVE
    assert len(good.requests) == 20
    assert await endpoint.outcomes() == {("disaggregated", "threshold", "ok"): 20}
    bad.speak.set()
    await ready(endpoint, bad)


async def test_a_prefiller_whose_kv_cannot_be_read_is_found_out_though_it_answers_well(start: Start) -> None:
    endpoint = await start(prefill=2, local=local_counter())
    bad, good = endpoint.prefill
    (decoder,) = endpoint.decode

    def cannot_read(seen: Seen) -> bool:
        return (seen.kv or {}).get("remote_engine_id") == bad.name

    decoder.refuses = cannot_read  # canaries too
    for _ in range(10):
        assert (await endpoint.post(LONG)).status_code == 200

    async def only_the_good_one_is_in_use() -> bool:
        return endpoint.app.fleet.ready(EngineRole.PREFILL) == [known(endpoint, good)]

    await eventually(only_the_good_one_is_in_use)
    assert len(bad.requests) == FIVE
    assert known(endpoint, decoder).state is State.READY, "it has served every request in the end"
    before = len(good.requests)
    for _ in range(4):
        assert (await endpoint.post(LONG)).status_code == 200
    assert len(good.requests) == before + 4


async def test_a_success_between_failures_starts_the_count_anew(start: Start) -> None:
    endpoint = await start(before=all_moody, local=local_counter(), max_attempts=1)
    (decoder,) = endpoint.decode
    for _ in range(3):
        decoder.on_generate = broken(500)
        for _ in range(FIVE - 1):
            assert (await endpoint.post(SHORT)).status_code == 500
        decoder.on_generate = None
        assert (await endpoint.post(SHORT)).status_code == 200
    assert known(endpoint, decoder).state is State.READY
    assert moody(decoder).canaries == 2, "those of its start"


async def test_suspect_after_says_how_many_failures_it_takes(start: Start) -> None:
    endpoint = await start(decode=2, before=all_moody, local=local_counter(), suspect_after=2)
    bad = moody(endpoint.decode[0])
    bad.on_generate, bad.silent = broken(500), True
    for _ in range(8):
        assert (await endpoint.post(SHORT)).status_code == 200
    assert len(bad.requests) == 2
    bad.speak.set()


@pytest.mark.parametrize("status", [400, 404, 413, 422])
@pytest.mark.parametrize("body", [SHORT, LONG])
async def test_what_users_do_wrong_makes_no_engine_suspect(
    start: Start, status: int, body: dict[str, Any]
) -> None:
    endpoint = await start(prefill=2, decode=2, before=all_moody, local=local_counter())
    everyone = [moody(e) for e in (*endpoint.prefill, *endpoint.decode)]
    canaries = [e.canaries for e in everyone]
    for engine in everyone:
        engine.on_generate = broken(status)
    for _ in range(4 * FIVE):
        assert (await endpoint.post(body)).status_code == status
    assert {known(endpoint, e).state for e in everyone} == {State.READY}
    assert [e.canaries for e in everyone] == canaries


@pytest.mark.parametrize("body", [SHORT, LONG])
async def test_prompts_that_no_engine_can_serve_cost_a_canary_and_nobody_else_a_request(
    start: Start, body: dict[str, Any]
) -> None:
    endpoint = await start(prefill=2, decode=2, before=all_moody, local=local_counter(), suspect_after=3)
    everyone = [moody(e) for e in (*endpoint.prefill, *endpoint.decode)]
    canaries = {e.name: e.canaries for e in everyone}

    def poisoned(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        return seen.body.get("user") == "mallory" and bool(broken(500)(engine, seen, responder))

    for engine in everyone:
        engine.on_generate, engine.silent = poisoned, True
    for _ in range(3):
        assert (await endpoint.post({**body, "user": "mallory"})).status_code == 500
    asked = endpoint.decode if body is SHORT else everyone
    assert {known(endpoint, e).state for e in asked} == {State.SUSPECT}
    assert (await endpoint.post(body)).status_code == 200, "suspects are used where there is no other"
    for engine in everyone:
        engine.speak.set()
    await ready(endpoint, *everyone)
    assert (await endpoint.client.get("/ready")).json()["unproved"] == []
    for engine in everyone:
        # A prefiller's canary goes to each decoder, and so does each decoder's share of it.
        assert engine.canaries - canaries[engine.name] <= (2 if engine in endpoint.prefill else 5)


async def test_with_every_engine_suspect_requests_are_tried_and_one_that_works_clears_its_engine(
    start: Start,
) -> None:
    endpoint = await start(prefill=2, decode=2, before=all_moody, local=local_counter())
    everyone = [moody(e) for e in (*endpoint.prefill, *endpoint.decode)]
    for engine in everyone:
        engine.on_generate, engine.silent = broken(500), True
    for _ in range(2 * FIVE):
        assert (await endpoint.post(LONG)).status_code == 500
    assert {known(endpoint, e).state for e in everyone} == {State.SUSPECT}
    before = [len(e.requests) for e in everyone]
    assert (await endpoint.post(LONG)).status_code == 500
    assert [len(e.requests) for e in everyone] > before, "they are asked all the same"

    for engine in everyone:
        engine.on_generate = None
    assert (await endpoint.post(LONG)).status_code == 200
    states = [known(endpoint, e).state for e in everyone]
    assert sorted(states) == [State.READY, State.READY, State.SUSPECT, State.SUSPECT], (
        "no canary has come yet"
    )
    for engine in everyone:
        engine.speak.set()
    await ready(endpoint, *everyone)
