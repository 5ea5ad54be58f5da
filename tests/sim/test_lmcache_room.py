"""The LMCache PD hand-off under way: room in the receive buffer, steps, requests that end too early."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from .helpers import FOX, PROFILE, in_virtual_time
from .lmcache_pair import AFTER, CHUNK, D, P, pair, receiver, sender

# Room


@in_virtual_time
async def test_a_full_buffer_stops_the_whole_prefiller_until_there_is_room() -> None:
    async with pair(sender(), receiver(2)) as r:
        await r.handed_over("r1")
        waiting = asyncio.create_task(r.prefill("r2"))
        await asyncio.sleep(1)
        plain = asyncio.create_task(r.e.complete(P, "a plain request"))
        await asyncio.sleep(60)
        assert not waiting.done()
        assert not plain.done()
        assert (await r.e.ask(P, "/health")).status == 200
        assert r.e[P].engine.state()["leases"] == 1
        assert r.buffer() == {"chunks": 2, "used": 2, "free": 0, "allocations_waiting": 1}
        assert (await r.decode("r1")).text == await r.local_text()
        assert (await waiting).status == (await plain).status == 200
        await r.hear("r2")
        assert (await r.decode("r2")).text == await r.local_text()
        assert r.buffer()["used"] == 0


@in_virtual_time
async def test_requests_of_one_step_that_do_not_fit_together_stop_each_other_for_ever() -> None:
    async with pair(sender(), receiver(2)) as r:
        busy = asyncio.create_task(r.e.complete(P, "something", max_tokens=1))
        await asyncio.sleep(0.005)
        legs = [asyncio.create_task(r.prefill(f"r{i}")) for i in range(2)]
        await asyncio.sleep(60)
        # One was written and told. But the step ends, and both are answered, when the other has room as well.
        assert len(r.told) == 1
        assert not any(leg.done() for leg in legs)
        first = r.told[0][2]
        assert (await r.decode(first)).text == await r.local_text()
        assert {(await leg).status for leg in legs} == {200}
        await busy


@in_virtual_time
async def test_a_prompt_larger_than_the_buffer_stops_all_prefillers_for_ever() -> None:
    async with pair(sender(), receiver(3), sender()) as r:
        large = asyncio.create_task(r.prefill("large", FOX * 30))
        await asyncio.sleep(1)
        small = asyncio.create_task(r.prefill("small", number=2))
        await asyncio.sleep(60)
        assert not large.done()
        assert not small.done()
        assert r.buffer() == {"chunks": 3, "used": 3, "free": 0, "allocations_waiting": 2}


@in_virtual_time
async def test_a_partial_chunk_takes_a_whole_one() -> None:
    async with pair() as r:
        ids = list(range(10, 10 + CHUNK + 1))
        await r.handed_over("r1", ids)
        assert r.buffer()["used"] == 2
        assert (await r.decode("r1", ids)).text == await r.local_text(ids)
        assert r.buffer()["used"] == 0


@in_virtual_time
async def test_of_a_prompt_too_large_for_its_own_buffer_the_prefiller_sends_a_part() -> None:
    async with pair(sender(1), receiver()) as r:
        await r.handed_over("r1")
        assert r.buffer()["used"] == 1
        source = "vllm:prompt_tokens_by_source_total"
        assert (await r.decode("r1")).text == await r.local_text()
        assert await r.e.metric(D, source, source="external_kv_transfer") == CHUNK
        await r.handed_over("r2")
        await r.decode("r2")
        assert r.buffer()["used"] == 0, "the send buffer came free again"


@in_virtual_time
async def test_without_partial_chunks_a_short_prompt_is_neither_sent_nor_told() -> None:
    async with pair(sender(save_partial_chunks=False), receiver()) as r:
        await r.prefill("short", FOX)
        await r.handed_over("long")
        await asyncio.sleep(1)
        assert not r.heard("short")
        assert r.buffer()["used"] == 1


# Steps


@in_virtual_time
async def test_a_prompt_in_two_steps_is_told_twice_and_too_early() -> None:
    # The write of the first step (100 ms) ends after the second step (47 ms) was sent.
    async with pair(more=("--max-num-batched-tokens", "64")) as r:
        await r.prefill(AFTER)
        await r.hear(AFTER)
        assert (await r.decode(AFTER, max_tokens=1)).status == 200
        assert r.e[D].engine.wrong_kv == 1
        await asyncio.sleep(1)
        assert r.heard(AFTER) == 2


@in_virtual_time
async def test_where_ranks_are_processes_every_step_sends_everything_again() -> None:
    d = receiver(init_ports=(7300, 7301), alloc_ports=(7400, 7401))
    more = ("--tensor-parallel-size", "2", "--max-num-batched-tokens", "64")
    async with pair(sender(), d, more=more) as r:
        await r.prefill("r1", to=d)
        await asyncio.sleep(1)
        assert r.heard("r1") == 2
        assert (await r.decode("r1")).text == await r.local_text()
        assert r.buffer()["used"] == 1, "the first chunk was sent twice, to be taken twice"


@in_virtual_time
async def test_a_prefill_leg_of_several_tokens_is_told_and_stored_with_each() -> None:
    async with pair() as r:
        await r.prefill("r1", max_tokens=3)
        await asyncio.sleep(1)
        assert r.heard("r1") == 3
        await r.decode("r1")
        assert r.buffer()["used"] == 2


@pytest.mark.parametrize(
    ("leave_after", "told", "used"),
    [(0.005, 0, 0), (0.05, 0, 1), (0.15, 1, 2)],
    ids=["while queued", "in the first step", "in the last step"],
)
def test_a_step_that_a_request_was_aborted_in_is_sent_all_the_same(
    leave_after: float, told: int, used: int
) -> None:
    @in_virtual_time
    async def check() -> None:
        quick = replace(PROFILE, kv_latency=0.001)
        async with pair(more=("--max-num-batched-tokens", "64"), profile=quick) as r:
            await r.e.complete(P, "warm")
            busy = asyncio.create_task(r.e.complete(P, FOX, max_tokens=1))
            await asyncio.sleep(0)
            if leave_after > 0.01:
                await busy
            leaving = asyncio.create_task(r.prefill("r0"))
            await asyncio.sleep(leave_after)
            leaving.cancel()
            await asyncio.sleep(5)
            assert r.heard("r0") == told
            assert r.buffer()["used"] == used
            assert r.e.idle(P)

    check()


@in_virtual_time
async def test_an_aborted_decode_frees_the_chunks_once_it_was_begun() -> None:
    more = ("--max-num-seqs", "1")
    async with pair(more=more) as r:
        await r.handed_over("r1")
        busy = asyncio.create_task(r.decode(None, "something else", max_tokens=50))
        await asyncio.sleep(0.1)
        queued = asyncio.create_task(r.decode("r1"))
        await asyncio.sleep(0.1)
        queued.cancel()
        await busy
        assert r.buffer()["used"] == 2
        begun = asyncio.create_task(r.decode("r1", max_tokens=50))
        await asyncio.sleep(0.05)
        begun.cancel()
        await asyncio.sleep(0.05)
        assert r.buffer()["used"] == 0


@in_virtual_time
async def test_a_rejected_prefill_sends_and_tells_nothing() -> None:
    async with pair() as r:
        assert (await r.prefill("r1", FOX * 300)).status == 400
        await asyncio.sleep(1)
        assert not r.told
        assert r.buffer()["used"] == 0


@in_virtual_time
async def test_chunks_that_are_taken_too_early_are_written_to_when_they_are_another_requests() -> None:
    # Ten chunks a second; the first prompt has six, the second one.
    slow = replace(PROFILE, kv_bandwidth=10 * CHUNK * PROFILE.kv_bytes_per_token, kv_latency=0.0)
    async with pair(sender(), receiver(6), sender(), profile=slow) as r:
        large, small = "zebra " + FOX * 36, FOX * 5
        right = await r.local_text(small)
        await r.prefill(AFTER, large)
        other = asyncio.create_task(r.prefill("small", small, number=2))
        early = asyncio.create_task(r.decode(AFTER, large, max_tokens=1))
        await r.hear("small")
        assert not r.heard(AFTER)
        await r.hear(AFTER)
        await early
        assert (await r.decode("small", small)).text != right
        assert r.e[D].engine.wrong_kv == 2
        await other
