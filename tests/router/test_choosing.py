"""Which prefiller a prompt goes to, by strategy, on a running router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest

from tandem.config import RouterConfig
from tandem.http import Origin
from tandem.prompt import NotExact, PromptCounter, Tokens
from tandem.router.engines import Engine, EngineRole
from tandem.router.strategies import Prompt, make

from .conftest import LONG, Endpoint, Start
from .fakes import FakeEngine, eventually, kv_metrics

# Tokens are characters here, and a block of a prompt is known once it is as long as this.
BLOCK = 16
TEXT = "a shared beginning that is longer than a block of sixteen tokens, "


async def prefiller_of(endpoint: Endpoint, body: dict[str, Any], **headers: str) -> int:
    """The number of the prefiller that a request goes to."""
    before = [len(p.requests) for p in endpoint.prefill]
    assert (await endpoint.post(body, **headers)).status_code == 200
    (chosen,) = [i for i, p in enumerate(endpoint.prefill) if len(p.requests) > before[i]]
    return chosen


def prompt(text: str, **more: Any) -> dict[str, Any]:
    return {**LONG, "prompt": text, **more}


class Characters:
    """Counts a token for each character of a completion's prompt."""

    def completion(self, body: Mapping[str, Any]) -> Tokens:
        return Tokens([ord(c) for c in body["prompt"]])

    def chat(self, body: Mapping[str, Any], most: int = 0) -> Tokens:
        raise NotExact("only completions here")


def only_count(prefill: list[FakeEngine], decode: list[FakeEngine]) -> None:
    for engine in decode:
        engine.knows_ids = False


async def prefix_aware(start: Start, **options: Any) -> Endpoint:
    return await start(
        prefill=4,
        local=cast(PromptCounter, Characters()),
        before=only_count,
        routing_strategy="prefixaware",
        kv_block_size=BLOCK,
        **options,
    )


def test_prefixaware_knows_the_size_of_the_engines_blocks() -> None:
    """A hit is expected in the engine's own blocks, or it would be expected where there is none."""
    config = RouterConfig(decode=("http://d:1",), kv_block_size=128)
    url = "http://p:1"
    engine = Engine(url, EngineRole.PREFILL, Origin.parse(url))
    strategy, ids = make(config).strategy, list(range(331))
    strategy.sent(Prompt(len(ids), ids), engine)
    assert strategy.choose(Prompt(len(ids), ids), [engine]).hit_tokens == 256


async def test_prefixaware_knows_prompts_also_where_engines_count_them(start: Start) -> None:
    endpoint = await start(prefill=2, routing_strategy="prefixaware", kv_block_size=BLOCK, explain=True)
    await endpoint.post(prompt(3 * TEXT))
    again = await endpoint.post(prompt(3 * TEXT), x_tandem_explain="1")
    assert int(again.headers["x-tandem-prefill-expected-hit"]) > BLOCK


async def test_prefixaware_sends_what_begins_alike_to_the_same_prefiller(start: Start) -> None:
    endpoint = await prefix_aware(start)
    text = 3 * TEXT
    first = await prefiller_of(endpoint, prompt(text))
    for more in ("one", "two", "three"):
        assert await prefiller_of(endpoint, prompt(text + more)) == first
        text += more
    others = {await prefiller_of(endpoint, prompt(f"{i} is another text, {i} {TEXT}")) for i in range(12)}
    assert len(others) > 1, "prompts that share nothing are spread"


@pytest.mark.parametrize("apart", [{"cache_salt": "another"}, {"model": "adapter"}])
async def test_what_shares_no_kv_is_not_taken_for_the_same(start: Start, apart: dict[str, str]) -> None:
    """Tokens alone do not make KV equal: a salt or a LoRA adapter keeps it apart."""
    cards = [{"id": "m"}, {"id": "adapter", "parent": "m"}]
    endpoint = await prefix_aware(start, explain=True, served_model_name=("m", "adapter"))
    for engine in endpoint.app.fleet.engines:
        engine.models = cards
    endpoint.app.fleet._changed()
    text = 3 * TEXT
    await endpoint.post(prompt(text))
    again = await endpoint.post(prompt(text), x_tandem_explain="1")
    assert int(again.headers["x-tandem-prefill-expected-hit"]) > BLOCK
    other = await endpoint.post(prompt(text, **apart), x_tandem_explain="1")
    assert other.headers["x-tandem-prefill-expected-hit"] == "0"


