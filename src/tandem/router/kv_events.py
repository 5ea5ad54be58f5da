"""Subscriptions to engines' KV events over ZMQ, which feed a `KvIndex`.

The work is done on the event loop, where streams are relayed too: a thread would hold the interpreter for 5
ms at a time, and a process would have to be asked for each request. So it is done in slices of a fraction of
a millisecond, and the loop turns in between.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator

import zmq

from tandem.config import Subscription
from tandem.router.engines import Engine
from tandem.router.strategies.kv_index import KvIndex, Rank
from tandem.router.strategies.kv_sequence import Forget, Sequence
from tandem.router.strategies.kv_wire import MOST_BYTES, Work, pieces

logger = logging.getLogger("tandem.router")

SLICE = 0.00025
"""Seconds of work in one turn of the loop, before the piece that is begun is finished."""
_NUMBER_BYTES = 8
_END = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)
_QUEUED = 10_000  # batches that wait in ZMQ; what overflows is a gap, and is replayed
_MOST_BYTES = 4 * MOST_BYTES  # of a message: ZMQ drops a connection that sends more
_TIDIED = 512
_NOTHING: Work = lambda index, rank: None  # noqa: E731
_SOCKETS = 65_535  # the most that ZMQ allows; a publisher takes one, and another during a replay


class SharedEndpoint(ValueError):
    """Two engines are said to publish at one endpoint: what is heard there is not known to be whose."""

    def __init__(self, endpoint: str, other: Engine) -> None:
        super().__init__(f"{endpoint} is where those of {other.url} come from")


class Subscriber:
    """All subscriptions of a router. To be made and used on the event loop."""

    def __init__(
        self,
        index: KvIndex,
        *,
        replay_timeout: float = 5.0,
        second_look: float = 1.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`replay_timeout`: seconds without another batch after which a replay is given up. `second_look`:
        seconds after a first replay in which the subscription is surely connected; what was published after
        the one and before the other is asked for then."""
        self._index = index
        self.replay_timeout = replay_timeout
        self.second_look = second_look
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _SOCKETS)
        self._feeds: dict[Engine, list[_Feed]] = {}
        self._endpoints: dict[str, Engine] = {}
        self._ready: deque[_Feed] = deque()
        self._turn: asyncio.Handle | None = None
        self._past: Counter[str] = Counter()
        self.batches = 0
        self.unread = 0
        """Events, or whole batches, that could not be read."""

    def add(self, engine: Engine, subscription: Subscription) -> None:
        """Begin to follow an engine. Raises SharedEndpoint for one of another engine's, ValueError or
        zmq.ZMQError for an endpoint that cannot be."""
        wanted = subscription.endpoints
        for endpoint in sorted(wanted):
            if (other := self._endpoints.get(endpoint)) is not None:
                raise SharedEndpoint(endpoint, other)
        feeds: list[_Feed] = []
        try:
            for number in range(subscription.ranks):
                events, replay = subscription.of(number)
                feeds.append(_Feed(self, engine, number, events, replay))
        except (ValueError, zmq.ZMQError):
            for feed in feeds:
                feed.close()
            raise
        self._feeds.setdefault(engine, []).extend(feeds)
        self._endpoints.update(dict.fromkeys(wanted, engine))

    def remove(self, engine: Engine) -> None:
        for endpoint in [each for each, of in self._endpoints.items() if of is engine]:
            del self._endpoints[endpoint]
        for feed in self._feeds.pop(engine, ()):
            self._past += feed.sequence.counts
            feed.close()
        self._index.forget(engine)

    def restarted(self, engine: Engine) -> None:
        """An engine is known to be another process. (Its events tell as well, nearly always.)"""
        for feed in self._feeds.get(engine, ()):
            feed.restarted()

    @property
    def counts(self) -> Counter[str]:
        """gap, lost (not filled), restart, replayed (batches)."""
        return sum((f.sequence.counts for feeds in self._feeds.values() for f in feeds), self._past.copy())

    @property
    def idle(self) -> bool:
        """Whether all that has come is in the index, and no replay is under way."""
        waiting = any(f.sequence.ask is not None for feeds in self._feeds.values() for f in feeds)
        return not self._ready and not waiting

    def close(self) -> None:
        for engine in list(self._feeds):
            self.remove(engine)
        if self._turn is not None:
            self._turn.cancel()
        self._context.destroy(linger=0)

    def wake(self, feed: _Feed) -> None:
        if not feed.queued:
            feed.queued = True
            self._ready.append(feed)
        if self._turn is None:
            self._turn = self._loop.call_soon(self._work)

    def _work(self) -> None:
        """One slice, a piece of each engine in turn."""
        self._turn = None
        until = self._clock() + SLICE
        while self._ready:
            feed = self._ready.popleft()
            if feed.step(self._index):
                self._ready.append(feed)
            else:
                feed.queued = False
            if self._clock() >= until:
                break
        else:
            if not self._index.tidy(_TIDIED):
                return
        self._turn = self._loop.call_soon(self._work)

    def later(self, seconds: float, then: Callable[[], None]) -> asyncio.TimerHandle:
        return self._loop.call_later(seconds, then)

    def watch(self, socket: zmq.Socket[bytes], then: Callable[[], None]) -> None:
        self._loop.add_reader(socket.fileno(), then)

    def unwatch(self, socket: zmq.Socket[bytes]) -> None:
        self._loop.remove_reader(socket.fileno())

    def socket(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        try:
            socket.setsockopt(zmq.RCVHWM, _QUEUED)
            socket.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
            socket.setsockopt(zmq.LINGER, 0)
            # Not for names: one with addresses of both would be looked for at the other one, while vLLM's
            # tcp://* is IPv4.
            socket.setsockopt(zmq.IPV6, int("[" in endpoint))
            if kind == zmq.SUB:
                socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.connect(endpoint)
        except zmq.ZMQError:
            socket.close()
            raise
        return socket


class _Feed:
    """One publisher: its two sockets, and the work that its batches are."""

    def __init__(
        self, subscriber: Subscriber, engine: Engine, number: int, events: str, replay: str | None
    ) -> None:
        self._subscriber = subscriber
        self._engine = engine
        self._number = number
        self._replay_endpoint = replay
        self._rank: Rank | None = None
        self._todo: Iterator[Work | None] = iter(())
        self._answers: zmq.Socket[bytes] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._check: asyncio.TimerHandle | None = None
        self._said = False
        self._closed = False
        self.queued = False
        self.sequence = Sequence(replays=replay is not None)
        if replay is not None:  # whether it can be connected to is to be found out now
            subscriber.socket(zmq.DEALER, replay).close()
        self._events = subscriber.socket(zmq.SUB, events)
        subscriber.watch(self._events, self._readable)
        subscriber.wake(self)

    def step(self, index: KvIndex) -> bool:
        """Do one piece of work. False: there is none."""
        if self._closed:
            return False
        if (work := next(self._todo, _NOTHING)) is not _NOTHING:
            if self._rank is None:
                self._rank = index.follow(self._engine, self._number)
            if work is None:
                self._unread(self._rank)
            else:
                work(index, self._rank)
        elif self.sequence.out:
            self._next(index, self.sequence.out.popleft())
        elif self.sequence.ask is not None and self._answers is None:
            self._ask(self.sequence.ask)
        else:
            return self._receive()
        return True

    def restarted(self) -> None:
        self._todo = iter(())
        self._end_replay()
        self.sequence.restarted()
        self._subscriber.wake(self)

    def close(self) -> None:
        self._todo = iter(())
        self.sequence.out.clear()
        self._end_replay()
        if self._check is not None:
            self._check.cancel()
        self._subscriber.unwatch(self._events)
        self._events.close(linger=0)
        self._closed = True

    def _next(self, index: KvIndex, item: bytes | Forget) -> None:
        if isinstance(item, Forget):
            self._rank = index.follow(self._engine, self._number, complete=item.complete)
            return
        self._subscriber.batches += 1
        self._todo = pieces(item)

    def _unread(self, rank: Rank | None) -> None:
        self._subscriber.unread += 1
        if rank is not None:
            rank.note(unread=True)
        if not self._said:
            self._said = True
            logger.warning("%s sends KV events that cannot be read; this is logged once", self._engine.url)

    def _receive(self) -> bool:
        try:
            if self._answers is not None:
                self._answer(self._answers.recv_multipart(zmq.NOBLOCK))
                return True
        except zmq.Again:
            pass
        try:
            frames = self._events.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        if len(frames) == 3 and len(frames[1]) == _NUMBER_BYTES:
            self.sequence.live(int.from_bytes(frames[1], "big"), frames[2])
        else:
            self._unread(self._rank)
        return True

    def _ask(self, first: int) -> None:
        assert self._replay_endpoint is not None
        try:
            self._answers = self._subscriber.socket(zmq.DEALER, self._replay_endpoint)
        except zmq.ZMQError as error:  # there is no file descriptor left
            logger.error("KV events of %s cannot be replayed: %s", self._engine.url, error)
            self.sequence.replay_failed()
            return
        self._subscriber.watch(self._answers, self._readable)
        self._answers.send_multipart([b"", first.to_bytes(_NUMBER_BYTES, "big")], zmq.NOBLOCK)
        self._wait()

    def _answer(self, frames: list[bytes]) -> None:
        if len(frames) != 4 or len(frames[2]) != _NUMBER_BYTES:
            return
        if frames[2] != _END:
            self._wait()
            self.sequence.replayed(int.from_bytes(frames[2], "big"), frames[3])
            if not self.sequence.replay_is_over:
                return
        self._end_replay()
        if self.sequence.fresh and self._check is None:
            self._check = self._subscriber.later(self._subscriber.second_look, self._look_again)
        self.sequence.replay_ended()

    def _look_again(self) -> None:
        self._check = None
        self.sequence.check()
        self._subscriber.wake(self)

    def _wait(self) -> None:
        """For the next batch of a replay."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._subscriber.later(self._subscriber.replay_timeout, self._give_up)

    def _give_up(self) -> None:
        self._end_replay()
        self.sequence.replay_failed()
        self._subscriber.wake(self)

    def _end_replay(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._answers is not None:
            self._subscriber.unwatch(self._answers)
            self._answers.close(linger=0)
            self._answers = None

    def _readable(self) -> None:
        # ZMQ's descriptor only says that something has changed, and says it until its events are asked for.
        for socket in (self._events, self._answers):
            if socket is not None:
                socket.getsockopt(zmq.EVENTS)
        self._subscriber.wake(self)
