"""Clients that cost little: streamed chats, when their answers came, and whether they came whole.

What comes is kept as it comes, and looked at only when the answer has ended.
"""

from __future__ import annotations

import asyncio
import gc
import random
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

PATH = "/v1/chat/completions"
_HEAD = f"POST {PATH} HTTP/1.1\r\nhost: 127.0.0.1:%d\r\ncontent-type: application/json\r\n".encode()
_END = b"\r\n0\r\n\r\n"
_SIZE = re.compile(rb"([0-9a-fA-F]+)[^\r\n]*\r\n")


@dataclass(slots=True)
class Answer:
    """Times are of `time.perf_counter`; 0: that never came."""

    sent: float
    first: float = 0.0
    """When the first byte came."""
    ended: float = 0.0
    pieces: list[bytes] = field(default_factory=list)
    fault: str = ""
    """What is wrong with it."""


def fault(data: bytes, tokens: int) -> str:
    """What is wrong with an answer that should be a chat's stream of so many tokens; else ""."""
    head, _, body = data.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200 "):
        status, said = head.partition(b"\r\n")[0], body[:200]
        return f"{status.decode('latin-1') or 'no answer'} {said.decode('utf-8', 'replace')}".strip()
    if b"transfer-encoding: chunked" not in head.lower():
        return "an answer that is no stream"
    text = _unchunked(body)
    if text is None or not text.endswith(b"data: [DONE]\n\n"):
        return "broken off"
    found = text.count(b"data: {") - 1  # the first event is the role
    return "" if found == tokens else f"{found} tokens instead of {tokens}"


def _unchunked(body: bytes) -> bytes | None:
    """None: it is not whole."""
    parts: list[bytes] = []
    at = 0
    while size := _SIZE.match(body, at):
        begin, length = size.end(), int(size[1], 16)
        if length == 0:
            return b"".join(parts)
        parts.append(body[begin : begin + length])
        at = begin + length + 2
    return None


class _Connection(asyncio.Protocol):
    """One answer at a time."""

    def __init__(self) -> None:
        self.usable = True
        self._answer: Answer | None = None
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    async def ask(self, message: bytes) -> Answer:
        done: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._done = done
        self._answer = Answer(time.perf_counter())
        self._transport.write(message)
        return await done

    def data_received(self, data: bytes) -> None:
        if (answer := self._answer) is None:  # nobody asked
            self.close()
            return
        if not answer.pieces:
            answer.first = time.perf_counter()
            self.usable = b" 200 " in data[:16]  # else its end is not looked for
        answer.pieces.append(data)
        self._tail = data if len(data) >= len(_END) else (self._tail + data)[-len(_END) :]
        if self._tail.endswith(_END) or not self.usable:
            self._ended(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        if self._answer is not None:
            self._ended(self._answer)

    def close(self) -> None:
        self.usable = False
        self._transport.abort()

    def _ended(self, answer: Answer) -> None:
        self._answer, self._tail = None, b""
        answer.ended = time.perf_counter()
        if not self._done.done():
            self._done.set_result(answer)


class Clients:
    """Users of one port, each of whom wants so many tokens. Connections are kept for the next request."""

    def __init__(self, port: int, tokens: int) -> None:
        self.answers: list[Answer] = []
        """Those that have ended; what came is not kept."""
        self._port = port
        self._tokens = tokens
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()

    async def ask(self, body: bytes) -> Answer:
        """One answer, whatever comes; over the connection that was used last."""
        try:
            connection = await self._connection()
        except OSError as error:
            answer = Answer(time.perf_counter(), fault=f"cannot connect: {error}")
            self.answers.append(answer)
            return answer
        answer = await connection.ask(_HEAD % self._port + b"content-length: %d\r\n\r\n" % len(body) + body)
        answer.fault = fault(b"".join(answer.pieces), self._tokens)
        answer.pieces = []
        self.answers.append(answer)
        if connection.usable and not answer.fault:
            self._idle.append(connection)
        else:
            connection.close()
            self._all.discard(connection)
        return answer

    async def in_turn(self, users: int, bodies: Iterable[bytes], *, over: float = 0.0) -> None:
        """So many users at once, each of whom asks again when answered. They come one by one over some
        seconds, lest their streams go in step."""
        rest = iter(bodies)

        async def user(number: int) -> None:
            await asyncio.sleep(over * number / users)
            for body in rest:
                await self.ask(body)

        async with asyncio.TaskGroup() as group:
            for number in range(users):
                group.create_task(user(number))

    async def at_rate(self, rate: float, bodies: Iterable[bytes], *, seed: int | None = None) -> None:
        """So many new requests a second, whatever becomes of those before: evenly, or at random times."""
        chance = random.Random(seed)
        due = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for body in bodies:
                await asyncio.sleep(due - time.perf_counter())
                group.create_task(self.ask(body))
                due += 1 / rate if seed is None else chance.expovariate(rate)

    def close(self) -> None:
        for connection in self._all:
            connection.close()

    async def _connection(self) -> _Connection:
        while self._idle:
            if (found := self._idle.pop()).usable:
                return found
            self._all.discard(found)
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(_Connection, "127.0.0.1", self._port)
        self._all.add(made)
        return made


@contextmanager
def without_pauses() -> Iterator[None]:
    """No garbage collection within the block: of thousands of answers it would take as long as a router."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
