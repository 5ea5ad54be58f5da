"""Prefillers' notifications over real ZMQ sockets: who they are for, and what others can do with the port."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import uvloop
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.config import RouterConfig
from tandem.http import Origin
from tandem.router.app import running
from tandem.router.connectors import LMCache, Receiver
from tandem.router.connectors.lmcache import LMCacheAttempt
from tandem.router.engines import Engine, EngineRole
from tandem.router.notifications import Expected, Notifications

from .lmcache_fakes import Watched, notification, until

# On a busy machine an example may take long.
ANY_TIME = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

ANYWHERE = "127.0.0.1:0"
URL = "http://127.0.0.1:8200"
DECODER = Engine(URL, EngineRole.DECODE, Origin.parse(URL))


def attempt(ranks: int = 1) -> LMCacheAttempt:
    """One whose prefill leg was answered, so that only notifications are missing."""
    receiver = Receiver("127.0.0.1", (7300,) * ranks, (7400,) * ranks)
    begun = LMCache(lambda url: receiver, chunk_size=256, buffer_chunks=8, ranks=ranks).attempt(DECODER)
    begun.on_prefill_reply(b"{}")
    return begun


def tag(begun: LMCacheAttempt) -> str:
    assert begun.key is not None
    return begun.key


Push = Callable[..., "zmq.Socket[Any]"]


@pytest.fixture
def push() -> Iterator[Push]:
    """Connect a prefiller's rank to an address: `push(address)` is its socket."""
    with zmq.Context() as context:
        sockets = []

        def connect(address: str) -> zmq.Socket[Any]:
            socket = context.socket(zmq.PUSH)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IPV6, 1)
            socket.connect(f"tcp://{address}")
            sockets.append(socket)
            return socket

        yield connect
        for socket in sockets:
            socket.close()


async def test_a_hand_off_is_complete_when_every_rank_has_notified(push: Push) -> None:
    notifications = Watched()
    begun = attempt(ranks=4)
    async with notifications.listening(ANYWHERE) as address:
        expected = notifications.expect(begun)
        waiting = asyncio.create_task(expected.complete(30))
        ranks = [push(address) for _ in range(4)]
        for rank in ranks[:3]:
            rank.send(notification(tag(begun)))
        await until(lambda: notifications.taken == 3)
        assert not waiting.done()
        ranks[3].send(notification(tag(begun)))
        assert await waiting
    assert notifications.unexpected == 0


async def test_what_a_rank_sent_before_the_router_listened_is_delivered(push: Push) -> None:
    """A prefiller starts when it likes, and ZMQ keeps its messages."""
    first, second = Watched(), Watched()
    async with first.listening(ANYWHERE) as address:
        pass
    begun = attempt()
    rank = push(address)
    rank.send(notification(tag(begun)))
    expected = second.expect(begun)
    async with second.listening(address):
        assert await expected.complete(30)


async def test_notifications_of_many_hand_offs_reach_each_its_own(push: Push) -> None:
    notifications = Watched()
    attempts = [attempt() for _ in range(20)]
    async with notifications.listening(ANYWHERE) as address:
        expected = [notifications.expect(begun) for begun in attempts]
        assert notifications.expected == 20
        rank = push(address)
        for begun in reversed(attempts[1:]):
            rank.send(notification(tag(begun)))
        assert all(await asyncio.gather(*[e.complete(30) for e in expected[1:]]))
        assert attempts[0].missing is not None
    for begun in attempts:
        notifications.forget(begun)
    assert notifications.expected == 0


async def test_what_does_not_come_in_time_is_told(push: Push) -> None:
    notifications = Notifications()
    assert not await notifications.expect(attempt()).complete(0.01)


async def test_a_hand_off_that_was_forgotten_gets_nothing(push: Push) -> None:
    notifications = Watched()
    begun = attempt()
    async with notifications.listening(ANYWHERE) as address:
        notifications.expect(begun)
        notifications.forget(begun)
        push(address).send(notification(tag(begun)))
        await until(lambda: notifications.unexpected == 1)
    assert begun.missing is not None


JUNK = {
    "unknown id": notification("0" * 32),
    "empty": b"",
    "no msgpack": b"\xc1\xff\x00",
    "JSON": b'{"type": "ProxyNotif", "req_id": "x"}',
    "text": b"hello",
    "another type": msgspec.msgpack.encode({"type": "AllocRequest", "req_id": "x"}),
    "no type": msgspec.msgpack.encode({"req_id": "x"}),
    "no id": msgspec.msgpack.encode({"type": "ProxyNotif"}),
    "id is a number": msgspec.msgpack.encode({"type": "ProxyNotif", "req_id": 7}),
    "id is null": msgspec.msgpack.encode({"type": "ProxyNotif", "req_id": None}),
    "id is no text": b"\x82\xa4type\xaaProxyNotif\xa6req_id\xa2\xff\xff",
    "a list": msgspec.msgpack.encode(["ProxyNotif", "x"]),
    "deep": b"\x82\xa4type\xaaProxyNotif\xa1x" + b"\x91" * 3000,
    "cut short": notification("0" * 32)[:-3],
}


@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK)
async def test_what_is_none_is_counted_and_does_no_harm(push: Push, junk: bytes) -> None:
    """Anyone who reaches the port can send it."""
    notifications = Watched()
    begun = attempt()
    async with notifications.listening(ANYWHERE) as address:
        expected = notifications.expect(begun)
        rank = push(address)
        rank.send(junk)
        await until(lambda: notifications.taken == 1)
        assert notifications.unexpected == 1
        rank.send(notification(tag(begun)))
        assert await expected.complete(30)


