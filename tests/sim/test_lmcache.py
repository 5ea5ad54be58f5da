"""The LMCache PD hand-off as a router and a client see it: notifications, text, keys, the buffer."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from tandem.sim import EngineSpec, parse
from tandem.sim.handoff import Network

from .helpers import FOX, engines, in_virtual_time
from .lmcache_pair import AFTER, CHUNK, PROMPT, TOKENS, D, P, Router, command, pair, receiver, sender

# The way through


@in_virtual_time
async def test_the_decoder_takes_what_the_prefiller_wrote_and_answers_as_one_engine_would() -> None:
    async with pair() as r:
        before = await r.local_text()
        answer = await r.prefill("r1")
        assert answer.status == 200
        assert answer.json["kv_transfer_params"] is None
        await r.hear("r1")
        assert [(url, req_id) for _, url, req_id in r.told] == [("tcp://127.0.0.1:7500", "r1")]
        assert r.buffer() == {"chunks": 100, "used": 2, "free": 98, "allocations_waiting": 0}
        source = "vllm:prompt_tokens_by_source_total"
        local = await r.e.metric(D, source, source="local_compute")
        decoded = await r.decode("r1")
        # None of the prompt's hundred milliseconds.
        assert decoded.seconds == pytest.approx(8 * 0.010, abs=1e-3)
        assert decoded.text == before
        # The last token is computed for the answer's first one.
        assert await r.e.metric(D, source, source="external_kv_transfer") == TOKENS - 1
        assert await r.e.metric(D, source, source="local_compute") == local + 1
        assert await r.e.metric(D, "vllm:external_prefix_cache_hits_total") == TOKENS - 1
        assert r.buffer()["used"] == 0
        assert r.e.idle(P)
        assert r.e.idle(D)
        assert "vllm:nixl" not in (await r.e.ask(D, "/metrics")).body.decode()


@in_virtual_time
async def test_the_notification_comes_before_or_after_the_answer_as_the_id_decides() -> None:
    async def orders() -> list[bool]:
        async with pair() as r:
            found = []
            for i in range(12):
                await r.prefill(f"r{i}")
                found.append(bool(r.heard(f"r{i}")))
                await r.hear(f"r{i}")
                assert r.heard(f"r{i}") == 1
            return found

    first = await orders()
    assert {True, False} == set(first)
    assert (first[0], first[1]) == (False, True), "what AFTER and BEFORE are"
    assert await orders() == first


@in_virtual_time
async def test_the_engine_does_not_wait_for_the_write() -> None:
    async with pair() as r:
        answer = await r.prefill(AFTER)
        # A step, 101 prompt tokens and the handshake, but not the transfer's 100 ms.
        assert answer.seconds == pytest.approx(0.010 + 0.101 + 0.050, abs=1e-3)
        await r.hear(AFTER)
        assert r.told[0][0] - r.e.now() == pytest.approx(0, abs=0.002)
        assert r.e.now() == pytest.approx(answer.seconds + 0.100, abs=0.005)


@in_virtual_time
async def test_a_request_without_a_disagg_spec_is_a_plain_one() -> None:
    async with pair() as r:
        answer = await r.e.complete(P, PROMPT)
        assert answer.status == 200
        assert answer.text == await r.local_text()
        await asyncio.sleep(1)
        assert not r.told
        assert r.buffer()["used"] == 0


@pytest.mark.parametrize("chunk_size", [24, 100, 1024])
def test_chunks_and_blocks_need_not_fit(chunk_size: int) -> None:
    @in_virtual_time
    async def check() -> None:
        sizes = {"chunk_size": chunk_size}
        d = receiver(**sizes)
        more = ("--max-num-batched-tokens", "128")  # so that a block may belong to two steps' chunks
        async with pair(sender(**sizes), d, more=more) as r:
            prompt = PROMPT * 2
            await r.prefill("a", prompt, to=d)
            await asyncio.sleep(1)
            decoded = await r.decode("a", prompt)
            assert decoded.text == await r.local_text(prompt)
            assert r.e[D].engine.wrong_kv == 0
            assert r.buffer()["used"] == 0

    check()


@in_virtual_time
async def test_chat_and_streams_are_decoded_alike() -> None:
    async with pair() as r:
        body = {"model": "m", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 6}
        alone = await r.e.ask(D, "/v1/chat/completions", body)
        kv = {"lmcache.tag.req": "c", "disagg_spec": receiver().disagg_spec("c")}
        await r.e.ask(P, "/v1/chat/completions", {**body, "max_tokens": 1, "kv_transfer_params": kv})
        await r.hear("c")
        del kv["disagg_spec"]
        answer = await r.e.ask(D, "/v1/chat/completions", {**body, "stream": True, "kv_transfer_params": kv})
        assert answer.text == alone.text
        assert r.buffer()["used"] == 0


@in_virtual_time
async def test_each_rank_of_a_prefiller_notifies() -> None:
    d = receiver(init_ports=(7300, 7301), alloc_ports=(7400, 7401))
    async with pair(sender(), d, more=("--tensor-parallel-size", "2")) as r:
        await r.handed_over("r1", to=d)
        assert r.heard("r1") == 2
        assert (await r.decode("r1")).text == await r.local_text()
        # Each rank has a buffer of its own, where a chunk takes half the room.
        assert r.buffer()["chunks"] == 200


@in_virtual_time
async def test_the_first_token_is_told_on_demand() -> None:
    async with pair() as r:
        answer = await r.prefill("r1", kv={"ret_first_tok": True})
        (first,) = answer.json["kv_transfer_params"].values()
        whole = await r.e.complete(D, PROMPT, return_token_ids=True)
        assert answer.json["kv_transfer_params"] == {"first_tok": first}
        assert whole.json["choices"][0]["token_ids"][0] == first


def test_the_log_has_the_lines_that_people_grep_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tandem.sim")

    @in_virtual_time
    async def run() -> None:
        async with pair() as r:
            await r.handed_over("r1")
            await r.decode("r1")

    run()
    assert "'pd_role': 'sender'" in caplog.text
    assert "'pd_role': 'receiver'" in caplog.text
    assert f"Stored {TOKENS} out of total {TOKENS} tokens" in caplog.text
    assert (
        f"Retrieved {TOKENS} out of {TOKENS} required tokens (from {TOKENS} total tokens). size: "
        in caplog.text
    )
    assert "throughput: " in caplog.text


# Keys


@in_virtual_time
async def test_a_decode_before_the_write_is_answered_from_garbage() -> None:
    async with pair() as r:
        right = await r.local_text()
        await r.prefill(AFTER)
        assert not r.told
        wrong = await r.decode(AFTER)
        assert wrong.status == 200
        assert wrong.text != right
        assert r.e[D].engine.wrong_kv == 1
        assert r.buffer()["used"] == 0, "it took the chunks"


@in_virtual_time
async def test_garbage_is_what_the_chunks_held_before() -> None:
    async with pair(sender(), receiver(2)) as r:
        await r.handed_over("a", FOX * 12)
        await r.decode("a", FOX * 12)
        await r.prefill(AFTER)
        after_another = (await r.decode(AFTER)).text
    async with pair(sender(), receiver(2)) as r:
        await r.prefill(AFTER)
        assert (await r.decode(AFTER)).text != after_another


@in_virtual_time
async def test_without_the_tag_the_decoder_computes_and_the_chunks_stay() -> None:
    async with pair() as r:
        await r.handed_over("r1")
        untagged = await r.decode(None)
        assert untagged.seconds > 0.1
        other = await r.decode("r2")
        assert untagged.text == other.text == await r.local_text()
        assert r.buffer()["used"] == 2
        await asyncio.sleep(100_000)
        assert r.buffer()["used"] == 2
        await r.decode("r1", max_tokens=1)
        assert r.buffer()["used"] == 0


@in_virtual_time
async def test_another_prompt_finds_the_chunks_of_the_part_that_is_the_same() -> None:
    async with pair() as r:
        await r.handed_over("r1")
        prompt = FOX * 9 + "zebra"
        longer = await r.decode("r1", prompt)
        assert longer.text == await r.local_text(prompt)
        source = "vllm:prompt_tokens_by_source_total"
        assert await r.e.metric(D, source, source="external_kv_transfer") == CHUNK
        assert r.buffer()["used"] == 1, "the rest stays"


@pytest.mark.parametrize("skip", [0, 1])
def test_a_prompt_with_the_first_token_at_its_end_needs_skip_last_n_tokens(skip: int) -> None:
    @in_virtual_time
    async def check() -> None:
        d = receiver(skip_last_tokens=skip)
        async with pair(sender(), d) as r:
            ids = (await r.e.ask(D, "/tokenize", {"prompt": PROMPT})).json["tokens"]
            await r.handed_over("r1", ids, to=d)
            await r.decode("r1", [*ids, ids[5]])
            assert r.buffer()["used"] == 1 - skip, "the last chunk has another key"
            assert r.e[D].engine.wrong_kv == 0

    check()


@pytest.mark.parametrize(
    "seeds", [({"PYTHONHASHSEED": "0"}, {"PYTHONHASHSEED": "1"}), ({}, {})], ids=["different", "unset"]
)
def test_with_different_hash_seeds_nothing_is_found_and_everything_stays(seeds: Any) -> None:
    @in_virtual_time
    async def check() -> None:
        told: list[str] = []
        network = Network(notify=lambda url, message: told.append(msgspec.msgpack.decode(message)["req_id"]))
        specs = [
            EngineSpec(parse(command(s)), environment=seed)
            for s, seed in zip((sender(), receiver()), seeds, strict=True)
        ]
        async with engines(*specs, network=network) as e:
            r = Router(e, [])
            for i in range(2):
                await r.prefill(f"r{i}")
                await asyncio.sleep(1)
                assert (await r.decode(f"r{i}")).text == await r.local_text()
            assert told == ["r0", "r1"]
            assert r.buffer()["used"] == 4

    check()


@in_virtual_time
async def test_with_different_chunk_sizes_the_write_fails() -> None:
    # 32-token chunks of the sender's buffer do not fit 64-token ones.
    async with pair(sender(chunk_size=32), receiver()) as r:
        await r.prefill("long")
        short = "one two three"
        await r.prefill("short", short)
        await asyncio.sleep(5)
        assert not r.told
        assert (await r.decode("long")).text == await r.local_text(), "other keys: never a hit"
        assert (await r.decode("short", short)).text != await r.local_text(short), "the same key, no data"


@in_virtual_time
async def test_a_tag_that_is_no_text_never_hits() -> None:
    async with pair() as r:
        await r.handed_over("r1", kv={"lmcache.tag.req": 7})
        kv = {"lmcache.tag.req": 7}
        assert (await r.e.complete(D, PROMPT, kv_transfer_params=kv)).text == await r.local_text()
        assert r.buffer()["used"] == 2
        await r.decode("7")
        assert r.buffer()["used"] == 0


@in_virtual_time
async def test_a_tag_with_an_at_sign_ends_all_allocation_at_the_receiver() -> None:
    async with pair(sender(), receiver(), sender()) as r:
        bad = asyncio.create_task(r.prefill("r1", kv={"lmcache.tag.req": "a@b"}))
        await asyncio.sleep(1)
        other = asyncio.create_task(r.prefill("r2", number=2))
        await asyncio.sleep(60)
        assert not bad.done()
        assert not other.done()
        assert (await r.e.ask(P, "/health")).status == 200


# One key twice


@in_virtual_time
async def test_a_retry_under_the_same_tag_after_a_failed_write_is_notified_without_data() -> None:
    async with pair() as r:
        failed = await r.prefill("r1", fault="lost-kv")
        assert failed.status == 200
        await asyncio.sleep(5)
        assert not r.told, "a failed write is not told"
        assert r.buffer()["used"] == 2
        await r.handed_over("r1")
        assert (await r.decode("r1")).text != await r.local_text()
        assert r.buffer()["used"] == 2, "sent twice, a chunk is to be taken twice"
        await r.decode("r1")
        assert r.buffer()["used"] == 0


@in_virtual_time
async def test_chunks_that_were_never_written_are_freed_by_a_decode_like_others() -> None:
    async with pair() as r:
        await r.prefill("r1", fault="lost-kv")
        await asyncio.sleep(1)
        assert (await r.decode("r1", max_tokens=1)).status == 200
        assert r.buffer()["used"] == 0
        await r.handed_over("r2")
        assert (await r.decode("r2")).text == await r.local_text()


@pytest.mark.parametrize("at_once", [True, False])
def test_two_decodes_of_one_key_in_one_step_kill_the_decoder(at_once: bool) -> None:
    @in_virtual_time
    async def check() -> None:
        async with pair() as r:
            await r.handed_over("r1")
            if at_once:
                answer = await r.decode("r1", n=2, temperature=1)
                assert answer.status == 500
                assert r.e[D].engine.dead
            else:
                texts = {(await r.decode("r1")).text for _ in range(2)}
                assert texts == {await r.local_text()}

    check()


@in_virtual_time
async def test_with_the_decoders_prefix_cache_on_a_prefix_it_has_is_never_freed() -> None:
    async with pair(more=("--enable-prefix-caching",)) as r:
        for i in range(3):
            await r.handed_over(f"r{i}")
            decoded = await r.decode(f"r{i}")
        assert decoded.text == await r.local_text()
        # Of 101 tokens, the decoder has 96 in its own cache: more than the first chunk.
        assert r.buffer()["used"] == 2