async def test_a_prefiller_that_was_lost_is_expected_to_have_lost_its_cache(start: Start) -> None:
    endpoint = await prefix_aware(start, explain=True)
    text = 3 * TEXT
    first = await prefiller_of(endpoint, prompt(text))
    (engine,) = [e for e in endpoint.app.fleet.engines if e.url == endpoint.prefill[first].url]
    endpoint.app.fleet.lost(engine, "gone for a moment")
    engine.doubt()
    await endpoint.ready()
    again = await endpoint.post(prompt(text), x_tandem_explain="1")
    assert again.headers["x-tandem-prefill-expected-hit"] == "0"


async def test_prefixaware_counts_every_prompt_even_where_all_are_disaggregated(start: Start) -> None:
    endpoint = await prefix_aware(start, routing_threshold=0)
    await endpoint.post(prompt(TEXT))
    assert await endpoint.metric('tandem_prompt_tokens_total{path="disaggregated"}') == len(TEXT)


@pytest.mark.parametrize("header", ["x-session-id", "X-Conversation"])
async def test_session_sends_a_session_to_the_same_prefiller(start: Start, header: str) -> None:
    endpoint = await start(prefill=4, routing_strategy="session", session_header=(header,))
    chosen: dict[str, int] = {}
    for session in "abcdefghijklmnop":
        chosen[session] = await prefiller_of(endpoint, LONG, **{header: session})
    for session, prefiller in chosen.items():
        assert await prefiller_of(endpoint, LONG, **{header: session}) == prefiller
    assert len(set(chosen.values())) > 1


async def test_the_work_that_a_cached_prefix_saves_is_not_pending(start: Start) -> None:
    endpoint = await prefix_aware(start)
    text = 4 * TEXT
    first = await prefiller_of(endpoint, prompt(text))
    fake = endpoint.prefill[first]
    (engine,) = [e for e in endpoint.app.fleet.engines if e.url == fake.url]
    seen: list[int] = []

    def look(*args: Any) -> bool:
        seen.append(engine.pending_tokens)
        return False

    fake.on_generate = look
    assert await prefiller_of(endpoint, prompt(text + "and more")) == first
    assert 0 < seen[0] < len(text) // 2

    async def done() -> bool:
        return engine.pending_tokens == 0

    await eventually(done)


@pytest.mark.parametrize(
    ("options", "sizes", "told"),
    [
        ({"routing_strategy": "prefixaware"}, (32, 32), 1),
        ({"routing_strategy": "kvaware"}, (16, 32), 1),
        ({"routing_strategy": "prefixaware"}, (16, 16), 0),
        ({"routing_strategy": "prefixaware"}, (None, None), 0),
        ({"routing_strategy": "roundrobin"}, (32, 32), 0),
        ({"routing_strategy": "session", "uncached_threshold": True}, (32, 32), 1),
    ],
)
async def test_kv_blocks_of_another_size_than_was_said_are_told_once(
    start: Start,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
    sizes: tuple[int | None, ...],
    told: int,
) -> None:
    endpoint = await start(kv_block_size=16, **options)
    fakes = (*endpoint.prefill, *endpoint.decode)
    for use in (0.1, 0.2):
        for fake, size in zip(fakes, sizes, strict=True):
            said = b"" if size is None else b'vllm:cache_config_info{block_size="%d"} 1.0\n' % size
            fake.metrics = said + kv_metrics(use)
            await endpoint.look_at(fake, lambda engine, use=use: engine.kv_use == use)
    lines = [r.getMessage() for r in caplog.records if "--kv-block-size" in r.getMessage()]
    assert len(lines) == told
    for line in lines:
        wrong = fakes[sizes.index(32)]
        assert f"{wrong.url} has KV blocks of 32 tokens, and --kv-block-size is 16" in line
        assert "Give --kv-block-size 32" in line
