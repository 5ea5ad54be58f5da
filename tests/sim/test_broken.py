"""Faults as a client meets them, whole and streamed, by header and by engine; and nothing is left behind."""

from __future__ import annotations

import asyncio
import json

import pytest

from .helpers import FOX, Answer, Engines, engines, flags, in_virtual_time, pair

CONNECTION = ("UpstreamClosed", "ProtocolError", "ConnectFailed")


async def met(e: Engines, fault: str, *, stream: bool) -> Answer:
    answer = await e.complete(0, fault=fault, stream=stream)
    await asyncio.sleep(0.1)
    assert e.idle(0), f"{fault} left something"
    assert (await e.complete(0)).status == 200, "only that request was broken"
    return answer


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("kind", ["reset", "crash"])
@pytest.mark.parametrize("place", ["", "@0", "@3"])
def test_a_connection_breaks(kind: str, place: str, stream: bool) -> None:
    @in_virtual_time
    async def check() -> None:
        async with engines(flags()) as e:
            answer = await met(e, kind + place, stream=stream)
            assert answer.broken.startswith(CONNECTION)
            assert answer.status == (200 if place else 0)
            assert not answer.done
            if stream and place == "@3" and kind == "crash":
                assert answer.body.count(b"data: ") == 3

    check()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_engine_answers_with_an_error_before_and_after_the_head(stream: bool) -> None:
    @in_virtual_time
    async def check() -> None:
        async with engines(flags()) as e:
            answer = await met(e, "status=503", stream=stream)
            assert (answer.status, answer.json["error"]["code"], answer.broken) == (503, 500, "")
            answer = await met(e, "head=500", stream=stream)
            assert (answer.status, answer.body) == (500, b"")
            assert answer.broken.startswith(CONNECTION)

    check()


@in_virtual_time
async def test_an_error_event_comes_in_a_stream_that_looks_whole() -> None:
    async with engines(flags()) as e:
        answer = await met(e, "error@2", stream=True)
        assert (answer.status, answer.broken, answer.done) == (200, "", True)
        assert ["error" in event for event in answer.events] == [False, False, True]
        whole = await met(e, "error", stream=False)
        assert (whole.status, whole.json["error"]["code"]) == (200, 500)


@in_virtual_time
async def test_a_chunk_is_cut_in_two() -> None:
    async with engines(flags()) as e:
        answer = await met(e, "truncate@2", stream=True)
        assert answer.broken.startswith(CONNECTION)
        assert answer.body.count(b"\n\n") == 2
        assert not answer.body.endswith(b"\n\n")


@in_virtual_time
async def test_json_is_broken() -> None:
    async with engines(flags()) as e:
        answer = await met(e, "badjson@2", stream=True)
        lines = [x.removeprefix(b"data: ") for x in answer.body.split(b"\n\n") if x]
        with pytest.raises(ValueError, match=r".+"):
            json.loads(lines[2])
        assert answer.done
        whole = await met(e, "badjson", stream=False)
        with pytest.raises(ValueError, match=r".+"):
            json.loads(whole.body)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("place", ["", "@2"])
def test_an_engine_waits(place: str, stream: bool) -> None:
    @in_virtual_time
    async def check() -> None:
        async with engines(flags()) as e:
            plain = await e.complete(0, stream=stream)
            late = await e.complete(0, fault=f"delay=7{place}", stream=stream)
            assert late.text == plain.text
            assert 6.9 < late.seconds < 7.2
            assert not late.broken
            assert e.idle(0)

    check()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("place", ["", "@2"])
def test_an_engine_says_nothing_more(place: str, stream: bool) -> None:
    @in_virtual_time
    async def check() -> None:
        async with engines(flags()) as e:
            leg = asyncio.create_task(e.complete(0, fault=f"hang{place}", stream=stream))
            await asyncio.sleep(1000)
            assert not leg.done()
            leg.cancel()
            await asyncio.gather(leg, return_exceptions=True)
            await asyncio.sleep(0.1)
            assert e.idle(0)

    check()


