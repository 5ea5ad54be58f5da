"""kvaware on real engines: the cached tokens that it predicts are those that the engine then reports.

The claim is for a router that has read all that its engines have published. So after each request the engine
that served it computes one more block, sent to it directly, and the next request waits until the router has
read the event of that block.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tandem.config import RouterConfig, Subscription
from tandem.http import Origin
from tandem.prompt import PromptCounter, load
from tandem.router import kv_events
from tandem.router.app import running
from tandem.router.engines import Engine, EngineRole
from tandem.router.strategies import KvIndex

from .answers import fresh_prompt
from .cases import CHAT, MODEL, USAGE, completion
from .conftest import Up, roleless_engines
from .kv_events import WITHIN_SECONDS, Subscriber, subscribed
from .pairs import EventSource

PUBLISHER = """
import sys, time
from vllm.distributed.kv_events import BlockStored, KVEventBatch, ZmqEventPublisher

events, replay, batches = sys.argv[1:]
publisher = ZmqEventPublisher(0, events, replay, hwm=10_000)
for i in range(int(batches)):
    stored = BlockStored([i + 1], i or None, [i] * 16, 16, None, "GPU", None)
    publisher.publish(KVEventBatch(ts=time.time(), events=[stored]))
while publisher._event_queue.qsize():
    time.sleep(0.01)
print("published", flush=True)
sys.stdin.read()
publisher.shutdown()
"""
"""vLLM's own publisher, without an engine."""
SMALL_BLOCK = 32
"""Tokens; the smallest block that vLLM has on a CPU."""
SMALL_CACHE = 60
"""Blocks of it. All chats of a test together need more than two engines have."""
WORDS = ["the", "river", "keeps", "every", "letter", "under", "silver", "stone", "winter", "seven", "names"]
READ = re.compile(r'^tandem_kv_events_total\{kind="batch"\} ([\d.e+]+)$', re.MULTILINE)
PREEMPTED = re.compile(r"^vllm:num_preemptions_total\{.*\} ([\d.e+]+)$", re.MULTILINE)


@dataclass
class Seen:
    """What was predicted for a request, and what came of it."""

    engine: str
    prompt: int
    predicted: int
    cached: int
    why: str
    answer: str


@dataclass
class Chat:
    """A chat that grows, each prompt being the last one and its answer with a new turn."""

    salt: str | None
    messages: list[dict[str, str]]
    hits: list[tuple[str, int]] = field(default_factory=list)
    """Engine and cached tokens, of each request."""

    def body(self, max_tokens: int) -> dict[str, Any]:
        salt = {} if self.salt is None else {"cache_salt": self.salt}
        fields = {"max_tokens": max_tokens, "temperature": 0, **salt}
        return {"model": MODEL, "messages": self.messages, **fields}

    @property
    def shrank(self) -> bool:
        """Whether its prompt, though longer, found less of itself in the same engine's cache than before."""
        (before, had), (now, has) = self.hits[-2:] if len(self.hits) > 1 else [("", 0)] * 2
        return now == before and has < had


