"""KV events from the simulator's publisher, over ZMQ, into the index.

In real time: ZMQ has threads of its own."""

from __future__ import annotations

import asyncio
import itertools
import random
import resource
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import zmq
import zmq.asyncio

from tandem.config import Subscription
from tandem.http import Origin
from tandem.router.engines import Engine, EngineRole
from tandem.router.fleet import Fleet
from tandem.router.knowledge import Knowledge
from tandem.router.kv_events import SharedEndpoint, Subscriber
from tandem.router.strategies import KvAware, KvIndex, KvPrefixes, Prompt, Space
from tandem.sim.blocks import BlockPool, HashChain
from tandem.sim.events import EventsConfig, Publisher

SIZE = 4


class LossyPublisher(Publisher):
    """Sends nothing of what it publishes while `deaf`, as when a subscriber's queue is full. It can be
    replayed."""

    deaf = False
    room: int | None = None
    """Batches of an answer that are sent; then every second one is dropped, as vLLM's socket may."""

    def __init__(self, config: EventsConfig) -> None:
        super().__init__(config)
        send = self._publish.send_multipart
        self._publish.send_multipart = lambda *a: None if self.deaf else send(*a)  # type: ignore[method-assign]

    async def _answer(self, socket: zmq.asyncio.Socket, client: bytes, first: bytes) -> None:
        send, sent = socket.send_multipart, itertools.count(1)

        async def lossy(frames: list[bytes]) -> None:
            number = next(sent)
            if self.room is None or number <= self.room or number % 2 or not frames[-1]:
                await send(frames)

        with mock.patch.object(socket, "send_multipart", lossy):
            await super()._answer(socket, client, first)


@dataclass
class Cache:
    """An engine's KV cache, and the publisher of what happens in it."""

    pool: BlockPool
    publisher: LossyPublisher

    def compute(self, ids: list[int], salt: str | None = None) -> int:
        """A request comes and goes. Returns the tokens it found cached."""
        hashes = HashChain(SIZE, salt).extend(ids)
        hit = self.pool.hit(hashes, len(ids))
        self.pool.hold(hit)
        blocks = hit + self.pool.allocate(self.pool.needed(len(ids), len(hit)))
        self.pool.cache(blocks, hashes, len(hit), len(hashes), ids, salt=salt, lora=None)
        self.pool.release(blocks)
        self.publish()
        return len(hit) * SIZE

    def publish(self) -> None:
        if events := self.pool.take_events():
            self.publisher.publish(1.0, events)


@asynccontextmanager
async def cache(
    folder: Path, *, blocks: int = 100, kept: int = 1000, replay: bool = True, endpoint: str | None = None
) -> AsyncIterator[Cache]:
    config = EventsConfig(
        enable_kv_cache_events=True,
        endpoint=endpoint or f"ipc://{folder}/events",
        replay_endpoint=f"ipc://{folder}/replay" if replay else None,
        buffer_steps=kept,
    )
    publisher = LossyPublisher(config)
    replays = asyncio.create_task(publisher.serve_replays())
    try:
        yield Cache(BlockPool(blocks, SIZE, events=True), publisher)
    finally:
        replays.cancel()
        await asyncio.gather(replays, return_exceptions=True)
        publisher.close()


def subscription(folder: Path, *, replay: bool = True) -> Subscription:
    return Subscription(f"ipc://{folder}/events", f"ipc://{folder}/replay" if replay else None)


@dataclass
class Router:
    index: KvIndex
    subscriber: Subscriber
    engine: Engine

    def expects(self, ids: list[int], salt: str | None = None) -> int:
        prompt = Prompt(len(ids), ids, Space(None, salt))
        return self.index.match(prompt, [self.engine]).hit(self.engine).tokens

    @property
    def complete(self) -> bool:
        return all(rank.complete for rank in self.index.ranks(self.engine))


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    index = KvIndex()
    subscriber = Subscriber(index, replay_timeout=0.5)
    yield Router(index, subscriber, Engine("http://e:1", EngineRole.PREFILL, Origin.parse("http://e:1")))
    subscriber.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


