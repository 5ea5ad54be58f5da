"""kvaware on a running router before simulated engines: what it expects to be cached is what the engine then
finds, and nothing that an engine publishes breaks it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from .helpers import MODEL, engines, flags, pair
from .kvaware_router import QUICK, Start, ids, publishing, spec, starting, until

WORDS = ["river", "letter", "silver", "stone", "winter", "seven", "names", "under", "keeps", "every"]


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Start:
    """See `starting`."""
    return starting(monkeypatch)


# Who holds what


async def test_what_is_expected_is_what_the_engine_finds(tmp_path: Path, router: Start) -> None:
    """Growing chats of two salts and none, more than three caches hold."""
    rng = random.Random(2)
    lines = [publishing(tmp_path, i, blocks=130) for i in range(3)]
    async with engines(*lines, **QUICK) as sims, router(sims) as r:
        chats: list[list[dict[str, str]]] = [[] for _ in range(12)]
        hits = evictions = 0
        for turn in range(60):
            which = rng.randrange(len(chats))
            chat = chats[which]
            question = " ".join([f"chat {which} turn {turn}", *rng.choices(WORDS, k=rng.randrange(50, 200))])
            chat.append({"role": "user", "content": question})
            body = {"model": MODEL, "messages": chat, "temperature": 0, "max_tokens": 24}
            if salt := ("", "pepper", "thyme")[which % 3]:
                body["cache_salt"] = salt
            await r.caught_up()
            answer = await r.post("/v1/chat/completions", body)
            assert answer.expected == answer.cached, turn
            assert "fallback" not in answer.why
            hits += answer.cached > 0
            evictions += len(chat) > 1 and answer.cached == 0
            chat.append({"role": "assistant", "content": answer.text})
            if answer.json["usage"]["total_tokens"] > 1500:
                chats[which] = []
        assert hits >= 20
        assert evictions > 0
        told = await r.metrics()
        assert not [name for name in told if "fallbacks" in name or "dropped" in name]


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_the_next_turn_goes_to_the_engine_that_holds_the_chat(
    tmp_path: Path, router: Start, transport: str
) -> None:
    lines = [publishing(tmp_path, i, tcp=transport == "tcp") for i in range(3)]
    async with engines(*lines, **QUICK) as sims, router(sims) as r:
        first = [await r.agreed(ids(seed, 300)) for seed in range(6)]
        assert len({a.engine for a in first}) == 3, "chats that share nothing are spread"
        for seed, before in enumerate(first):
            again = await r.agreed(ids(seed, 300) + ids(40, 50))
            assert (again.engine, again.cached) == (before.engine, 288)
            assert (await r.chosen(ids(seed, 300)))["url"] == before.engine


async def test_salts_and_adapters_are_kept_apart(tmp_path: Path, router: Start) -> None:
    line = publishing(tmp_path, 0, "--enable-lora", "--lora-modules", "adapter=/nowhere", "other=/nowhere")
    apart: list[dict[str, str]] = [
        {},
        {"cache_salt": "pepper"},
        {"cache_salt": "thyme"},
        {"model": "adapter"},
        {"model": "other"},
        {"model": "adapter", "cache_salt": "pepper"},
        {"model": "adapter", "cache_salt": "adapter"},
    ]
    async with engines(line, **QUICK) as sims, router(sims) as r:
        for which in apart:
            assert (await r.agreed(ids(1, 100), **which)).cached == 0
        for which in apart:
            assert (await r.agreed(ids(1, 100), **which)).cached == 96


async def test_a_prompt_that_is_held_whole_is_computed_but_for_its_last_block(
    tmp_path: Path, router: Start
) -> None:
    async with engines(publishing(tmp_path, 0), **QUICK) as sims, router(sims) as r:
        await r.agreed(ids(1, 64))
        for length, hit in ((64, 48), (65, 64), (63, 48), (17, 16), (16, 0), (1, 0)):
            assert (await r.agreed(ids(1, length))).cached == hit


async def test_a_cache_that_was_reset_holds_nothing(tmp_path: Path, router: Start) -> None:
    async with engines(publishing(tmp_path, 0), **QUICK) as sims, router(sims) as r:
        await r.agreed(ids(1, 100))
        assert (await r.agreed(ids(1, 100))).cached == 96
        sims[0].engine.pool.clear()
        sims[0].engine.kick()
        await until(lambda: not sims[0].engine.pool.events)
        await r.caught_up()
        (told,) = (await r.engines()).values()
        assert told["kvIndex"] == [{"rank": 0, "blocks": 0, "coverage": 1.0, "sinceStart": True}]
        assert (await r.agreed(ids(1, 100))).cached == 0
        assert (await r.agreed(ids(1, 100))).cached == 96


# What goes wrong


async def test_engines_without_events_are_known_by_what_was_sent(
    tmp_path: Path, router: Start, caplog: pytest.LogCaptureFixture
) -> None:
    async with engines(flags(), flags(), **QUICK) as sims, router(specs=tuple(sims.fleet.urls)) as r:
        first = await r.complete(ids(1, 200))
        assert first.why == "load: no cached prefix (fallback: not_followed)"
        again = await r.complete(ids(1, 200))
        assert (again.engine, again.expected, again.cached) == (first.engine, 192, 192)
        assert again.why == "cached prefix and load (fallback: not_followed)"
        assert await r.metrics() == {
            "tandem_kv_index_blocks": 0,
            **{
                f'tandem_kv_events_total{{kind="{kind}"}}': 0
                for kind in ("batch", "unread", "replayed", "gap", "lost", "restart")
            },
            'tandem_kvaware_fallbacks_total{reason="not_followed"}': 2,
        }
        assert len([m for m in caplog.messages if "without --kv-events" in m]) == 1
        assert len([m for m in caplog.messages if "falls back (not_followed)" in m]) == 1
        for told in (await r.engines()).values():
            assert (told["kvEvents"], told["kvIndex"]) == (None, [])


async def test_an_endpoint_where_nobody_publishes_is_no_error(tmp_path: Path, router: Start) -> None:
    async with engines(flags(), **QUICK) as sims:
        text = f"{sims[0].url},kv-events=ipc://{tmp_path}/none,kv-replay=ipc://{tmp_path}/neither"
        async with router(specs=(text,)) as r:
            await r.complete(ids(1, 100))
            answer = await r.complete(ids(1, 100))
            assert (answer.expected, answer.cached) == (64, 96), "by spans, as prefixaware"
            assert answer.why.endswith("(fallback: not_followed)")


async def test_an_endpoint_that_cannot_be_connected_to_is_told(
    router: Start, caplog: pytest.LogCaptureFixture
) -> None:
    async with engines(flags(), flags(), **QUICK) as sims:
        bad = ("kv-events=tcp://no such host:1", "kv-events=tcp://127.0.0.1:1,kv-replay=tcp://no such host:2")
        specs = tuple(f"{url},{endpoints}" for url, endpoints in zip(sims.fleet.urls, bad, strict=True))
        async with router(specs=specs) as r:
            await r.complete(ids(1, 100))
            for url in sims.fleet.urls:
                assert f"KV events of {url} cannot be followed" in caplog.text
            assert r.knowledge.subscriber.idle


async def test_what_cannot_be_read_changes_nothing(
    tmp_path: Path, router: Start, caplog: pytest.LogCaptureFixture
) -> None:
    stored = {
        "type": "BlockStored",
        "block_hashes": [1, 2],
        "parent_block_hash": None,
        "token_ids": list(range(32)),
        "block_size": 16,
    }
    unread = [
        {"type": "BlockSplit"},
        {**stored, "block_size": 0},
        {**stored, "block_size": -16},
        {**stored, "block_size": 1 << 40, "token_ids": []},
        {**stored, "block_hashes": "many"},
        {**stored, "group_idx": 1 << 40},
        {"type": "BlockRemoved"},
        5,
    ]
    unplaced = [
        {**stored, "token_ids": list(range(31))},
        {**stored, "extra_keys": [None]},
        {**stored, "parent_block_hash": 77},
    ]
    async with engines(publishing(tmp_path, 0), **QUICK) as sims, router(sims) as r:
        await r.agreed(ids(1, 100))
        publisher = sims[0].engine.publisher
        assert publisher is not None
        for event in unread + unplaced:
            publisher.publish(1.0, [_Given(event)])  # type: ignore[list-item]
        for frames in ([b"", b"short", b""], [b""], [b"", (5).to_bytes(9), b""]):
            publisher._publish.send_multipart(frames)
        publisher._sequence += 2
        publisher._publish.send_multipart([b"", (publisher._sequence - 2).to_bytes(8), b"\xc1"])
        publisher._publish.send_multipart([b"", (publisher._sequence - 1).to_bytes(8), b"\x91" * 100_000])
        assert (await r.agreed(ids(1, 100))).cached == 96
        assert (await r.agreed(ids(2, 100))).cached == 0
        assert (await r.agreed(ids(2, 100))).cached == 96
        told = await r.metrics()
        assert told['tandem_kv_events_total{kind="unread"}'] == len(unread) + 5
        assert told['tandem_kv_blocks_dropped_total{reason="unaligned"}'] == 4
        assert told['tandem_kv_blocks_dropped_total{reason="orphan"}'] == 2
        assert len([m for m in caplog.messages if "cannot be read" in m]) == 1


@dataclass
class _Given:
    event: Any

    def as_event(self) -> Any:
        return self.event


async def test_where_much_cannot_be_placed_what_was_sent_counts_too(tmp_path: Path, router: Start) -> None:
    async with engines(publishing(tmp_path, 0), **QUICK) as sims, router(sims) as r:
        await r.agreed(ids(1, 160))
        publisher = sims[0].engine.publisher
        assert publisher is not None
        lost = {"type": "BlockStored", "block_hashes": [5], "parent_block_hash": 6, "token_ids": [1] * 16}
        publisher.publish(1.0, [_Given({**lost, "block_size": 16})] * 10)  # type: ignore[list-item]
        await r.caught_up()
        answer = await r.complete(ids(1, 160))
        assert answer.why.endswith("(fallback: uncovered)")
        assert answer.expected == answer.cached == 144
        told = await r.metrics()
        assert told[f'tandem_kv_index_coverage{{engine="{sims[0].url}",rank="0"}}'] == 0.5


# Metrics


async def test_the_metrics_tell_what_the_index_holds(tmp_path: Path, router: Start) -> None:
    lines = [publishing(tmp_path, i) for i in range(2)]
    async with engines(*lines, **QUICK) as sims, router(sims) as r:
        for seed in range(4):
            await r.agreed(ids(seed, 100))
        await r.caught_up()
        told = await r.metrics()
        held = [sum(map(len, e.engine.pool._cached.values())) for e in sims.fleet.engines]
        assert told["tandem_kv_index_blocks"] == sum(held)
        for url in sims.fleet.urls:
            assert told[f'tandem_kv_index_coverage{{engine="{url}",rank="0"}}'] == 1
        by_url = {e.url: blocks for e, blocks in zip(sims.fleet.engines, held, strict=True)}
        listed = await r.engines()
        assert {url: e["kvIndex"][0]["blocks"] for url, e in listed.items()} == by_url
        assert told['tandem_kv_events_total{kind="batch"}'] == sum(
            e.engine.publisher._sequence for e in sims.fleet.engines if e.engine.publisher is not None
        )


# Prefill and decode


async def test_a_decoder_that_holds_the_chat_takes_the_next_turn_alone(tmp_path: Path, router: Start) -> None:
    prefill, decode = pair()
    lines = [
        publishing(tmp_path, 0, base=prefill),
        publishing(tmp_path, 1, base=decode),
        publishing(tmp_path, 2, base=decode),
    ]
    async with engines(*lines, **QUICK) as sims:
        options: dict[str, Any] = {
            "specs": (),
            "wait": 3,
            "prefill": (spec(sims, 0),),
            "decode": (spec(sims, 1), spec(sims, 2)),
            "routing_threshold": 100,
            "uncached_threshold": True,
        }
        async with router(**options) as r:
            r.sims.append(sims)
            await until(lambda: not r.app.fleet.unproved)
            first = await r.agreed(ids(1, 300))
            assert first.explained["path"] == "disaggregated"
            assert first.explained["prefill-expected-hit"] == "0"
            await r.caught_up()
            again = await r.complete(ids(1, 300) + ids(7, 40))
            assert (again.explained["path"], again.explained["reason"]) == ("decode_only", "cached")
            assert (again.explained["prompt-tokens"], again.explained["effective-tokens"]) == ("340", "52")
            assert (again.engine, again.expected, again.cached) == (first.engine, 288, 288)
            # A long new end goes to the prefiller, which holds the beginning too.
            await r.caught_up()
            long = await r.complete(ids(1, 300) + ids(8, 300))
            assert (long.explained["path"], long.explained["prefill-expected-hit"]) == (
                "disaggregated",
                "288",
            )
            assert long.engine == first.engine, "it receives what it lacks"
