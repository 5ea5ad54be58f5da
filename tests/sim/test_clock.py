"""An engine's clock, on every event loop it may run on."""

from __future__ import annotations

import asyncio
import time

import pytest
import uvloop

from tandem.sim import virtual
from tandem.sim.clock import Clock


async def fine_time() -> None:
    clock = Clock()
    before, started = clock.now(), time.monotonic()
    while time.monotonic() - started < 0.0003:
        pass
    assert clock.now() > before, "time stands still within a callback"
    assert abs(clock.wall() - time.time()) < 60


def test_time_passes_within_a_millisecond_on_uvloop() -> None:
    uvloop.run(fine_time())


def test_time_passes_within_a_millisecond_on_asyncio() -> None:
    asyncio.run(fine_time())


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run, virtual.run])
def test_it_calls_back_when_its_seconds_are_over(run: object) -> None:
    async def wait() -> float:
        clock, called = Clock(scale=100.0), asyncio.Event()
        due = clock.now() + 0.5
        clock.at(due, called.set)
        await called.wait()
        return clock.now() - due

    assert -0.2 < run(wait()) < 100  # type: ignore[operator]


def test_a_scale_is_a_number_of_times() -> None:
    async def make() -> None:
        Clock(scale=0)

    with pytest.raises(ValueError, match="greater than 0"):
        asyncio.run(make())