async def follow(router: Router, folder: Path, engine: Cache, *, replay: bool = True) -> None:
    """Subscribed, which an event proves that has arrived."""
    router.subscriber.add(router.engine, subscription(folder, replay=replay))
    await until(lambda: router.subscriber.idle)
    number = itertools.count(10_000)
    while not router.subscriber.batches:
        engine.compute([next(number)] * SIZE)
        await asyncio.sleep(0.01)


async def caught_up(router: Router, engine: Cache) -> None:
    """All that the engine has published is in the index."""
    await until(lambda: router.subscriber.idle and router.subscriber.batches >= engine.publisher._sequence)


async def test_what_is_expected_is_what_the_engine_finds(tmp_path: Path, router: Router) -> None:
    """Growing chats of two salts, more than the cache holds."""
    rng = random.Random(1)
    async with cache(tmp_path) as engine:
        await follow(router, tmp_path, engine)
        chats: list[list[int]] = [[7] * 10 for _ in range(6)]
        hits = 0
        for turn in range(60):
            which = rng.randrange(len(chats))
            chats[which] += [rng.randrange(100) for _ in range(rng.randrange(1, 30))]
            if len(chats[which]) > 200:
                chats[which] = chats[which][:20]
            await caught_up(router, engine)
            salt = "ab"[which % 2]
            expected = router.expects(chats[which], salt)
            assert engine.compute(chats[which], salt) == expected, turn
            hits += expected > 0
        assert hits > 20
        assert router.complete
        assert router.index.dropped == {}
        await caught_up(router, engine)
        engine.pool.clear()
        engine.publish()
        await until(lambda: router.expects(chats[0], "a") == 0)


async def test_a_router_that_starts_late_is_told_all_that_is_kept(tmp_path: Path, router: Router) -> None:
    async with cache(tmp_path) as engine:
        for i in range(5):
            engine.compute([i] * 20)
        router.subscriber.add(router.engine, subscription(tmp_path))
        await caught_up(router, engine)
        assert [router.expects([i] * 20) for i in range(5)] == [16] * 5
        assert router.complete
        assert router.subscriber.counts == {"replayed": 5}


async def test_an_answer_with_holes_is_asked_for_on(tmp_path: Path, router: Router) -> None:
    async with cache(tmp_path) as engine:
        engine.publisher.room = 7
        for i in range(40):
            engine.compute([i] * 20)
        router.subscriber.add(router.engine, subscription(tmp_path))
        await caught_up(router, engine)
        assert [router.expects([i] * 20) for i in range(20, 40)] == [16] * 20
        assert router.complete
        assert router.subscriber.counts == {"replayed": 40}


@pytest.mark.parametrize("replay", [True, False])
async def test_what_was_published_before_and_is_not_kept_is_missed_and_said(
    tmp_path: Path, router: Router, replay: bool
) -> None:
    async with cache(tmp_path, kept=1, replay=replay) as engine:
        engine.compute([1] * 20)
        engine.compute([2] * 20)
        await follow(router, tmp_path, engine, replay=replay)
        engine.compute([1] * 40)
        engine.compute([3] * 20)
        await until(lambda: router.expects([3] * 20) == 16)
        assert router.expects([1] * 41) == 0
        assert router.index.dropped == {"orphan": 5}
        assert not router.complete


async def test_a_gap_is_replayed(tmp_path: Path, router: Router) -> None:
    async with cache(tmp_path) as engine:
        await follow(router, tmp_path, engine)
        engine.publisher.deaf = True
        engine.compute([1] * 20)
        engine.publisher.deaf = False
        engine.compute([1] * 40)
        await until(lambda: router.expects([1] * 41) == 40)
        assert router.complete
        assert router.subscriber.counts["gap"] == 1
        assert router.subscriber.counts["lost"] == 0