class Engines:
    """Real engines, and what they have published."""

    def __init__(
        self, client: httpx.AsyncClient, sources: dict[str, EventSource], model: Path, block: int
    ) -> None:
        self.client = client
        self.sources = sources
        self.model = model
        self.counter = load(model)
        self.block = block
        self.published: Counter[str] = Counter()
        """Batches, by URL."""
        self.evicted = 0
        """Blocks."""
        self.doubled = 0
        """Blocks that were stored while the engine held another copy."""
        self._held: dict[str, Counter[int]] = {url: Counter() for url in sources}
        self._subscribers: dict[str, Subscriber] = {}

    @asynccontextmanager
    async def heard(self) -> AsyncIterator[Engines]:
        async with AsyncExitStack() as stack:
            for url, source in self.sources.items():

                async def touch(url: str = url) -> list[int]:
                    marker = fresh_prompt(self.counter, self.block)
                    body = completion([*marker, 1], max_tokens=1)
                    (await self.client.post(f"{url}/v1/completions", json=body)).raise_for_status()
                    return marker

                subscriber = await stack.enter_async_context(subscribed(source, touch))
                await touch()
                self.published[url] = (await subscriber.until_now())[-1].sequence + 2
                self._subscribers[url] = subscriber
            yield self

    async def hear(self, url: str) -> None:
        """Read what an engine has published, up to the block that it computes now."""
        batches = await self._subscribers[url].until_now()
        self.published[url] += len(batches) + 1
        held = self._held[url]
        for event in (event for batch in batches for event in batch.events):
            blocks = event.get("block_hashes", ())
            if event["type"] == "BlockStored":
                self.doubled += sum(held[block] > 0 for block in blocks)
                held.update(blocks)
            elif event["type"] == "BlockRemoved":
                self.evicted += len(blocks)
                held.subtract(blocks)

    async def preempted(self) -> int:
        """Running requests whose blocks were taken for others."""
        pages = [(await self.client.get(f"{url}/metrics")).text for url in self.sources]
        return sum(int(float(value)) for page in pages for value in PREEMPTED.findall(page))

    @asynccontextmanager
    async def router(self) -> AsyncIterator[Router]:
        config = RouterConfig(
            port=0,
            engine=tuple(
                f"{url},kv-events={source.endpoint},kv-replay={source.replay}"
                for url, source in self.sources.items()
            ),
            routing_strategy="kvaware",
            kv_block_size=self.block,
            model_path=str(self.model),
            explain=True,
            drain_timeout=5.0,
        )
        async with running(config, self.counter) as (server, _):
            router = Router(self, f"http://127.0.0.1:{server.port}")
            async with asyncio.timeout(WITHIN_SECONDS):
                while (await self.client.get(f"{router.url}/ready")).status_code != 200:
                    await asyncio.sleep(0.02)
                await router.steady(*self.sources)
            yield router


