"""Timed completions: what they time, and that no broken answer counts as one."""

from __future__ import annotations

import asyncio

import pytest

from tandem.bench.load import LoadError, Prompts, Unreachable, ask, completion, timed
from tandem.http import Client, Origin

from ..sim.helpers import MODEL, engines, flags, in_virtual_time


@in_virtual_time
async def test_it_times_every_token_of_an_answer_of_exact_length() -> None:
    async with engines(flags()) as e:
        seen: list[float] = []
        origin = Origin.parse(e.fleet.urls[0])
        timing = await timed(e.client, origin, completion(MODEL, Prompts(1)(400), 5), on_token=seen.append)
        assert timing.prompt_tokens == 400
        assert timing.ttft == pytest.approx(0.010 + 0.400, abs=1e-6)
        assert timing.gaps == pytest.approx([0.010] * 4, abs=1e-6)
        assert timing.times == pytest.approx(seen)


@in_virtual_time
async def test_an_engine_that_was_idle_for_a_moment_takes_the_whole_time() -> None:
    async with engines(flags()) as e:
        origin = Origin.parse(e.fleet.urls[0])
        for pause in (0.0, 0.004, 0.04, 1.0):
            await asyncio.sleep(pause)
            timing = await timed(e.client, origin, completion(MODEL, Prompts()(100), 2))
            assert timing.ttft == pytest.approx(0.010 + 0.100, abs=1e-6)


@in_virtual_time
async def test_a_broken_answer_is_an_error_that_names_the_server() -> None:
    async with engines(flags()) as e:
        origin = Origin.parse(e.fleet.urls[0])
        for fault, said in (
            ("status=503", "answered HTTP 503"),
            ("error@2", "ended its stream with"),
            ("reset@2", "closed"),
        ):
            await e[0].set_faults(fault)
            with pytest.raises(LoadError, match=said) as error:
                await timed(e.client, origin, completion(MODEL, [5] * 20, 8))
            assert str(origin) in str(error.value)
            assert not isinstance(error.value, Unreachable)


@in_virtual_time
async def test_a_model_that_is_not_served_is_an_error_with_the_servers_words() -> None:
    async with engines(flags()) as e:
        with pytest.raises(LoadError, match=r"HTTP 404: .*`other` does not exist"):
            await timed(e.client, Origin.parse(e.fleet.urls[0]), completion("other", [5], 8))
        with pytest.raises(LoadError, match="/nothing answered HTTP 404"):
            await ask(e.client, Origin.parse(e.fleet.urls[0]), "/nothing")


async def test_nobody_listening_is_told_apart() -> None:
    client = Client()
    try:
        with pytest.raises(Unreachable):
            await ask(client, Origin("127.0.0.1", 9), "/v1/models")
        with pytest.raises(Unreachable):
            await timed(client, Origin("127.0.0.1", 9), completion("m", [1], 1))
    finally:
        await client.aclose()


def test_prompts_are_new_each_time_and_the_same_for_a_seed() -> None:
    one, same = Prompts("a"), Prompts("a")
    first, second = one(64), one(64)
    assert len(first) == 64
    assert first != second
    assert [same(64), same(64)] == [first, second]
