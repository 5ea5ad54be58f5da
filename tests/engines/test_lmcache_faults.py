"""What becomes of LMCache's own faults on real engines, and of those that it makes worse.

One prefiller and one decoder with SmolLM2-135M, a router in this process, and a receive buffer that holds
three prompts. After each test the buffer has to be as empty as before: a prompt that takes the whole of it is
handed over. (Were one chunk left there, its prefiller would wait for ever.)
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import fields
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import pytest_asyncio

from tandem.api import ANNOTATION_CONNECTOR, read_endpoint
from tandem.bench.scrape import EngineCounters, scrape
from tandem.cli.up import _vllm_python
from tandem.config import RouterConfig
from tandem.engine import detect
from tandem.local.manifest import read_manifest
from tandem.local.plan import LocalPlan, make_plan
from tandem.prompt import PromptCounter, load
from tandem.router.handover import Handovers, Pace
from tandem.router.notifications import Expected

from . import processes
from .answers import Greedy, fresh_prompt, greedy, judge, right_at_once
from .between import PATIENCE_SECONDS, Between, Endpoint, Sent, at_rest, behind, is_running, until
from .conftest import free_port
from .killable import Engines

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

CHUNK = 256
CHUNK_BYTES = CHUNK * 23_040
"""SmolLM2's KV takes 23,040 bytes a token."""
AT_ONCE = 3
"""Prompts that the receive buffer holds."""
LONG = 300
"""Tokens of such a prompt: two chunks."""
BUFFER = 2 * AT_ONCE
"""Chunks of the receive buffer."""
WHOLE = BUFFER * CHUNK - 10
"""Tokens of a prompt that takes all of it, and some three seconds to compute."""
THRESHOLD = 100
FOR_EVER = 3600.0
"""Seconds. The router does not lose patience with an engine that is only slow."""
FLAGS = {
    "routing_threshold": THRESHOLD,
    "prefill_timeout": FOR_EVER,
    "first_token_timeout": FOR_EVER,
    "stream_idle_timeout": FOR_EVER,
    "reservation_timeout": FOR_EVER,
}
OK = ("disaggregated", "threshold", "ok")
LEFT = ("disaggregated", "threshold", "client_left")
ALONE = ("decode_only", "prefill_failed", "ok")


@pytest.fixture(scope="module")
def plan() -> LocalPlan:
    """What `tandem up` would start of the built-in endpoint, but that KV goes through LMCache, into a small
    buffer."""
    raw = read_manifest(None).raw
    raw["metadata"]["annotations"] = {ANNOTATION_CONNECTOR: "lmcache"}
    size = {"name": "PD_BUFFER_SIZE", "value": str(BUFFER * CHUNK_BYTES)}
    raw["spec"]["worker"]["environmentVariables"] = [size]
    made = make_plan(read_endpoint(raw), raw, detect(_vllm_python()), sys.executable, port=free_port())
    assert made.router.lmcache_buffer_chunks == BUFFER
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(plan: LocalPlan, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engines]:
    made = Engines.of(plan.engines, tmp_path_factory.mktemp("lmcache-faults"))
    async with made.running():
        yield made
        await at_rest([engine.url for engine in made.all], within=PATIENCE_SECONDS)