class Router:
    """A router before them, and the requests that it has served."""

    def __init__(self, engines: Engines, url: str) -> None:
        self.engines = engines
        self.url = url
        self.seen: list[Seen] = []
        self.shrank = 0

    async def steady(self, *urls: str) -> None:
        """Wait until all that these engines have published has been read."""
        for url in urls:
            await self.engines.hear(url)
        async with asyncio.timeout(WITHIN_SECONDS):
            while await self._read() < self.engines.published.total():
                await asyncio.sleep(0.005)

    async def _read(self) -> int:
        page = (await self.engines.client.get(f"{self.url}/metrics")).text
        (batches,) = READ.findall(page)
        return int(float(batches))

    async def ask(self, body: dict[str, Any], *, stream: bool = False) -> Seen:
        """One request, not waiting for its events."""
        if stream:
            body = {**body, "stream": True, "stream_options": USAGE}
        headers = {"x-tandem-explain": "1"}
        answer = await self.engines.client.post(f"{self.url}{CHAT}", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        if stream:
            lines = answer.text.split("\n\n")
            chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
            text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
            usage = chunks[-1]["usage"]
        else:
            text, usage = answer.json()["choices"][0]["message"]["content"], answer.json()["usage"]
        return Seen(
            answer.headers["x-tandem-decode-url"],
            usage["prompt_tokens"],
            int(answer.headers["x-tandem-decode-expected-hit"]),
            usage["prompt_tokens_details"]["cached_tokens"],
            answer.headers["x-tandem-decode-why"],
            text,
        )

    async def go_on(self, chat: Chat, *, max_tokens: int = 24, stream: bool = False) -> None:
        """One more request of a chat, whose answer becomes a part of it."""
        seen = await self.ask(chat.body(max_tokens), stream=stream)
        self.seen.append(seen)
        chat.hits.append((seen.engine, seen.cached))
        self.shrank += chat.shrank
        chat.messages = [*chat.messages, {"role": "assistant", "content": seen.answer}]
        await self.steady(seen.engine)

    def judge(self) -> Counter[str]:
        """Count what was equal, and say it on the test's output."""
        counts = Counter(
            requests=len(self.seen),
            equal=sum(s.predicted == s.cached for s in self.seen),
            hits=sum(s.cached > 0 for s in self.seen),
            shrank=self.shrank,
        )
        print(dict(counts), "served by", dict(Counter(s.engine for s in self.seen)))
        assert [s for s in self.seen if s.predicted != s.cached] == []
        assert not any("fallback" in s.why for s in self.seen)
        return counts


class Writer:
    """Writes the turns of several chats that begin alike, two of them under salts of their own."""

    def __init__(self, counter: PromptCounter, block: int, *, chats: int, system: int, seed: int) -> None:
        """`system`: words that all chats begin with."""
        self._rnd = random.Random(seed)
        self._counter = counter
        self._block = block
        beginning = [{"role": "system", "content": self.text(system)}]
        self.chats = [Chat((None, "one", "two")[i % 3], beginning) for i in range(chats)]
        self.aligned = 0
        """Prompts of whole blocks, of which the last is computed again for its last token."""

    def text(self, words: int) -> str:
        return " ".join(self._rnd.choices(WORDS, k=words))

    def turn(self, words: int, chat: Chat | None = None, *, align: bool = False) -> Chat:
        """A chat (some chat) with a new turn. `align`: its prompt is of whole blocks."""
        self._last = chat = chat or self._rnd.choice(self.chats)
        turn = {"role": "user", "content": self.text(words)}
        chat.messages = [*chat.messages, turn]
        while align and self._counter.chat(chat.body(1)).count % self._block:
            turn["content"] += " a"
        self.aligned += align
        return chat

    def again(self) -> Chat:
        """The last one, whose answer is to be made anew."""
        self._last.messages = self._last.messages[:-1]
        return self._last


@pytest.fixture(scope="module")
def small_caches(
    smollm2: Up, tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, EventSource]]:
    """Two engines without a role, whose caches are soon full."""
    python = smollm2.plan["engines"][0]["argv"][0]
    with roleless_engines(
        python,
        tiny,
        tmp_path_factory.mktemp("small"),
        2,
        *("--load-format", "dummy", "--max-model-len", "1024"),
        *("--kv-cache-memory-bytes", "67108864"),
        *("--block-size", str(SMALL_BLOCK), "--num-gpu-blocks-override", str(SMALL_CACHE)),
    ) as engines:
        yield engines


@pytest_asyncio.fixture(loop_scope="module")
async def small(small_caches: dict[str, EventSource], tiny: Path) -> AsyncIterator[Engines]:
    async with new_client() as client, Engines(client, small_caches, tiny, SMALL_BLOCK).heard() as engines:
        yield engines


@pytest_asyncio.fixture(loop_scope="module")
async def shared(smollm2: Up) -> AsyncIterator[Engines]:
    """The pair that all tests share, taken for two engines without a role."""
    sources = {}
    for engine in smollm2.plan["engines"]:
        config = json.loads(engine["argv"][engine["argv"].index("--kv-events-config") + 1])
        sources[engine["url"]] = EventSource(config["endpoint"], config["replay_endpoint"])
    model = Path(smollm2.plan["model"])
    async with new_client() as client, Engines(client, sources, model, 128).heard() as engines:
        yield engines


def new_client() -> httpx.AsyncClient:
    """Gives connections up before vLLM does."""
    limits = httpx.Limits(keepalive_expiry=2.0)
    return httpx.AsyncClient(timeout=WITHIN_SECONDS, limits=limits, trust_env=False)


