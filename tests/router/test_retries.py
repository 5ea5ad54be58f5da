"""Failures must not multiply load: retries have a budget, and so have long prompts on decoders."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.http import Responder
from tandem.router.retries import RetryBudget

from .conftest import LONG, SHORT, Endpoint, Start
from .fakes import FakeEngine, OnGenerate, Seen, broken, eventually, local_counter, reads_kv

SIZE, PER_SECOND = RetryBudget.SIZE, RetryBudget.PER_SECOND


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


STEPS = st.lists(
    st.tuples(st.just("requests"), st.integers(0, 300))
    | st.tuples(st.just("failures"), st.integers(0, 300))
    | st.tuples(st.just("seconds"), st.integers(0, 30)),
    max_size=30,
)


@given(st.floats(0, 10), STEPS)
def test_however_much_fails_retries_are_a_share_of_the_requests_and_a_few(
    ratio: float, steps: list[tuple[str, int]]
) -> None:
    """Over any stretch of time, not only from the start."""
    clock = Clock()
    budget = RetryBudget(ratio, clock)
    stretches: list[float] = []  # for each stretch that has begun: what it may still spend
    for step, much in steps:
        stretches.append(SIZE)
        if step == "requests":
            for _ in range(much):
                budget.request()
            stretches = [left + ratio * much for left in stretches]
        elif step == "failures":
            given = sum(budget.retry() for _ in range(much))
            stretches = [left - given for left in stretches]
            assert given == much or not budget.retry(), "none is kept back"
        else:
            clock.now += much
            stretches = [left + PER_SECOND * much for left in stretches]
        assert min(stretches) > -1e-6


def test_a_quiet_endpoint_may_retry_and_a_failing_one_runs_out() -> None:
    clock = Clock()
    budget = RetryBudget(0.0, clock)
    assert [budget.retry() for _ in range(51)] == [True] * 50 + [False]
    clock.now += 2.0
    assert [budget.retry() for _ in range(3)] == [True, True, False]
    clock.now += 3600.0
    assert sum(budget.retry() for _ in range(1000)) == 50, "what was not used is not saved without end"


def test_requests_pay_for_retries_by_the_ratio() -> None:
    budget = RetryBudget(0.25, Clock())
    while budget.retry():
        pass
    for _ in range(4):
        assert not budget.retry()
        budget.request()
    assert [budget.retry(), budget.retry()] == [True, False]


@pytest.fixture
def retries(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set how many retries are free at first; there are no others."""

    def free(number: float) -> None:
        monkeypatch.setattr(RetryBudget, "SIZE", number)
        monkeypatch.setattr(RetryBudget, "PER_SECOND", 0.0)

    return free


def legs(engines: list[FakeEngine]) -> int:
    return sum(len(e.requests) for e in engines)


def fail(engines: list[FakeEngine], how: OnGenerate) -> None:
    for engine in engines:
        engine.on_generate = how


async def test_without_a_retry_left_a_failed_prefill_is_the_only_one_and_a_decoder_computes(
    start: Start, retries: Any
) -> None:
    retries(0.0)
    endpoint = await start(prefill=3, retry_ratio=0.0)
    fail(endpoint.prefill, broken(500))
    answer = await endpoint.post(LONG)
    assert answer.status_code == 200
    assert (legs(endpoint.prefill), legs(endpoint.decode)) == (1, 1)
    assert await endpoint.outcomes() == {("decode_only", "prefill_failed", "ok"): 1}


async def test_long_prompts_on_decoders_stay_capped_when_no_retry_is_left(start: Start, retries: Any) -> None:
    retries(0.0)
    endpoint = await start(prefill=3, retry_ratio=0.0, max_fallbacks=0)
    fail(endpoint.prefill, broken(500))
    answer = await endpoint.post(LONG)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    assert (legs(endpoint.prefill), legs(endpoint.decode)) == (1, 0)


@pytest.mark.parametrize("body", [SHORT, LONG])
async def test_without_a_retry_left_a_decoders_first_failure_is_final(
    start: Start, retries: Any, body: dict[str, Any]
) -> None:
    retries(0.0)
    endpoint = await start(decode=3, retry_ratio=0.0)
    fail(endpoint.decode, broken(503))
    answer = await endpoint.post(body)
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "engine says 503")
    assert legs(endpoint.decode) == 1
    assert legs(endpoint.prefill) == (1 if body is LONG else 0)


async def test_without_a_retry_left_the_only_decoder_is_not_asked_again(start: Start, retries: Any) -> None:
    retries(0.0)
    endpoint = await start(retry_ratio=0.0)
    endpoint.decode[0].on_generate = lambda engine, seen, responder: (
        reads_kv(seen) and broken(500)(engine, seen, responder)
    )
    assert (await endpoint.post(LONG)).status_code == 500
    assert legs(endpoint.decode) == 1


async def test_retry_ratio_is_how_many_requests_pay_for_a_retry(start: Start, retries: Any) -> None:
    retries(1.0)
    endpoint = await start(decode=2, retry_ratio=0.5)
    fail(endpoint.decode, fails_first_of_each(endpoint))
    assert (await endpoint.post(SHORT)).status_code == 200, "the one that is free at first"
    assert (await endpoint.post(SHORT)).status_code == 500
    assert (await endpoint.post(SHORT)).status_code == 200, "two requests have paid for it"
    assert (await endpoint.post(SHORT)).status_code == 500
    assert legs(endpoint.decode) == 6


def fails_first_of_each(endpoint: Endpoint) -> OnGenerate:
    """The first leg of every request fails, wherever it goes."""
    known: set[str] = set()

    def answer(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        request = seen.headers["x-request-id"].rsplit("-", 1)[0]
        first = request not in known
        known.add(request)
        return first and bool(broken(500)(engine, seen, responder))

    return answer


# Long prompts on decoders


async def test_max_fallback_tokens_caps_the_long_prompts_on_decoders_and_one_alone_may_have_more(
    start: Start,
) -> None:
    endpoint = await start(local=local_counter(), max_fallbacks=9, max_fallback_tokens=100)
    (decoder,) = endpoint.decode
    fail(endpoint.prefill, broken(500))
    go_on: dict[int, asyncio.Event] = {}

    async def when_told(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        await go_on.setdefault(len(seen.body["prompt"]), asyncio.Event()).wait()
        return False

    decoder.on_generate = when_told

    def post(tokens: int) -> asyncio.Task[Any]:
        return asyncio.create_task(endpoint.post({**LONG, "prompt": "x" * tokens}))

    async def begun(tokens: int) -> None:
        async def is_there() -> bool:
            return tokens in go_on

        await eventually(is_there)

    huge = post(300)
    await begun(300)
    assert (await post(30)).status_code == 503, "it is not alone"
    go_on[300].set()
    assert (await huge).status_code == 200

    fit = [post(30), post(60)]
    await begun(30)
    await begun(60)
    assert (await post(21)).status_code == 503, "30 + 60 + 21 are more than 100"
    go_on[30].set()
    assert (await fit[0]).status_code == 200
    last = post(40)
    await begun(40)
    go_on[40].set()
    go_on[60].set()
    assert [(await t).status_code for t in (fit[1], last)] == [200, 200]