class Case:
    """The engines behind a router of their own."""

    def __init__(self, engines: Engines, endpoint: Endpoint, counter: PromptCounter) -> None:
        self.engines = engines
        self.endpoint = endpoint
        self.counter = counter
        # Nothing that a test keeps from the router comes later.
        self.handovers.pace = Pace(late=1.0)

    @property
    def handovers(self) -> Handovers:
        return self.endpoint.app._flow._handovers

    @property
    def prefiller(self) -> Between:
        return self.endpoint.prefill[0]

    @property
    def decoder(self) -> Between:
        return self.endpoint.decode[0]

    def prompt(self, tokens: int = LONG) -> list[int]:
        """One that nobody has sent before."""
        return fresh_prompt(self.counter, tokens)

    async def ask(self, prompt: list[int], **more: Any) -> Greedy:
        async with a_client() as client:
            return await greedy(client, self.endpoint.url, prompt, max_tokens=16, **more)

    async def is_right(self, answer: Greedy, prompt: list[int]) -> bool:
        """Whether the decoder says so, too, when it has to compute the prompt itself."""
        async with a_client() as client:
            reference = await greedy(client, self.decoder.engine, prompt, max_tokens=16)
        return judge(answer, reference, path(answer)).acceptable

    async def computes(self, stand: Between) -> None:
        """Wait until an engine is in the middle of a prefill. It tells of a request after its first step, and
        a prefill is a single one."""
        engine = processes.with_argument(f"--port\0{urlsplit(stand.engine).port}")
        before = processes.cpu_seconds(engine)
        await until(lambda: stand.under_way("prefill"))
        await until(lambda: processes.cpu_seconds(engine) > before + 0.5)
        assert not stand.under_way("prefill")[0].answered

    async def counters(self) -> list[EngineCounters]:
        """The prefiller's, and the decoder's."""
        async with a_client() as client:
            return [await scrape(client, each.engine) for each in self.endpoint.between]

    @property
    def reserved(self) -> int:
        """Chunks of the buffer that hand-offs hold."""
        return sum(self.endpoint.app._flow._choosing._budgets.used.values())

    async def holds_nothing(self) -> None:
        """Wait until the router holds nothing of any request, on engines neither."""

        async def nothing() -> bool:
            return not await self.endpoint.in_hand()

        await until(nothing)

    async def is_as_before(self) -> None:
        """All engines are in use, and the whole buffer is free."""
        await self.endpoint.proved()
        await self.holds_nothing()
        prompt = self.prompt(WHOLE)
        answer = await self.ask(prompt)
        assert path(answer) == "disaggregated", "some of the receive buffer is never given back"
        await self.holds_nothing()


@asynccontextmanager
async def a_client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=180.0, trust_env=False) as client:
        yield client


def path(answer: Greedy) -> str:
    told: str = answer.headers["x-tandem-path"]
    return told


@pytest_asyncio.fixture(loop_scope="module")
async def case(plan: LocalPlan, engines: Engines) -> AsyncIterator[Case]:
    names = [field.name for field in fields(RouterConfig) if field.name.startswith("lmcache_")]
    flags = {**FLAGS, "connector": "lmcache", **{name: getattr(plan.router, name) for name in names}}
    urls = [[engine.url for engine in role] for role in (engines.prefill, engines.decode)]
    counter = load(plan.model)
    async with behind(*urls, counter, **flags) as endpoint:
        made = Case(engines, endpoint, counter)
        yield made
        await made.is_as_before()


async def test_a_full_receiver_keeps_prompts_waiting_and_no_engine(case: Case) -> None:
    """LMCache itself bounds nothing: a prefiller whose decoder has no room stands still, for all requests."""
    held: list[int] = []

    async def watch() -> None:
        while True:
            held.append(case.reserved)
            await asyncio.sleep(0.02)

    urls = case.endpoint.url, case.decoder.engine
    async with a_client() as client:
        watching = asyncio.create_task(watch())
        asking = asyncio.create_task(
            right_at_once(client, *urls, case.counter, [LONG] * 8, threshold=THRESHOLD)
        )
        await until(case.endpoint.queued)
        await asking
        watching.cancel()
    assert await case.endpoint.counted() == Counter({OK: 8})
    assert max(held) == BUFFER
    for engine in case.engines.all:
        assert "Failed to allocate memory" not in engine.log.read_text("utf-8", "replace")


async def during_the_prefill(case: Case, sent: Sent) -> None:
    await case.computes(case.prefiller)


async def between_the_legs(case: Case, sent: Sent) -> None:
    await until(lambda: case.decoder.under_way("decode"))


async def before_the_first_token(case: Case, sent: Sent) -> None:
    await until(lambda: any(leg.answered for leg in case.decoder.under_way("decode")))
    assert sent.tokens == 0


async def during_the_decode(case: Case, sent: Sent) -> None:
    await until(lambda: is_running(case.decoder.engine))


@pytest.mark.parametrize(
    ("phase", "held", "stream"),
    [
        (during_the_prefill, "", True),
        (between_the_legs, "holds", True),
        (before_the_first_token, "holds_answer", True),
        (during_the_decode, "", True),
        (during_the_decode, "", False),
    ],
)
async def test_nothing_of_a_client_that_left_stays_in_the_buffer(
    case: Case, phase: Callable[[Case, Sent], Awaitable[None]], held: str, stream: bool
) -> None:
    """A prefill that has begun goes on, and what it pushes is read by a request of one token."""
    if held:
        getattr(case.decoder, held).add("decode")
    tokens = WHOLE if phase is during_the_prefill else LONG
    body = {"prompt": case.prompt(tokens), "max_tokens": 400, "stream": stream}
    async with case.endpoint.sending(body) as sent:
        await phase(case, sent)
        assert not sent.task.done()
    await case.holds_nothing()
    assert await case.endpoint.counted() == Counter({LEFT: 1})
    getattr(case.decoder, held or "holds").clear()


