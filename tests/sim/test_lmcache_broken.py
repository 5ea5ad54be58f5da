"""The LMCache PD hand-off when something is wrong: parameters, receivers that are gone, faults on demand."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tandem.sim.handoff import Network

from .helpers import FOX, engines, in_virtual_time
from .lmcache_pair import BEFORE, PROMPT, SEED, D, P, Router, command, pair, receiver, sender

# What kills a prefiller, and what hangs it


@pytest.mark.parametrize(
    "spec",
    [
        {"receiver_init_port": 7300},
        {"receiver_alloc_port": 7400},
        {"receiver_init_port": []},
        {"receiver_alloc_port": ["no port"]},
        {"receiver_host": None},
    ],
    ids=str,
)
def test_a_disagg_spec_that_it_cannot_use_kills_the_prefiller(spec: dict[str, Any]) -> None:
    @in_virtual_time
    async def check() -> None:
        async with pair() as r:
            other = asyncio.create_task(r.e.complete(P, "another request", max_tokens=500))
            await asyncio.sleep(0.1)
            assert (await r.prefill("r1", spec=spec)).status == 500
            assert (await other).status == 500
            assert r.e[P].engine.dead
            assert not r.e[D].engine.dead

    check()


@pytest.mark.parametrize("spec", [None, "text", {}, {"req_id": "r1", "receiver_host": "h"}], ids=str)
def test_so_does_one_that_lacks_something(spec: Any) -> None:
    @in_virtual_time
    async def check() -> None:
        async with pair() as r:
            assert (await r.e.complete(P, kv_transfer_params={"disagg_spec": spec})).status == 500
            assert r.e[P].engine.dead

    check()


@pytest.mark.parametrize("number", [P, D])
def test_to_leave_before_the_first_token_with_ret_first_tok_kills_the_engine(number: int) -> None:
    @in_virtual_time
    async def check() -> None:
        async with pair() as r:
            kv = {"ret_first_tok": False}
            leaving = asyncio.create_task(r.e.complete(number, PROMPT, kv_transfer_params=kv))
            await asyncio.sleep(0.05)
            assert not r.e[number].engine.dead
            leaving.cancel()
            await asyncio.sleep(0.05)
            assert r.e[number].engine.dead

    check()


@in_virtual_time
async def test_a_prefiller_waits_for_a_receiver_that_is_not_there_yet() -> None:
    network = Network()
    async with pair(sender(), network=network) as r:
        waiting = asyncio.create_task(r.prefill("r1"))
        plain = asyncio.create_task(r.e.complete(P, "a plain request"))
        await asyncio.sleep(60)
        assert not waiting.done()
        assert not plain.done()
        assert (await r.e.ask(P, "/health")).status == 200
        async with engines(command(receiver()), environment=SEED, network=network) as late:
            await waiting
            await plain
            await r.hear("r1")
            decoder = Router(late, [])
            assert (await decoder.decode("r1", number=0)).text == await decoder.local_text(number=0)


@in_virtual_time
async def test_after_a_restart_of_the_receiver_no_write_succeeds() -> None:
    network = Network()
    async with pair(sender(), receiver(number=1), network=network) as r:
        async with engines(command(receiver()), environment=SEED, network=network):
            await r.handed_over("r1")
        hanging = asyncio.create_task(r.prefill("r2"))
        await asyncio.sleep(60)
        assert not hanging.done()
        async with engines(command(receiver()), environment=SEED, network=network) as restarted:
            decoder = Router(restarted, [])
            assert (await hanging).status == 200
            assert (await r.prefill("r3")).status == 200
            await asyncio.sleep(5)
            assert not r.heard("r2")
            assert not r.heard("r3")
            right = await decoder.local_text(number=0)
            assert (await decoder.decode("r3", number=0)).text != right
            assert (await decoder.decode(None, number=0)).text == right
            # Other receivers are not concerned.
            await r.handed_over("r4", to=receiver(number=1))
            assert (await r.decode("r4")).text == right


@in_virtual_time
async def test_a_prefiller_that_waits_for_room_when_the_receiver_dies_waits_for_ever() -> None:
    network = Network()
    async with pair(sender(), network=network) as r:
        async with engines(command(receiver(2)), environment=SEED, network=network):
            await r.handed_over("r1")
            waiting = asyncio.create_task(r.prefill("r2"))
            await asyncio.sleep(1)
        async with engines(command(receiver(2)), environment=SEED, network=network):
            await asyncio.sleep(60)
            assert not waiting.done()
            assert (await r.e.ask(P, "/health")).status == 200


# Faults


@in_virtual_time
async def test_a_lost_notification() -> None:
    async with pair() as r:
        assert (await r.prefill("r1", fault="lost-notification")).status == 200
        await asyncio.sleep(100)
        assert not r.told
        assert (await r.decode("r1")).text == await r.local_text()


@in_virtual_time
async def test_a_late_notification() -> None:
    async with pair() as r:
        await r.prefill(BEFORE, fault="late-notification=7.5")
        answered = r.e.now()
        await r.hear(BEFORE, 10)
        assert r.e.now() - answered == pytest.approx(7.5, abs=0.01)


@in_virtual_time
async def test_faults_of_an_engine_strike_the_legs_they_name() -> None:
    async with pair() as r:
        await r.e[P].set_faults("lost-notification,leg=decode")
        await r.handed_over("r1")
        await r.e[P].set_faults("lost-notification,leg=prefill,times=1")
        await r.prefill("r2")
        await r.handed_over("r3")
        assert not r.heard("r2")
        await r.e[D].set_faults("status=503,leg=decode")
        assert (await r.decode("r3")).status == 503
        assert (await r.decode(None)).status == 200


@pytest.mark.parametrize("number", [P, D])
def test_a_full_buffer_on_demand(number: int) -> None:
    @in_virtual_time
    async def check() -> None:
        async with pair() as r:
            await r.e[number].set_faults("full-buffer")
            waiting = asyncio.create_task(r.prefill("r1"))
            await asyncio.sleep(100)
            assert not waiting.done()
            await r.e[number].set_faults("")
            assert (await waiting).status == 200
            await r.hear("r1")

    check()


@pytest.mark.parametrize(("number", "fault"), [(P, "lost-kv"), (D, "lost-kv"), (P, "stale-kv")])
def test_lost_kv_is_not_told_and_stale_kv_is(number: int, fault: str) -> None:
    @in_virtual_time
    async def check() -> None:
        async with pair() as r:
            await r.e[number].set_faults(fault)
            await r.prefill("r1")
            await asyncio.sleep(5)
            assert r.heard("r1") == (fault == "stale-kv")
            assert (await r.decode("r1")).text != await r.local_text()

    check()


@in_virtual_time
async def test_faults_of_nixl_mean_nothing() -> None:
    async with pair() as r:
        await r.prefill("r1", fault="expired-lease;no-kv-params")
        await r.hear("r1")
        assert (await r.decode("r1")).text == await r.local_text()


@in_virtual_time
async def test_nothing_is_left_of_many_requests() -> None:
    async with pair(sender(), receiver(8), sender()) as r:

        async def one(i: int) -> None:
            prompt = f"{i} " + FOX * (5 + i % 7)
            async with room:
                await r.handed_over(f"r{i}", prompt, number=(P, 2)[i % 2])
                assert (await r.decode(f"r{i}", prompt)).text == await r.local_text(prompt)

        # As many as the buffer has room for; see the test of more in one step.
        room = asyncio.Semaphore(4)
        await asyncio.gather(*map(one, range(40)))
        assert r.buffer() == {"chunks": 8, "used": 0, "free": 8, "allocations_waiting": 0}
        assert all(r.e.idle(number) for number in (P, D, 2))
