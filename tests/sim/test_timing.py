"""Time: what the cost model says is what a client measures, in virtual time to the millisecond."""

from __future__ import annotations

import asyncio

import pytest

from .helpers import engines, flags, in_virtual_time

PROMPT = [7] * 400


@in_virtual_time
async def test_an_answer_takes_the_steps_that_it_takes() -> None:
    async with engines(flags()) as e:
        answer = await e.complete(0, PROMPT, max_tokens=5)
        assert answer.seconds == pytest.approx(0.010 + 0.400 + 4 * 0.010, abs=1e-6)
        assert await e.metric(0, "vllm:time_to_first_token_seconds_sum") == pytest.approx(0.410, abs=1e-6)
        assert await e.metric(0, "vllm:inter_token_latency_seconds_sum") == pytest.approx(0.040, abs=1e-6)


@in_virtual_time
async def test_a_long_prompt_stalls_the_streams_beside_it_for_a_chunk() -> None:
    async with engines(flags("--max-num-batched-tokens", "101")) as e:
        stream = asyncio.create_task(e.complete(0, [1], max_tokens=20))
        await asyncio.sleep(0.035)
        await e.complete(0, PROMPT, max_tokens=1)
        answer = await stream
        # 400 tokens in four chunks of 100 beside the stream's one token.
        assert answer.seconds == pytest.approx(20 * 0.010 + 0.400, abs=1e-6)


@in_virtual_time
async def test_a_cached_prefix_saves_its_time() -> None:
    async with engines(flags()) as e:
        await e.complete(0, PROMPT, max_tokens=1)
        again = await e.complete(0, PROMPT, max_tokens=1)
        assert again.seconds == pytest.approx(0.010 + 0.016, abs=1e-6)
        assert again.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 384


@in_virtual_time
async def test_a_slow_engine_takes_its_factor() -> None:
    async with engines(flags()) as e:
        await e[0].set_faults("slow=3")
        answer = await e.complete(0, PROMPT, max_tokens=1)
        assert answer.seconds == pytest.approx(3 * 0.410, abs=1e-6)


@in_virtual_time
async def test_a_time_scale_shortens_the_clients_time_and_not_the_engines() -> None:
    async with engines(flags(), time_scale=10) as e:
        answer = await e.complete(0, PROMPT, max_tokens=5)
        assert answer.seconds == pytest.approx(0.045, abs=1e-6)
        assert await e.metric(0, "vllm:e2e_request_latency_seconds_sum") == pytest.approx(0.450, abs=1e-6)


@in_virtual_time
async def test_ten_minutes_of_traffic_leave_nothing() -> None:
    async with engines(*[flags() for _ in range(8)]) as e:

        async def user(number: int) -> int:
            answers = 0
            while e.now() < 600:
                answer = await e.complete(number % 8, [number, *PROMPT], max_tokens=20, stream=True)
                answers += answer.done
                await asyncio.sleep(5 + number % 7)
            return answers

        served = await asyncio.gather(*(user(i) for i in range(16)))
        assert sum(served) > 16 * 40
        assert all(e.idle(i) for i in range(8))


@in_virtual_time
async def test_preempted_requests_end_all_the_same() -> None:
    async with engines(flags("--num-gpu-blocks-override", "140", "--no-enable-prefix-caching")) as e:
        tasks = [e.complete(0, [i] * 600, max_tokens=300, ignore_eos=True) for i in range(4)]
        answers = await asyncio.gather(*tasks)
        assert [answer.json["usage"]["completion_tokens"] for answer in answers] == [300] * 4
        assert await e.metric(0, "vllm:num_preemptions_total") > 0
        alone = await e.complete(0, [3] * 600, max_tokens=300, ignore_eos=True)
        assert alone.text == answers[3].text
        assert e.idle(0)