async def answered_alone(case: Case, answer: Greedy, prompt: list[int]) -> None:
    """A decoder has answered alone, and rightly, what a killed prefiller was at; it is started again."""
    assert path(answer) == "decode_only"
    assert await case.endpoint.counted() == Counter({ALONE: 1, ("prefill", "closed"): 1})
    assert case.decoder.seen("decode") == 0
    assert await case.is_right(answer, prompt)
    await case.engines.revive(case.prefiller)


async def test_a_prefiller_that_is_killed_in_the_middle_of_a_prefill(case: Case) -> None:
    prompt = case.prompt(1000)
    asking = asyncio.create_task(case.ask(prompt))
    await case.computes(case.prefiller)
    await case.engines.kill(case.prefiller)
    await answered_alone(case, await asking, prompt)


async def test_a_prefiller_that_is_killed_in_the_middle_of_a_push(case: Case, plan: LocalPlan) -> None:
    """The decoder has heard of KV that never comes: keys are known there from then on."""
    _, ports = plan.router.receiver(plan.router.decode[0])
    decoder = case.engines.at(case.decoder.engine)
    prompt = case.prompt()
    with decoder.frozen():
        asking = asyncio.create_task(case.ask(prompt))
        await until(lambda: processes.unread_bytes(ports.alloc[0]))
        await case.engines.kill(case.prefiller)
    await answered_alone(case, await asking, prompt)


@contextmanager
def undelivered(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Expected]]:
    """Notifications do not come in the block; its value are those for whom they were."""
    kept: list[Expected] = []
    with monkeypatch.context() as patch:
        patch.setattr(Expected, "deliver", lambda expected: kept.append(expected))
        yield kept


async def test_a_notification_that_is_lost(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    case.handovers.notification_timeout = 1.0
    prompt = case.prompt()
    with undelivered(monkeypatch) as lost:
        answer = await case.ask(prompt)
        await until(lambda: lost)
    assert path(answer) == "decode_only"
    assert await case.endpoint.counted() == Counter({ALONE: 1, ("prefill", "no_notification"): 1})
    assert case.decoder.seen("decode") == 0
    assert await case.is_right(answer, prompt)
    await case.holds_nothing()
    assert case.decoder.seen("release") == 1, "nobody else reads what the prefiller has written"


async def test_a_notification_that_is_late(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is decoded before it comes: there would be an answer, from whatever lies in the buffer."""
    case.handovers.notification_timeout = PATIENCE_SECONDS
    prompt = case.prompt()
    with undelivered(monkeypatch) as late:
        asking = asyncio.create_task(case.ask(prompt))
        await until(lambda: late and not case.prefiller.under_way("prefill"))
        assert path(await case.ask(case.prompt(20))) == "decode_only"  # the router had the time
        assert case.decoder.seen("decode") == 0
    for expected in late:
        expected.deliver()
    answer = await asking
    assert path(answer) == "disaggregated"
    assert await case.endpoint.counted() == Counter({OK: 1, ("decode_only", "short", "ok"): 1})
    assert await case.is_right(answer, prompt)


async def test_requests_with_the_same_text_do_not_take_each_others_kv(case: Case) -> None:
    """The first one's KV lies in the buffer when the second one, of another tenant, comes and goes."""
    prompt = case.prompt()
    before = await case.counters()
    case.decoder.holds.add("decode")
    asking = asyncio.create_task(case.ask(prompt, cache_salt="one"))
    await until(lambda: case.decoder.under_way("decode"))
    case.decoder.holds.clear()
    answers = [await case.ask(prompt, cache_salt="another")]
    case.decoder.go_on.set()
    answers.append(await asking)
    grown: list[EngineCounters] = []

    async def told() -> bool:  # engines write their counters a little after their answers
        grown[:] = [now.since(then) for now, then in zip(await case.counters(), before, strict=True)]
        return all(each.prompt_tokens >= 2 * LONG for each in grown)

    await until(told)
    prefill, decode = grown
    assert (prefill.computed_tokens, prefill.cached_tokens) == (2 * LONG, 0)
    assert (decode.computed_tokens, decode.received_tokens) == (2, 2 * (LONG - 1))
    for answer in answers:
        assert path(answer) == "disaggregated"
        assert await case.is_right(answer, prompt)
