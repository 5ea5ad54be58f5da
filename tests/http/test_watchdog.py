"""Deadlines that are moved: they are met once, when they should be, and moving one never fails."""

import asyncio

import pytest

from tandem.http._watchdog import Watchdog

from .conftest import until


class Watched:
    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.ended: list[float] = []
        self.watchdog = Watchdog(self.loop, lambda: self.ended.append(self.loop.time()))


async def later() -> None:
    """Until a deadline is met that is set now."""
    other = Watched()
    other.watchdog.set(0.02)
    await until(lambda: bool(other.ended))


@pytest.mark.parametrize("soon", [0.0, 0.0001, 0.01])
async def test_a_deadline_is_met_once(soon: float) -> None:
    watched, begun = Watched(), asyncio.get_running_loop().time()
    watched.watchdog.set(soon)
    await until(lambda: bool(watched.ended))
    await later()
    (ended,) = watched.ended
    assert ended >= begun + soon


@pytest.mark.parametrize("soon", [0.0, 0.0001, 0.01])
async def test_one_that_is_near_can_be_put_off(soon: float) -> None:
    """uvloop has no timers that are due at once."""
    watched = Watched()
    watched.watchdog.set(soon)
    watched.watchdog.set(0.05)
    put_off = watched.loop.time()
    await until(lambda: bool(watched.ended))
    assert watched.ended[0] >= put_off + 0.04


async def test_one_that_is_far_can_be_brought_near() -> None:
    watched = Watched()
    watched.watchdog.set(3600)
    watched.watchdog.set(0.01)
    await until(lambda: bool(watched.ended))


@pytest.mark.parametrize("end", ["clear", "close"])
async def test_one_that_is_not_wanted_any_more_is_not_met(end: str) -> None:
    watched = Watched()
    watched.watchdog.set(0.0)
    getattr(watched.watchdog, end)()
    await later()
    assert not watched.ended
