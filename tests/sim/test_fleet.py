"""Many engines in one process."""

from __future__ import annotations

import asyncio
import time

import pytest

from tandem.sim import EngineSpec, UsageError, parse, virtual

from .helpers import engines, flags, in_virtual_time, pair


@in_virtual_time
async def test_three_hundred_engines_share_a_loop_and_know_each_other() -> None:
    prefill, decode = pair("--num-gpu-blocks-override", "130")
    async with engines(*[prefill] * 100, *[decode] * 200) as e:
        assert len(set(e.fleet.urls)) == 300

        async def hand_over(i: int) -> None:
            prompt = [i + 5] * 40
            params = await e.prefill(i % 100, prompt)
            answer = await e.complete(100 + i, prompt, kv_transfer_params=params, stream=True)
            assert answer.text == (await e.complete(i % 100, prompt)).text

        await asyncio.gather(*(hand_over(i) for i in range(200)))
        await asyncio.sleep(1)
        assert all(e.idle(i) for i in range(300))


def test_virtual_time_passes_at_once() -> None:
    async def ten_minutes() -> float:
        loop = asyncio.get_running_loop()
        started = loop.time()
        await asyncio.gather(*(asyncio.sleep(600) for _ in range(3)))
        return loop.time() - started

    real = time.monotonic()
    assert virtual.run(ten_minutes()) == pytest.approx(600)
    assert time.monotonic() - real < 60


def test_virtual_timers_fire_in_order() -> None:
    async def order() -> list[int]:
        fired: list[int] = []
        loop = asyncio.get_running_loop()
        for delay in (3, 1, 2):
            loop.call_later(delay, fired.append, delay)
        await asyncio.sleep(5)
        return fired

    assert virtual.run(order()) == [1, 2, 3]


@in_virtual_time
async def test_faults_hold_from_the_start() -> None:
    async with engines(EngineSpec(parse(flags()), faults="status=500")) as e:
        assert (await e.complete(0)).status == 500


def test_a_taken_port_fails_and_leaves_nothing() -> None:
    async def start() -> None:
        async with engines(flags()) as e:
            taken = e[0].port
            with pytest.raises(OSError, match="address already in use"):
                async with engines(flags(), EngineSpec(parse(flags()), port=taken)):
                    pass
            assert (await e.complete(0)).status == 200

    virtual.run(start())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--num-gpu-blocks-override", "10"], "do not hold one request of --max-model-len 2048"),
        (["--no-enable-chunked-prefill", "--max-num-batched-tokens", "100"], "below --max-model-len"),
        (["--max-num-batched-tokens", "10", "--max-num-seqs", "20"], "below --max-num-seqs 20"),
    ],
)
def test_an_engine_that_vllm_would_not_start_is_refused(more: list[str], said: str) -> None:
    async def start() -> None:
        async with engines(flags(*more)):
            pass

    with pytest.raises(UsageError, match=said):
        asyncio.run(start())
