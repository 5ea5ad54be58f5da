"""Of several operators one works, and another goes on when it is gone."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable

import pytest

from tandem.cli.operator import add_arguments
from tandem.kube import ApiError
from tandem.kube import resources as kinds
from tandem.operator.process import leader as module
from tandem.operator.process.leader import GIVEN_UP, LEASE_SECONDS, RENEWED, Leader, LostLease

from ..fake_api import FakeApi

GIVE_UP_SECONDS = LEASE_SECONDS * GIVEN_UP


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Time passes when somebody sleeps."""
    sleep = asyncio.sleep

    async def slept(seconds: float) -> None:
        clock.now += seconds
        await sleep(0)

    monkeypatch.setattr(module.asyncio, "sleep", slept)


def candidate(api: FakeApi, clock: Callable[[], float], name: str) -> Leader:
    return Leader(api, "system", "operator", name, clock)


def holder(api: FakeApi) -> str:
    found: str = api.objects[kinds.LEASE, ("system", "operator")]["spec"]["holderIdentity"]
    return found


async def test_the_first_one_leads(clock: Clock) -> None:
    api = FakeApi()
    one = candidate(api, clock, "one")
    await one.acquire()
    assert one.leads
    assert holder(api) == "one"
    spec = api.objects[kinds.LEASE, ("system", "operator")]["spec"]
    assert spec["leaseDurationSeconds"] == LEASE_SECONDS
    assert spec["renewTime"].endswith("Z")


async def test_the_second_one_waits_while_the_first_renews(clock: Clock) -> None:
    api = FakeApi()
    one, two = candidate(api, clock, "one"), candidate(api, clock, "two")
    await one.acquire()
    holding = asyncio.create_task(one.hold())
    waiting = asyncio.create_task(two.acquire())
    for _ in range(200):
        await asyncio.sleep(0.1)
    assert not waiting.done()
    assert holder(api) == "one"
    holding.cancel()
    waiting.cancel()


async def test_the_second_one_goes_on_when_the_first_has_died(clock: Clock) -> None:
    api = FakeApi()
    await candidate(api, clock, "one").acquire()
    died = clock.now
    two = candidate(api, clock, "two")
    await two.acquire()
    assert clock.now - died >= LEASE_SECONDS, "not before the lease has run out"
    assert holder(api) == "two"
    assert api.objects[kinds.LEASE, ("system", "operator")]["spec"]["leaseTransitions"] == 1


async def test_the_second_one_need_not_wait_when_the_first_gives_back(clock: Clock) -> None:
    api = FakeApi()
    one, two = candidate(api, clock, "one"), candidate(api, clock, "two")
    await one.acquire()
    await one.release()
    before = clock.now
    await two.acquire()
    assert clock.now == before
    assert holder(api) == "two"


@pytest.mark.parametrize("seconds", [3, 60])
async def test_how_long_a_lease_holds_may_be_chosen(clock: Clock, seconds: int) -> None:
    """Who waits goes by what is written in the lease, whatever it was told itself."""
    api = FakeApi()
    one = Leader(api, "system", "operator", "one", clock, lasts=seconds)
    await one.acquire()
    died = clock.now
    await candidate(api, clock, "two").acquire()
    assert seconds <= clock.now - died < seconds + LEASE_SECONDS * RENEWED * 2
    three = Leader(api, "system", "operator", "three", clock, lasts=seconds)
    api.objects.clear()
    await three.acquire()
    api.refusal = ApiError(503, "", "the API server is away")
    away = clock.now
    with pytest.raises(LostLease):
        await three.hold()
    assert clock.now - away < seconds


async def test_who_waits_is_told_by_a_watch_that_the_lease_is_given_back(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It need not look again to have it: before a pod that is made in place of the first."""
    api = FakeApi()
    one, two = candidate(api, clock, "one"), candidate(api, clock, "two")
    await one.acquire()
    monkeypatch.setattr(module.asyncio, "sleep", lambda _: asyncio.Event().wait())  # for ever
    waiting = asyncio.create_task(two.acquire())
    await turns(waiting)
    await one.acquire()  # renews
    await turns(waiting)
    assert not waiting.done()
    assert holder(api) == "one"
    await one.release()
    await turns(waiting)
    assert waiting.done()
    assert two.leads
    assert holder(api) == "two"


async def turns(task: asyncio.Task[None]) -> None:
    """Let a task get on as far as it can."""
    for _ in range(50):
        await asyncio.wait([task], timeout=0)


async def test_only_the_holder_gives_back(clock: Clock) -> None:
    api = FakeApi()
    one, two = candidate(api, clock, "one"), candidate(api, clock, "two")
    await one.acquire()
    await two.release()
    assert holder(api) == "one"


async def test_who_cannot_renew_stops_before_another_may_begin_and_can_lead_again(clock: Clock) -> None:
    api = FakeApi()
    one = candidate(api, clock, "one")
    await one.acquire()
    renewed = clock.now
    api.refusal = ApiError(503, "", "the API server is away")
    with pytest.raises(LostLease):
        await one.hold()
    assert GIVE_UP_SECONDS <= clock.now - renewed < LEASE_SECONDS
    assert not one.leads
    api.refusal = None
    await one.acquire()
    one.check()


async def test_a_short_absence_of_the_api_server_is_borne(clock: Clock) -> None:
    api = FakeApi()
    one = candidate(api, clock, "one")
    await one.acquire()
    holding = asyncio.create_task(one.hold())
    api.refusal = ApiError(503, "", "the API server is away")
    until = clock.now + GIVE_UP_SECONDS / 2
    while clock.now < until:
        await asyncio.sleep(0.1)
    api.refusal = None
    for _ in range(100):
        await asyncio.sleep(0.2)
    assert not holding.done()
    holding.cancel()


async def test_a_lease_that_another_took_is_lost_at_once(clock: Clock) -> None:
    api = FakeApi()
    one = candidate(api, clock, "one")
    await one.acquire()
    lease = api.objects[kinds.LEASE, ("system", "operator")]
    api.edit(
        kinds.LEASE, ("system", "operator"), spec=lease["spec"] | {"holderIdentity": "two", "renewTime": "x"}
    )
    with pytest.raises(LostLease):
        await one.hold()


async def test_two_at_once_are_never_both_leaders(clock: Clock) -> None:
    api = FakeApi()
    candidates = [candidate(api, clock, name) for name in ("one", "two", "three")]
    tasks = [asyncio.create_task(c.acquire()) for c in candidates]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    assert sum(c.leads for c in candidates) == 1
    for task in tasks:
        task.cancel()


async def test_who_was_frozen_writes_nothing_before_it_knows_that_it_still_leads(clock: Clock) -> None:
    api = FakeApi()
    one = candidate(api, clock, "one")
    await one.acquire()
    one.check()
    clock.now += LEASE_SECONDS
    with pytest.raises(LostLease):
        one.check()


async def test_who_does_not_lead_may_not_write(clock: Clock) -> None:
    with pytest.raises(LostLease):
        candidate(FakeApi(), clock, "one").check()


@pytest.mark.parametrize("text", ["2", "601", "-5", "soon", "1.5"])
def test_a_time_that_no_lease_can_have_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args([f"--lease-seconds={text}"])
    assert f"{text!r} is not a number of seconds from 3 to 600" in capsys.readouterr().err
    assert parser.parse_args([]).lease_seconds == LEASE_SECONDS