async def test_without_a_replay_a_gap_voids_what_was_known(tmp_path: Path, router: Router) -> None:
    async with cache(tmp_path, replay=False) as engine:
        await follow(router, tmp_path, engine, replay=False)
        engine.compute([1] * 20)
        await until(lambda: router.expects([1] * 20) == 16)
        engine.publisher.deaf = True
        engine.compute([2] * 20)
        engine.publisher.deaf = False
        engine.compute([3] * 20)
        await until(lambda: router.expects([3] * 20) == 16)
        assert router.expects([1] * 20) == 0
        assert not router.complete
        assert router.subscriber.counts["lost"] == 1


async def test_a_restarted_engine_begins_with_an_empty_cache(tmp_path: Path, router: Router) -> None:
    async with cache(tmp_path) as engine:
        await follow(router, tmp_path, engine)
        engine.compute([1] * 20)
        await until(lambda: router.expects([1] * 20) == 16)
    async with cache(tmp_path) as engine:
        while router.expects([2] * 20) == 0:
            engine.compute([2] * 20)
            engine.pool.clear()
            engine.compute([2] * 20)
            await asyncio.sleep(0.02)
        assert router.expects([1] * 20) == 0
        assert router.complete


async def test_a_router_that_knows_of_a_restart_asks_again(tmp_path: Path, router: Router) -> None:
    async with cache(tmp_path) as engine:
        await follow(router, tmp_path, engine)
        engine.compute([1] * 20)
        await until(lambda: router.expects([1] * 20) == 16)
        router.subscriber.restarted(router.engine)
        await until(lambda: router.subscriber.counts["replayed"] >= 2 and router.subscriber.idle)
        assert router.expects([1] * 20) == 16
        assert router.subscriber.counts["restart"] == 1


async def test_a_publisher_that_answers_no_replay_is_followed_all_the_same(
    tmp_path: Path, router: Router
) -> None:
    async with cache(tmp_path, replay=False) as engine:
        engine.compute([1] * 20)
        router.subscriber.add(router.engine, subscription(tmp_path))
        number = itertools.count()
        while not router.index.count:
            engine.compute([next(number)] * 20)
            await asyncio.sleep(0.02)
        assert not router.complete


@pytest.mark.parametrize(
    ("bound", "host"),
    [("tcp://*:*", "127.0.0.1"), ("tcp://*:*", "localhost"), ("tcp://[::1]:*", "[::1]")],
)
async def test_events_come_over_either_version_of_ip(
    tmp_path: Path, router: Router, bound: str, host: str
) -> None:
    """`*` is IPv4 for engines. A name may have addresses of both."""
    both = {zmq.IPV6: int("[" in bound)}
    with mock.patch.dict(zmq.Context.instance().sockopts, both):  # of the publisher
        async with cache(tmp_path, replay=False, endpoint=bound) as engine:
            port = engine.publisher.endpoint.rpartition(":")[2]
            router.subscriber.add(router.engine, Subscription(f"tcp://{host}:{port}"))
            number = itertools.count(10_000)

            def heard() -> bool:
                engine.compute([next(number)] * SIZE)
                return router.subscriber.batches > 0

            await until(heard)
            engine.compute([1] * 20)
            await until(lambda: router.expects([1] * 20) == 16)


async def test_a_batch_that_cannot_be_read_is_passed_over(tmp_path: Path, router: Router) -> None:
    async with cache(tmp_path) as engine:
        await follow(router, tmp_path, engine)

        class Odd:
            def as_event(self) -> dict[str, str]:
                return {"type": "BlockSplit"}

        engine.publisher.publish(1.0, [Odd()])  # type: ignore[list-item]
        engine.compute([1] * 20)
        await until(lambda: router.expects([1] * 20) == 16)
        assert router.subscriber.unread == 1