@ANY_TIME
@given(st.binary(max_size=200))
def test_any_bytes_are_survived(message: bytes) -> None:
    notifications = Notifications()
    notifications.received(message)
    assert notifications.unexpected == 1


@pytest.mark.parametrize("key", ["type", "req_id", "more"])
@ANY_TIME
@given(message=st.recursive(st.none() | st.integers(-5, 5) | st.text(max_size=3), st.lists, max_leaves=5))
def test_any_value_is_survived(key: str, message: Any) -> None:
    notifications = Notifications()
    fields = {"type": "ProxyNotif", "req_id": "nobody", key: message}
    notifications.received(msgspec.msgpack.encode(fields))
    assert notifications.unexpected == 1


async def test_a_field_that_a_later_lmcache_adds_does_not_matter() -> None:
    notifications = Notifications()
    begun = attempt()
    notifications.expect(begun)
    notifications.received(msgspec.msgpack.encode({"type": "ProxyNotif", "req_id": tag(begun), "tp_rank": 3}))
    assert begun.missing is None


async def test_a_message_that_is_too_large_is_not_taken_and_others_are(push: Push) -> None:
    notifications = Watched()
    begun = attempt()
    async with notifications.listening(ANYWHERE) as address:
        expected = notifications.expect(begun)
        push(address).send(notification("x" * 100_000))
        push(address).send(notification(tag(begun)))
        assert await expected.complete(30)
        assert notifications.taken == 1


class Flood:
    """A thread that sends messages for nobody as fast as it can, until told to stop."""

    def __init__(self, socket: zmq.Socket[Any]) -> None:
        self._socket = socket
        self._stop = threading.Event()
        self.sent = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        message = notification("0" * 4000)  # large, so that the kernel's own buffers hold few
        while not self._stop.is_set():
            try:
                self._socket.send(message, zmq.NOBLOCK)
                self.sent += 1
            except zmq.Again:
                self._socket.poll(10, zmq.POLLOUT)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


@pytest.mark.parametrize("loop", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_flood_for_nobody_neither_stops_the_router_nor_the_notifications_of_others(
    push: Push, loop: Callable[..., Any]
) -> None:
    """A socket that always has a message never gives way by itself: the loop would stand still for ever."""

    async def flooded() -> None:
        notifications = Watched()
        async with notifications.listening(ANYWHERE) as address:
            flood = Flood(push(address))
            try:
                await until(lambda: notifications.unexpected > 1000)
                begun = attempt()
                expected = notifications.expect(begun)
                push(address).send(notification(tag(begun)))
                assert await expected.complete(30)
                before = notifications.unexpected
                turns = 0
                while notifications.unexpected < before + 1000:
                    await asyncio.sleep(0)
                    turns += 1
                # Others run more often than messages are taken.
                assert turns > 1000
            finally:
                flood.stop()
            # What was not taken waits with its sender, whose socket takes no more.
            assert flood.sent < notifications.unexpected + 10_000

    loop(flooded())


async def test_a_flood_of_messages_that_are_waited_for_is_not_slowed_down(push: Push) -> None:
    """Only what nobody waits for makes the socket rest."""
    notifications = Watched()
    begun = attempt(ranks=3000)
    async with notifications.listening(ANYWHERE) as address:
        expected = notifications.expect(begun)
        waiting = asyncio.create_task(expected.complete(30))
        rank = push(address)

        def send_all() -> None:
            for _ in range(3000):
                rank.send(notification(tag(begun)))

        await asyncio.to_thread(send_all)
        assert await waiting
    assert notifications.unexpected == 0


# The address


async def test_port_0_takes_a_free_one_and_tells_it() -> None:
    async with Notifications().listening(ANYWHERE) as first, Notifications().listening(ANYWHERE) as second:
        assert first != second
        assert all(a.startswith("127.0.0.1:") and not a.endswith(":0") for a in (first, second))


async def test_an_address_in_use_is_told() -> None:
    async with Notifications().listening(ANYWHERE) as address:
        with pytest.raises(
            OSError, match=f"cannot listen for notifications at {address}: Address already in use"
        ):
            async with Notifications().listening(address):
                pass


@pytest.mark.parametrize("address", ["203.0.113.1:7500", "no-such-interface:7500"])
async def test_an_address_that_is_not_this_machines_is_told(address: str) -> None:
    with pytest.raises(OSError, match=f"cannot listen for notifications at {address}"):
        async with Notifications().listening(address):
            pass


async def test_a_router_whose_notification_address_is_in_use_does_not_start() -> None:
    async with Notifications().listening(ANYWHERE) as address:
        config = RouterConfig(
            port=0,
            decode=("http://127.0.0.1:1",),
            connector="lmcache",
            lmcache_buffer_chunks=8,
            lmcache_receivers=("7300:7400",),
            lmcache_notify=address,
        )
        with pytest.raises(OSError, match="cannot listen for notifications"):
            async with running(config, None):
                pass


async def test_an_ipv6_address_is_listened_at(push: Push) -> None:
    notifications = Watched()
    begun = attempt()
    try:
        async with notifications.listening("[::1]:0") as address:
            assert address.startswith("[::1]:")
            expected = notifications.expect(begun)
            push(address).send(notification(tag(begun)))
            assert await expected.complete(30)
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")


async def test_an_address_is_free_again_when_the_router_has_ended() -> None:
    notifications = Notifications()
    async with notifications.listening(ANYWHERE) as address:
        pass
    async with notifications.listening(address) as again:
        assert again == address


def test_what_waits_knows_only_its_own_attempt() -> None:
    begun, other = attempt(), attempt()
    Expected(begun).deliver()
    assert begun.missing is None
    assert other.missing is not None
