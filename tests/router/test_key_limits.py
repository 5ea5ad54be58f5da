"""What a key may use: over any time no more than its limits, and no less."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.router.errors import OverLimit
from tandem.router.keys import ApiKey, Caller, KeyStore, Limits, digest
from tandem.router.keys.bucket import Bucket

from .key_fakes import A, Clock

# Numbers that floats hold exactly, so that a model in fractions agrees with them to the last bit.
EXACT = st.integers(0, 64 * 100).map(lambda n: n / 64)
RATES = st.integers(1, 64 * 20).map(lambda n: n / 64)
SIZES = st.integers(1, 50)
STEPS = st.lists(st.tuples(EXACT, st.integers(0, 80)), max_size=60)


@given(RATES, SIZES, STEPS)
def test_a_bucket_is_what_its_words_say(rate: float, size: int, steps: list[tuple[float, int]]) -> None:
    clock = Clock()
    bucket, level = Bucket(rate, size, clock), Fraction(size)
    for pause, amount in steps:
        clock.now += pause
        level = min(Fraction(size), level + Fraction(rate) * Fraction(pause))
        lacks = min(amount, size) - level
        assert bucket.wait(amount) == pytest.approx(float(max(Fraction(0), lacks) / Fraction(rate)))
        if lacks <= 0:
            bucket.take(amount)
            level -= amount


@given(st.floats(0.001, 1e4), SIZES, st.lists(st.floats(0, 100), max_size=80))
def test_in_no_time_is_more_taken_than_flows_in_and_lies_there(
    rate: float, size: int, pauses: list[float]
) -> None:
    clock = Clock()
    bucket = Bucket(rate, size, clock)
    taken = []
    for pause in pauses:
        clock.now += pause
        if not bucket.wait(1):
            bucket.take(1)
            taken.append(clock.now)
    for i in range(len(taken)):
        for j in range(i, len(taken)):
            assert j - i + 1 <= size + rate * (taken[j] - taken[i]) + 1e-3


@given(st.floats(0.001, 1e4), SIZES, st.lists(st.integers(0, 200), max_size=20), st.integers(0, 200))
def test_who_waits_as_long_as_told_is_let_in(rate: float, size: int, taken: list[int], amount: int) -> None:
    clock = Clock()
    bucket = Bucket(rate, size, clock)
    for each in taken:
        bucket.take(each)
    wait = bucket.wait(amount)
    clock.now += wait
    assert bucket.wait(amount) == pytest.approx(0, abs=1e-6)
    clock.now += math.ceil(wait) - wait
    assert bucket.wait(amount) == 0


@given(st.floats(0.001, 1e4), SIZES, SIZES, st.integers(0, 50))
def test_a_bucket_of_another_size_keeps_what_is_there(
    rate: float, before: int, after: int, taken: int
) -> None:
    clock = Clock()
    bucket = Bucket(rate, before, clock)
    bucket.take(taken)
    bucket.resize(rate, after)
    there = min(after, before - taken + max(0, after - before))
    assert bucket.wait(after) == pytest.approx((after - there) / rate, abs=1e-6)


def store_with(clock: Clock, **limits: float) -> KeyStore:
    return KeyStore([ApiKey("a", digest(A.encode()), Limits(**limits))], clock)  # type: ignore[arg-type]


def caller_of(store: KeyStore) -> Caller:
    return store.caller(f"Bearer {A}".encode())


def begins(store: KeyStore) -> Caller | None:
    """One more request; None: it is refused."""
    caller = caller_of(store)
    try:
        caller.begin()
    except OverLimit:
        return None
    return caller


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.just(0.0)),
        st.tuples(st.just("end"), st.integers(0, 10).map(float)),
        st.tuples(st.just("wait"), EXACT),
        st.tuples(st.just("change"), st.integers(1, 5).map(float)),
    ),
    max_size=60,
)


@given(OPERATIONS, st.integers(1, 5), RATES, st.integers(1, 8))
def test_requests_are_bounded_at_once_and_in_time_whatever_happens(
    operations: list[tuple[str, float]], at_once: int, rate: float, burst: int
) -> None:
    clock = Clock()
    store = store_with(clock, concurrent_requests=at_once, requests_per_second=rate, burst=burst)
    running: list[Caller] = []
    begun: list[float] = []
    for what, value in operations:
        match what:
            case "begin":
                had_room = len(running) < at_once
                caller = begins(store)
                assert caller is None or had_room
                if caller is not None:
                    running.append(caller)
                    begun.append(clock.now)
            case "end" if running:
                running.pop(int(value) % len(running)).end(0, 0)
            case "wait":
                clock.now += value
            case "change":
                at_once = int(value)
                limits = Limits(rate, burst, None, at_once)
                store.replace([ApiKey("a", digest(A.encode()), limits)])
        (account,) = store
        assert account.running == len(running)
        assert account.requests == len(begun)
    assert all(
        count <= burst + rate * (last - first) + 1e-3
        for i, first in enumerate(begun)
        for count, last in enumerate(begun[i:], 1)
    )
    for caller in running:
        caller.end(0, 0)
        caller.end(0, 0)  # once is enough
    assert next(iter(store)).running == 0


@given(
    st.integers(1, 1000),
    st.lists(st.tuples(EXACT, st.integers(0, 2000), st.integers(0, 2000)), max_size=40),
)
def test_tokens_in_the_long_run_are_those_of_the_limit(
    per_minute: int, requests: list[tuple[float, int, int]]
) -> None:
    """Beyond it is at most what one request used more than there was."""
    clock = Clock()
    store = store_with(clock, tokens_per_minute=per_minute)
    start, used, last = clock.now, 0, 0
    for pause, prompt, generated in requests:
        clock.now += pause
        caller = begins(store)
        if caller is None:
            continue
        try:
            caller.prompt(prompt)
        except OverLimit:
            caller.end(0, 0)
            continue
        caller.end(prompt, generated)
        used += prompt + generated
        last = prompt + generated
        assert used <= per_minute + per_minute / 60 * (clock.now - start) + last + 1e-3
    (account,) = store
    assert account.prompt_tokens + account.generated_tokens == used


def test_a_prompt_of_more_than_a_minute_has_waits_for_a_full_one_and_is_let_in() -> None:
    clock = Clock()
    store = store_with(clock, tokens_per_minute=60)
    caller = caller_of(store)
    caller.begin()
    caller.prompt(100)
    caller.end(100, 20)
    with pytest.raises(OverLimit) as over:
        caller_of(store).begin()
    assert over.value.retry_after_s == 61  # 60 tokens too many, and one more
    assert over.value.kind == "tokens"
    clock.now += 61
    caller = caller_of(store)
    caller.begin()
    with pytest.raises(OverLimit) as over:
        caller.prompt(100)
    assert over.value.retry_after_s == 59
    caller.end(0, 0)


def test_what_is_refused_costs_nothing() -> None:
    clock = Clock()
    store = store_with(clock, tokens_per_minute=60, requests_per_second=0.001, burst=1)
    caller = caller_of(store)
    caller.begin()
    caller.prompt(60)
    caller.end(0, 0)  # it got no answer
    clock.now += 1000
    for _ in range(3):
        caller = caller_of(store)
        caller.begin()
        next(iter(store)).token_bucket.take(1)  # type: ignore[union-attr]
        with pytest.raises(OverLimit):
            caller.prompt(60)
        caller.end(0, 0)
    (account,) = store
    assert account.token_bucket is not None
    assert account.token_bucket.wait(57) == 0
    assert (account.prompt_tokens, account.generated_tokens) == (0, 0)


def test_prompts_of_an_unknown_length_are_charged_at_their_end() -> None:
    store = store_with(Clock(), tokens_per_minute=60)
    caller = caller_of(store)
    caller.begin()
    caller.prompt(None)
    caller.end(90, 10)
    with pytest.raises(OverLimit) as over:
        caller_of(store).begin()
    assert over.value.retry_after_s == 41


def test_a_key_without_limits_has_none_and_what_it_uses_is_counted() -> None:
    store = store_with(Clock())
    callers = [caller_of(store) for _ in range(1000)]
    for caller in callers:
        assert not caller.metered
        caller.begin()
        caller.prompt(10**9)
    assert next(iter(store)).running == 1000
    for caller in callers:
        caller.end(2, 3)
    (account,) = store
    assert (account.running, account.requests) == (0, 1000)
    assert (account.prompt_tokens, account.generated_tokens) == (2000, 3000)


def test_the_wait_that_is_told_is_whole_seconds_and_at_least_one() -> None:
    clock = Clock()
    store = store_with(clock, requests_per_second=100.0, burst=1)
    assert begins(store)
    with pytest.raises(OverLimit, match=r"100 requests per second. Try again in 1 s") as over:
        caller_of(store).begin()
    assert dict(over.value.headers())[b"retry-after"] == b"1"
    waits = []
    slow = store_with(clock, requests_per_second=0.1, burst=1)
    assert begins(slow)
    for _ in range(3):
        with pytest.raises(OverLimit) as over:
            caller_of(slow).begin()
        waits.append(over.value.retry_after_s or 0)
        clock.now += 3.5
    assert [a - b for a, b in pairwise(waits)] == [3, 4]


def test_a_change_of_the_file_resets_no_limit() -> None:
    clock = Clock()
    store = store_with(clock, requests_per_second=0.001, burst=2, tokens_per_minute=60)
    for _ in range(2):
        caller = begins(store)
        assert caller
        caller.end(0, 0)
    key = next(iter(store)).key
    store.replace([key])
    assert begins(store) is None
    store.replace([ApiKey("a", key.digest, Limits(0.001, 3, 60))])
    assert begins(store)
    assert begins(store) is None
    store.replace([ApiKey("a", key.digest)])
    assert begins(store)