@pytest.mark.parametrize("junk", [[b"", b"x"], [b"", bytes(8), b"junk"], [b"", b"short", b"junk"]])
async def test_messages_that_are_no_batches_are_counted_and_doubted(
    tmp_path: Path, router: Router, junk: list[bytes]
) -> None:
    """The engine says nothing that can be read: it must not pass for one that holds nothing."""
    prefixes = KvPrefixes(router.index)
    async with cache(tmp_path) as engine:
        router.subscriber.add(router.engine, subscription(tmp_path))
        await until(lambda: router.subscriber.idle and bool(router.index.ranks(router.engine)))
        while not router.subscriber.unread:
            engine.publisher._publish.send_multipart(junk)
            await asyncio.sleep(0.01)
        assert prefixes.doubt(router.engine) in ("unread", "joined_late")
        for i in range(100):
            engine.compute([i] * 20)
        await until(lambda: prefixes.doubt(router.engine) is None)
        await until(lambda: router.expects([99] * 20) == 16)


async def test_the_loop_turns_between_pieces_of_work(tmp_path: Path) -> None:
    """By a clock on which each piece takes longer than a slice."""
    index, ticks = KvIndex(), itertools.count()
    subscriber = Subscriber(index, clock=lambda: float(next(ticks)))
    router = Router(index, subscriber, Engine("http://e:1", EngineRole.PREFILL, Origin.parse("http://e:1")))
    blocks = 10_000
    async with cache(tmp_path, blocks=blocks + 100) as engine:
        engine.compute(list(range(blocks * SIZE)))
        subscriber.add(router.engine, subscription(tmp_path))
        seen = []
        while not seen or seen[-1] < blocks:
            seen.append(index.count)
            await asyncio.sleep(0)
        steps = [b - a for a, b in itertools.pairwise(seen)]
        assert max(steps) <= 256
    subscriber.close()


async def test_an_engine_that_left_is_followed_no_more(tmp_path: Path, router: Router) -> None:
    async with cache(tmp_path) as engine:
        await follow(router, tmp_path, engine)
        engine.compute([1] * 20)
        await until(lambda: router.expects([1] * 20) == 16)
        router.subscriber.restarted(router.engine)  # so that a replay is wanted
        router.subscriber.remove(router.engine)
        await asyncio.sleep(0)
        assert router.expects([1] * 20) == 0
        assert not router.index.ranks(router.engine)
        await until(lambda: not router.index.tidy(100))
        assert router.index.count == 0


async def test_what_was_published_while_a_subscription_was_made_is_asked_for(tmp_path: Path) -> None:
    """The replay may be answered before the subscription is connected. Then nobody hears what comes first."""
    index = KvIndex()
    subscriber = Subscriber(index, second_look=0.02)
    router = Router(index, subscriber, Engine("http://e:1", EngineRole.PREFILL, Origin.parse("http://e:1")))
    async with cache(tmp_path) as engine:
        subscriber.add(router.engine, subscription(tmp_path))
        await until(lambda: bool(router.index.ranks(router.engine)))
        engine.publisher.deaf = True
        engine.compute([1] * 20)
        await until(lambda: router.expects([1] * 20) == 16)
        assert router.complete
    subscriber.close()


async def test_more_engines_than_zmq_has_sockets_by_default(tmp_path: Path) -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 8000:
        pytest.skip(f"{soft} open files are allowed, not 8,000")
    subscriber = Subscriber(KvIndex())
    for number in range(600):
        url = f"http://e:{number + 1}"
        engine = Engine(url, EngineRole.PREFILL, Origin.parse(url))
        subscriber.add(
            engine, Subscription(f"ipc://{tmp_path}/events{number}", f"ipc://{tmp_path}/replay{number}")
        )
    await until(lambda: not subscriber._ready)
    assert not subscriber.idle, "each is asked for a replay"
    subscriber.close()


