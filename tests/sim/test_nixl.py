"""The NIXL hand-off as a router and a client see it: parameters, text, counters, leases, what fails."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tandem.sim import EngineSpec, UsageError, parse

from .helpers import FOX, Engines, engines, flags, in_virtual_time, pair

P, D = 0, 1
PROMPT = FOX * 10  # 101 tokens: 7 blocks of 16
TOKENS = 101


async def settle(e: Engines) -> None:
    """Until notifications have arrived."""
    await asyncio.sleep(0.5)


@in_virtual_time
async def test_a_prefill_tells_where_its_blocks_are() -> None:
    async with engines(*pair()) as e:
        answer = await e.ask(
            P,
            "/v1/completions",
            {
                "model": "m",
                "prompt": PROMPT,
                "max_tokens": 1,
                "kv_transfer_params": {"do_remote_decode": True},
            },
            x_request_id="r1",
        )
        params = answer.json["kv_transfer_params"]
        assert params.pop("remote_request_id").startswith("cmpl-r1-0-")
        (blocks,) = params.pop("remote_block_ids")
        assert len(set(blocks)) == 7
        assert 0 not in blocks
        assert params == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": e[P].engine.engine_id,
            "remote_host": "127.0.0.1",
            "remote_port": params["remote_port"],
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": TOKENS,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": 0,
        }


@in_virtual_time
async def test_the_decoder_reads_the_kv_and_answers_as_one_engine_would() -> None:
    async with engines(*pair()) as e:
        params = await e.prefill(P, PROMPT)
        answer = await e.complete(D, PROMPT, kv_transfer_params=params)
        # Handshake 50 ms, transfer 100 ms, then 8 tokens; none of the prompt's hundred milliseconds.
        assert answer.seconds == pytest.approx(0.150 + 8 * 0.010, abs=1e-3)
        alone = await e.complete(P, PROMPT)
        assert answer.text == alone.text
        source = "vllm:prompt_tokens_by_source_total"
        assert await e.metric(D, source, source="external_kv_transfer") == TOKENS
        assert await e.metric(D, source, source="local_compute") == 0
        assert await e.metric(D, "vllm:external_prefix_cache_hits_total") == TOKENS
        assert (
            await e.metric(D, "vllm:nixl_bytes_transferred_sum")
            == 7 * 16 * e[D].engine.profile.kv_bytes_per_token
        )
        assert await e.metric(D, "vllm:nixl_xfer_time_seconds_count") == 1
        await settle(e)
        assert e.idle(P)
        assert e.idle(D)


@in_virtual_time
async def test_usage_on_the_decoder_tells_the_prefillers_cache() -> None:
    async with engines(*pair()) as e:
        await e.complete(P, PROMPT)
        answer = await e.complete(D, PROMPT, kv_transfer_params=await e.prefill(P, PROMPT))
        assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 96


@in_virtual_time
async def test_only_what_the_decoder_has_not_cached_is_read() -> None:
    async with engines(*pair()) as e:
        await e.complete(D, PROMPT, kv_transfer_params=await e.prefill(P, PROMPT))
        before = await e.metric(D, "vllm:nixl_bytes_transferred_sum")
        answer = await e.complete(D, PROMPT, kv_transfer_params=await e.prefill(P, PROMPT))
        block = 16 * e[D].engine.profile.kv_bytes_per_token
        assert await e.metric(D, "vllm:nixl_bytes_transferred_sum") - before == block
        assert await e.metric(D, "vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 96
        assert answer.text == (await e.complete(P, PROMPT)).text


@in_virtual_time
async def test_used_twice_with_another_prompt_the_parameters_give_a_wrong_answer() -> None:
    async with engines(*pair()) as e:
        params = await e.prefill(P, PROMPT)
        await e.complete(D, PROMPT, kv_transfer_params=params)
        other = "Zebra " + PROMPT
        wrong = await e.complete(D, other, kv_transfer_params=params)
        right = await e.complete(P, other)
        assert wrong.status == right.status == 200
        assert wrong.text != right.text
        assert e[D].engine.wrong_kv == 1
        again = await e.complete(D, other)
        assert again.text != right.text, "the wrong KV is in the decoder's cache under the right name now"


@in_virtual_time
async def test_used_twice_with_the_same_prompt_nothing_shows() -> None:
    async with engines(*pair("--no-enable-prefix-caching")) as e:
        params = await e.prefill(P, PROMPT)
        first = await e.complete(D, PROMPT, kv_transfer_params=params)
        second = await e.complete(D, PROMPT, kv_transfer_params=params)
        assert first.text == second.text
        await settle(e)
        assert await e.metric(P, "vllm:nixl_num_notifications_after_expiry_total") == 1


@in_virtual_time
async def test_a_lease_ends_and_frees_the_blocks() -> None:
    async with engines(*pair(lease=12)) as e:
        params = await e.prefill(P, PROMPT)
        await asyncio.sleep(11)
        assert e[P].engine.state()["leases"] == 1
        await asyncio.sleep(1.1)
        assert e.idle(P)
        assert await e.metric(P, "vllm:nixl_num_kv_expired_reqs_total") == 1
        # Nothing checks it: as long as nobody has reused the blocks, the text is right.
        late = await e.complete(D, PROMPT, kv_transfer_params=params)
        assert late.text == (await e.complete(P, PROMPT)).text


@in_virtual_time
async def test_after_the_lease_reused_blocks_give_a_wrong_answer() -> None:
    async with engines(*pair("--num-gpu-blocks-override", "130", lease=12)) as e:
        params = await e.prefill(P, PROMPT)
        await asyncio.sleep(13)
        await e.complete(P, [5] * 2000)
        late = await e.complete(D, PROMPT, kv_transfer_params=params)
        assert late.status == 200
        assert late.text != (await e.complete(P, PROMPT)).text


@in_virtual_time
async def test_a_decoder_that_is_busy_renews_the_lease_of_what_waits() -> None:
    async with engines(*pair("--max-num-seqs", "1", lease=12)) as e:
        busy = asyncio.create_task(e.complete(D, [1], max_tokens=2000, ignore_eos=True))
        await asyncio.sleep(0.1)
        params = await e.prefill(P, PROMPT)
        answer = await e.complete(D, PROMPT, kv_transfer_params=params)
        assert (await busy).status == answer.status == 200
        assert answer.seconds > 18
        assert await e.metric(P, "vllm:nixl_num_kv_expired_reqs_total") == 0


Change = dict[str, Any]


@pytest.mark.parametrize(
    "change",
    [{"remote_engine_id": "nobody"}, {"remote_port": 1}, {"remote_port": None}],
    ids=["another engine", "nobody listens", "no port"],
)
def test_kv_that_cannot_be_had_is_an_error_at_once_and_the_decoder_lives_on(change: Change) -> None:
    @in_virtual_time
    async def check() -> None:
        async with engines(*pair()) as e:
            params = {**await e.prefill(P, PROMPT), **change}
            answer = await e.complete(D, PROMPT, kv_transfer_params=params)
            assert answer.status == 500
            assert answer.json["error"] == {
                "message": "Internal server error",
                "type": "InternalServerError",
                "param": None,
                "code": 500,
            }
            assert answer.seconds < 1
            assert e.idle(D)
            assert (await e.complete(D)).status == 200
            assert await e.metric(D, "vllm:nixl_num_failed_transfers_total") == 1
            assert await e.metric(D, "vllm:request_success_total", finished_reason="error") == 1

    check()


@in_virtual_time
async def test_in_a_stream_the_error_is_an_event_of_a_200() -> None:
    async with engines(*pair()) as e:
        params = {**await e.prefill(P, PROMPT), "remote_engine_id": "nobody"}
        answer = await e.complete(D, PROMPT, kv_transfer_params=params, stream=True)
        assert answer.status == 200
        assert [event["error"]["code"] for event in answer.events] == [500]
        assert answer.done
        chat = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
        spoken = await e.ask(D, "/v1/chat/completions", {**chat, "kv_transfer_params": params})
        assert [next(iter(event)) for event in spoken.events] == ["id", "error"]


@in_virtual_time
async def test_told_to_recompute_a_decoder_computes_what_it_could_not_read() -> None:
    async with engines(*pair(policy="recompute")) as e:
        params = {**await e.prefill(P, PROMPT), "remote_engine_id": "nobody"}
        answer = await e.complete(D, PROMPT, kv_transfer_params=params)
        assert answer.text == (await e.complete(P, PROMPT)).text
        assert answer.seconds > 0.1


@in_virtual_time
async def test_a_dead_prefiller_is_an_error() -> None:
    async with engines(*pair()) as e:
        params = await e.prefill(P, PROMPT)
        await e[P].set_faults("crash")
        answer = await e.complete(D, PROMPT, kv_transfer_params=params)
        assert answer.status == 500
        assert e.idle(D)


@in_virtual_time
async def test_a_decoder_that_refuses_a_request_lets_the_prefiller_go() -> None:
    async with engines(*pair()) as e:
        params = await e.prefill(P, PROMPT)
        refused = await e.complete(D, PROMPT, kv_transfer_params=params, temperature=-1)
        assert refused.status == 400
        await settle(e)
        assert e.idle(P)


@pytest.mark.parametrize("after", [0.02, 0.1, 0.2], ids=["handshake", "transfer", "answer"])
def test_a_client_that_leaves_the_decode_leg_frees_both_sides(after: float) -> None:
    @in_virtual_time
    async def check() -> None:
        async with engines(*pair()) as e:
            params = await e.prefill(P, PROMPT)
            leg = asyncio.create_task(e.complete(D, PROMPT, kv_transfer_params=params, max_tokens=500))
            await asyncio.sleep(after)
            leg.cancel()
            await asyncio.gather(leg, return_exceptions=True)
            await settle(e)
            assert e.idle(P)
            assert e.idle(D)

    check()


@in_virtual_time
async def test_a_client_that_leaves_while_its_decode_leg_waits_frees_the_prefiller() -> None:
    async with engines(*pair("--max-num-seqs", "1")) as e:
        busy = asyncio.create_task(e.complete(D, [1], max_tokens=500, ignore_eos=True))
        params = await e.prefill(P, PROMPT)
        leg = asyncio.create_task(e.complete(D, PROMPT, kv_transfer_params=params))
        await asyncio.sleep(1)
        leg.cancel()
        await settle(e)
        assert e.idle(P)
        await busy
        assert e.idle(D)


@in_virtual_time
async def test_an_aborted_prefill_leaves_no_lease() -> None:
    async with engines(*pair()) as e:
        leg = asyncio.create_task(e.prefill(P, [3] * 1500))
        await asyncio.sleep(0.5)
        leg.cancel()
        await settle(e)
        assert e.idle(P)


@in_virtual_time
async def test_parameters_that_lack_an_address_hang_and_those_without_blocks_kill() -> None:
    """What vLLM 0.32 was seen to do with them."""
    async with engines(*pair()) as e:
        params = await e.prefill(P, PROMPT)
        lacking = {k: v for k, v in params.items() if k != "remote_host"}
        leg = asyncio.create_task(e.complete(D, PROMPT, kv_transfer_params=lacking))
        await asyncio.sleep(300)
        assert not leg.done()
        assert (await e.complete(D)).status == 200
        leg.cancel()
        await settle(e)
        assert e.idle(D)
        dead = await e.complete(D, PROMPT, kv_transfer_params={"do_remote_prefill": True})
        assert dead.status == 500
        assert "EngineCore encountered an issue" in dead.json["error"]["message"]
        await settle(e)
        assert "cannot connect" in (await e.ask(D, "/health")).broken


@in_virtual_time
async def test_no_parameters_come_with_an_answer_that_was_streamed_or_asked_for_none() -> None:
    async with engines(*pair()) as e:
        assert (await e.complete(P)).json["kv_transfer_params"] is None
        streamed = await e.complete(
            P, max_tokens=1, stream=True, kv_transfer_params={"do_remote_decode": True}
        )
        assert all("kv_transfer_params" not in event for event in streamed.events)


@in_virtual_time
async def test_an_engine_without_a_hand_off_ignores_parameters() -> None:
    async with engines(flags(), pair()[0]) as e:
        params = await e.prefill(1, PROMPT)
        answer = await e.complete(0, PROMPT, kv_transfer_params=params)
        assert answer.text == (await e.complete(1, PROMPT)).text
        assert await e.metric(0, "vllm:prompt_tokens_by_source_total", source="local_compute") == TOKENS


async def test_engines_of_two_processes_reach_each_other_over_their_side_channels() -> None:
    """Two fleets that know nothing of each other, so over TCP; in real time."""
    quick = {"time_scale": 20.0}
    prefill, decode = (EngineSpec(parse(f), side_channel=("127.0.0.1", 0)) for f in pair(lease=60))
    async with engines(prefill, **quick) as one, engines(decode, **quick) as other:
        params = await one.prefill(0, PROMPT)
        assert params["remote_port"] > 0
        answer = await other.complete(0, PROMPT, kv_transfer_params=params)
        assert answer.text == (await one.complete(0, PROMPT)).text
        assert (
            await other.metric(0, "vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
            == TOKENS
        )
        while not one.idle(0):
            await asyncio.sleep(0.01)
        wrong = await other.complete(0, "Zebra " + PROMPT, kv_transfer_params=params)
        assert wrong.text != (await one.complete(0, "Zebra " + PROMPT)).text
        stranger = {**params, "remote_engine_id": "nobody"}
        assert (await other.complete(0, "x " + PROMPT, kv_transfer_params=stranger)).status == 500


def test_the_lease_is_a_number_of_seconds() -> None:
    async def start() -> None:
        config = {"kv_connector": "NixlConnector", "kv_connector_extra_config": {"kv_lease_duration": "long"}}
        async with engines(["--kv-transfer-config", json.dumps(config)]):
            pass

    with pytest.raises(UsageError, match="kv_lease_duration"):
        asyncio.run(start())


def test_a_connector_that_is_not_simulated_is_named() -> None:
    async def start() -> None:
        async with engines(["--kv-transfer-config", '{"kv_connector":"MooncakeConnector"}']):
            pass

    with pytest.raises(UsageError, match="MooncakeConnector is not simulated"):
        asyncio.run(start())