@pytest.mark.asyncio(loop_scope="module")
async def test_predictions_come_true_on_the_shared_pair(shared: Engines) -> None:
    async with shared.router() as router:
        writer = Writer(shared.counter, shared.block, chats=3, system=140, seed=1)
        for i in range(12):
            chat = writer.again() if i % 4 == 3 else writer.turn(40)
            await router.go_on(chat, max_tokens=8, stream=i % 2 == 0)
        counts = router.judge()
    assert counts["hits"] >= 6


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_predictions_come_true_in_growing_chats_and_small_caches(small: Engines) -> None:
    """A router that starts in the middle knows as much, by replay."""
    writer = Writer(small.counter, small.block, chats=9, system=80, seed=2)
    total: Counter[str] = Counter()
    served: set[str] = set()
    for _ in range(2):
        async with small.router() as router:
            for i in range(36):
                chat = writer.again() if i % 6 == 3 else writer.turn(40, align=i % 6 == 2)
                await router.go_on(chat, stream=i % 2 == 0)
            total += router.judge()
            served |= {seen.engine for seen in router.seen}
    print(
        f"{small.evicted} blocks evicted, {small.doubled} computed twice, "
        f"{writer.aligned} prompts of whole blocks"
    )
    assert total["requests"] == total["equal"] == 72
    assert total["hits"] >= 50
    assert total["shrank"] >= 3
    assert small.evicted >= 100
    assert served == set(small.sources)


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_predictions_come_true_after_requests_at_once(small: Engines) -> None:
    """Requests that run at once compute the same blocks twice, take each other's blocks, or are left by
    their clients."""
    doubled, preempted = small.doubled, await small.preempted()
    before: list[Chat] = []
    async with small.router() as router:
        for i in range(4):
            writer = Writer(small.counter, small.block, chats=6, system=60, seed=10 + i)
            for chat in writer.chats:
                writer.turn(100, chat)
            bodies = [chat.body(200) for chat in writer.chats for _ in range(2)]
            asked = [asyncio.create_task(router.ask(body, stream=True)) for body in bodies]
            if i % 2:
                await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
                asked[-1].cancel()
            ends = await asyncio.gather(*asked, return_exceptions=True)
            assert all(isinstance(end, Seen | asyncio.CancelledError) for end in ends), ends
            await router.steady(*small.sources)
            for chat in [*before, *writer.chats]:
                if chat in before:
                    writer.turn(20, chat)
                await router.go_on(chat, stream=True)
            before = writer.chats[:3]
        counts = router.judge()
    doubled, preempted = small.doubled - doubled, await small.preempted() - preempted
    print(f"{doubled} blocks computed twice, {preempted} requests preempted")
    assert counts["hits"] >= 12
    assert doubled
    assert preempted


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_an_emptied_cache_is_known_to_be_empty(small: Engines) -> None:
    async with small.router() as router:
        writer = Writer(small.counter, small.block, chats=1, system=100, seed=4)
        await router.go_on(writer.turn(20))
        await router.go_on(writer.turn(20))
        for url in small.sources:
            answer = await small.client.post(f"{url}/reset_prefix_cache")
            assert answer.json() == {"success": True}
        await router.steady(*small.sources)
        await router.go_on(writer.turn(20))
        await router.go_on(writer.turn(20))
        router.judge()
    assert [seen.cached > 0 for seen in router.seen] == [False, True, False, True]


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_a_replay_is_had_whole_though_the_publisher_drops_a_part(smollm2: Up, tmp_path: Path) -> None:
    """vLLM's socket takes some thousand batches at once."""
    where, batches = Subscription(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"), 9000
    python = smollm2.plan["engines"][0]["argv"][0]
    command = [python, "-c", PUBLISHER, where.events, str(where.replay), str(batches)]
    index = KvIndex()
    subscriber = kv_events.Subscriber(index)
    engine = Engine("http://e:1", EngineRole.BOTH, Origin.parse("http://e:1"))
    pipe = asyncio.subprocess.PIPE
    publisher = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    try:
        assert publisher.stdout is not None
        assert await publisher.stdout.readline() == b"published\n"
        subscriber.add(engine, where)
        async with asyncio.timeout(WITHIN_SECONDS):
            while not (subscriber.idle and index.ranks(engine)):
                await asyncio.sleep(0.01)
        (rank,) = index.ranks(engine)
        assert (rank.blocks, rank.complete) == (batches, True)
    finally:
        subscriber.close()
        publisher.kill()
        await publisher.communicate()