@pytest.mark.parametrize(
    "bad",
    [
        Subscription("tcp://no such host:5557"),
        Subscription("tcp://127.0.0.1:5557", "tcp://no such host:5557"),
    ],
    ids=["events", "replay"],
)
async def test_an_endpoint_that_cannot_be_followed_leaves_nothing_behind(
    router: Router, bad: Subscription
) -> None:
    with pytest.raises(zmq.ZMQError):
        router.subscriber.add(router.engine, bad)
    await asyncio.sleep(0)
    assert router.subscriber.idle
    assert not router.index.ranks(router.engine)


def engine_at(url: str, events: Subscription | None = None) -> Engine:
    return Engine(url, EngineRole.PREFILL, Origin.parse(url), kv_events=events)


async def test_what_is_heard_at_one_endpoint_is_taken_for_one_engines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Discovery may find engines that are all said to publish at one address. The first is followed; when it
    leaves, the next."""
    caplog.set_level("INFO")
    fleet, index = Fleet(), KvIndex()
    knowledge = Knowledge(fleet, index, KvAware(KvPrefixes(index)))
    first, second, third = (engine_at(f"http://e{i}:1", subscription(tmp_path)) for i in range(3))
    async with cache(tmp_path) as engine:
        for each in (first, second, third):
            fleet.add(each)
        assert caplog.text.count("are not followed") == 2
        assert f"KV events of {second.url} are not followed: ipc://{tmp_path}/events is where those of" in (
            caplog.text
        )
        engine.compute([1] * 20)
        await until(lambda: index.count > 0)
        assert [len(index.ranks(each)) for each in (first, second, third)] == [1, 0, 0]
        fleet.remove(third)
        fleet.remove(first)
        await until(lambda: bool(index.ranks(second)))
        assert f"KV events of {second.url} are followed now" in caplog.text
    knowledge.close()


async def test_engines_at_one_endpoint_that_leave_together_are_looked_through_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, index = Fleet(), KvIndex()
    knowledge = Knowledge(fleet, index, KvAware(KvPrefixes(index)))
    many = [engine_at(f"http://e{i}:1", subscription(tmp_path)) for i in range(100)]
    fleet.update(add=many)
    tried: list[Engine] = []
    add = knowledge.subscriber.add

    def noted(engine: Engine, subscription: Subscription) -> None:
        tried.append(engine)
        add(engine, subscription)

    monkeypatch.setattr(knowledge.subscriber, "add", noted)
    fleet.update(remove=many[:90])
    assert tried == many[90:]
    fleet.update(remove=many[95:])
    assert tried == many[90:], "none of them had the endpoint"
    fleet.update(remove=many[90:91])
    assert tried[10:] == many[91:95]
    knowledge.close()


@pytest.mark.parametrize(
    "other",
    [
        Subscription("tcp://127.0.0.1:5557"),
        Subscription("tcp://127.0.0.1:5556", ranks=2),
        Subscription("tcp://127.0.0.1:9", "tcp://127.0.0.1:6558"),
    ],
)
async def test_ranks_and_replays_count_as_well(router: Router, other: Subscription) -> None:
    router.subscriber.add(router.engine, Subscription("tcp://127.0.0.1:5557", "tcp://127.0.0.1:6557", 2))
    with pytest.raises(SharedEndpoint, match=router.engine.url):
        router.subscriber.add(engine_at("http://other:1"), other)
    router.subscriber.remove(router.engine)
    router.subscriber.add(engine_at("http://other:1"), other)


def test_ranks_have_ports_of_their_own() -> None:
    subscription = Subscription("tcp://10.0.0.7:5557", "tcp://10.0.0.7:6000", ranks=3)
    assert subscription.of(0) == ("tcp://10.0.0.7:5557", "tcp://10.0.0.7:6000")
    assert subscription.of(2) == ("tcp://10.0.0.7:5559", "tcp://10.0.0.7:6002")
    assert Subscription("tcp://[::1]:5557").of(1) == ("tcp://[::1]:5558", None)