@in_virtual_time
async def test_a_whole_engine_refuses_hangs_and_recovers_over_its_endpoint() -> None:
    async with engines(flags()) as e:
        set_to = await e.ask(0, "/sim/faults", b"hang,leg=alone", content_type="text/plain")
        assert set_to.status == 200
        assert (await e.ask(0, "/sim/faults")).json == {"faults": ["hang,leg=alone"]}
        leg = asyncio.create_task(e.complete(0))
        await asyncio.sleep(60)
        assert not leg.done()
        leg.cancel()
        await e.ask(0, "/sim/faults", method="DELETE")
        assert (await e.complete(0)).status == 200
        await e[0].set_faults("refuse")
        assert (await e.complete(0)).broken.startswith(CONNECTION)
        assert "cannot connect" in (await e.complete(0)).broken
        await e[0].set_faults("")
        assert (await e.complete(0)).status == 200
        bad = await e.ask(0, "/sim/faults", b"explode", content_type="text/plain")
        assert bad.status == 400
        assert "no kind of fault" in bad.json["error"]["message"]


@in_virtual_time
async def test_an_engine_that_hangs_does_not_answer_probes_either() -> None:
    async with engines(flags()) as e:
        await e[0].set_faults("hang")
        probe = asyncio.create_task(e.ask(0, "/health"))
        await asyncio.sleep(60)
        assert not probe.done()
        probe.cancel()


@in_virtual_time
async def test_an_engine_that_crashes_takes_its_requests_along() -> None:
    async with engines(flags()) as e:
        stream = asyncio.create_task(e.complete(0, stream=True, max_tokens=500, ignore_eos=True))
        await asyncio.sleep(0.1)
        await e[0].set_faults("crash")
        answer = await stream
        assert answer.broken or any("error" in event for event in answer.events)
        assert "cannot connect" in (await e.complete(0)).broken
        assert not e[0].engine.requests


@in_virtual_time
async def test_hand_off_faults() -> None:
    async with engines(*pair(lease=12)) as e:
        right = (await e.complete(0)).text

        async def decode(params: object, fault: str = "") -> Answer:
            return await e.complete(1, kv_transfer_params=params, fault=fault, cache_salt=str(e.now()))

        assert await e.prefill(0, fault="no-kv-params") is None
        assert (await decode(await e.prefill(0, fault="lost-kv"))).status == 500
        assert (await decode(await e.prefill(0), fault="lost-kv")).status == 500
        stale = await decode(await e.prefill(0, fault="stale-kv", cache_salt="x"))
        assert (stale.status, stale.text == right) == (200, False)
        await e.prefill(0, fault="expired-lease")
        await asyncio.sleep(0.1)
        assert await e.metric(0, "vllm:nixl_num_kv_expired_reqs_total") == 1
        await asyncio.sleep(13)
        assert e.idle(0)
        assert e.idle(1)


@in_virtual_time
async def test_with_a_full_buffer_hand_offs_wait_and_go_on_when_there_is_room() -> None:
    async with engines(*pair(lease=12)) as e:
        await e[1].set_faults("full-buffer")
        leg = asyncio.create_task(e.complete(1, kv_transfer_params=await e.prefill(0)))
        await asyncio.sleep(60)
        assert not leg.done()
        await e[1].set_faults("")
        assert (await leg).status == 200
        assert e.idle(0)


@in_virtual_time
async def test_faults_by_rate_strike_that_part_of_the_requests() -> None:
    async with engines(flags()) as e:
        await e[0].set_faults("status=500,rate=0.5")
        answers = [await e.complete(0, [i + 5], max_tokens=1) for i in range(40)]
        failed = sum(answer.status == 500 for answer in answers)
        assert 8 < failed < 32


@in_virtual_time
async def test_a_header_that_is_not_in_the_grammar_is_refused() -> None:
    async with engines(flags()) as e:
        answer = await e.complete(0, fault="explode")
        assert answer.status == 400
        assert "x-sim-fault: 'explode'" in answer.json["error"]["message"]
        assert (await e.complete(0, fault="slow=2")).status == 400
        assert (await e.complete(0, FOX)).status == 200
