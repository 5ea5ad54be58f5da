"""Notifications of prefillers that KV has been written (LMCache PD): who waits for which.

They come as msgpack maps `{"type": "ProxyNotif", "req_id": …}` on a ZMQ PULL socket, one from each rank of a
prefiller. The socket is reached without authentication, so nothing is done about an id that nobody waits for,
and ids cannot be guessed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import msgspec
import zmq
import zmq.asyncio

from tandem.router.connectors import Attempt

logger = logging.getLogger("tandem.router")

_LARGEST = 4096  # bytes of a message; a real one has about 60
_PENDING = 1000  # messages in the socket's own queue, for each sender

# Messages taken in one go, and seconds of rest behind as many that nobody waits for: whoever floods the
# socket is slowed down (ZMQ serves senders in turn, so the others are not), and the router goes on.
_TURN = 64
_REST = 0.01


class _ProxyNotif(msgspec.Struct, tag_field="type", tag="ProxyNotif"):
    req_id: str


_decoder = msgspec.msgpack.Decoder(_ProxyNotif)


class Expected:
    """What one hand-off waits for."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._came = asyncio.Event()

    def deliver(self) -> None:
        self._attempt.on_notification()
        self._came.set()

    async def complete(self, timeout: float) -> bool:
        """Wait until the attempt misses nothing, at most `timeout` seconds. False: it still does."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self._attempt.missing is not None:
                    self._came.clear()
                    await self._came.wait()
        return self._attempt.missing is None


class Notifications:
    def __init__(self) -> None:
        self._expected: dict[str, Expected] = {}
        self.unexpected = 0
        """Messages that nobody waited for, or that were none."""

    def expect(self, attempt: Attempt) -> Expected:
        """Take notifications for an attempt from now on, until `forget`: begin before its prefill leg."""
        expected = Expected(attempt)
        if attempt.key is not None:
            self._expected[attempt.key] = expected
        return expected

    def forget(self, attempt: Attempt) -> None:
        if attempt.key is not None:
            self._expected.pop(attempt.key, None)

    @property
    def expected(self) -> int:
        """Hand-offs that wait."""
        return len(self._expected)

    def received(self, message: bytes) -> None:
        """One message from the socket."""
        try:
            expected = self._expected.get(_decoder.decode(message).req_id)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            expected = None
        if expected is None:
            self.unexpected += 1
            logger.debug("a notification that nobody waits for: %r", message[:100])
        else:
            expected.deliver()

    @asynccontextmanager
    async def listening(self, address: str) -> AsyncIterator[str]:
        """Listen at `host:port` inside the block; yields where, with the port taken for port 0.

        Raises OSError when that is not possible.
        """
        with zmq.asyncio.Context() as context:
            socket = context.socket(zmq.PULL)
            socket.setsockopt(zmq.MAXMSGSIZE, _LARGEST)
            socket.setsockopt(zmq.RCVHWM, _PENDING)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IPV6, address.startswith("["))
            try:
                socket.bind(f"tcp://{address}")
            except zmq.ZMQError as error:
                socket.close()
                raise OSError(error.errno, f"cannot listen for notifications at {address}: {error}") from None
            bound = socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")
            task = asyncio.create_task(self._receive(socket))
            try:
                yield bound
            finally:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
                socket.close()

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            before = self.unexpected
            for _ in range(_TURN):
                try:
                    self.received(await socket.recv())
                except zmq.ZMQError:
                    logger.exception("a notification could not be received")
                    await asyncio.sleep(_REST)
            # A message that is there already is received without giving way to other tasks.
            await asyncio.sleep(_REST if self.unexpected - before > _TURN // 2 else 0)
