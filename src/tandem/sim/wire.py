"""An answer on its way to the client, and the faults that befall it there."""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import replace

from tandem.http import Headers, Responder
from tandem.sim.clock import Clock
from tandem.sim.faults import Fault
from tandem.sim.protocol import encode
from tandem.sim.refusal import internal_error
from tandem.sim.render import DONE, error_event

JSON: Headers = [(b"content-type", b"application/json")]

_ERROR = error_event(internal_error().body())


class Broken(Exception):
    """A fault ended the answer; nothing more is to be sent."""


class Wire:
    """Sends one answer through a responder. `head` are fields that every answer has."""

    def __init__(self, responder: Responder, clock: Clock, head: Headers) -> None:
        self._responder = responder
        self._clock = clock
        self._head = head
        self._faults: list[Fault] = []
        self._chunks = 0
        self._waiting: list[bytes] | None = None  # while a delay lasts
        self._ending = False
        self.over = asyncio.get_running_loop().create_future()
        """Done when the answer was sent, or broken."""

    @property
    def status(self) -> int:
        return self._responder.status or 0

    @property
    def sent(self) -> int:
        return self._responder.bytes_sent

    def add(self, *fields: tuple[bytes, bytes]) -> None:
        """Header fields of this answer."""
        self._head = [*self._head, *fields]

    async def begin(self, faults: list[Fault], *, stream: bool) -> None:
        """What befalls the answer before its first byte. Raises Broken. Later faults are kept for then."""
        self._faults = [f for f in faults if f.chunk is not None and (stream or f.kind != "delay")]
        for fault in faults:
            if fault.chunk is not None and (stream or fault.kind != "delay"):
                continue
            match fault.kind:
                case "delay":
                    await self._clock.sleep(fault.value)
                case "hang":
                    await asyncio.get_running_loop().create_future()
                case "status":
                    self.send(int(fault.value), internal_error().body())
                    raise Broken
                case "head":
                    self._responder.start(int(fault.value), [*self._head, *JSON])
                    self._cut()
                    raise Broken
                case "reset":
                    self._reset()
                    raise Broken
                case "crash":
                    self._cut()
                    raise Broken
                case _:
                    # Needs a body to break: at its very beginning.
                    self._faults.insert(0, replace(fault, chunk=0))

    def send(self, status: int, body: object) -> None:
        """A whole answer, JSON unless it is bytes."""
        data = body if isinstance(body, bytes) else encode(body)
        fields = [*self._head, *(() if isinstance(body, bytes) else JSON)]
        if self._faults and status == 200:
            self._send_broken(self._faults[0], fields, data)
        else:
            self._responder.send(status, fields, data)
            self._done()

    def start(self) -> None:
        """Begin a stream."""
        self._responder.start(200, [*self._head, (b"content-type", b"text/event-stream; charset=utf-8")])

    def write(self, event: bytes) -> None:
        """One event of a stream."""
        if self._waiting is not None:
            self._waiting.append(event)
        elif not self._faults or self._chunks < (self._faults[0].chunk or 0):
            self._chunks += 1
            self._responder.write(event)
        elif not self.over.done():
            self._strike(self._faults.pop(0), event)

    def end(self, last: bytes = b"") -> None:
        """The stream's last bytes."""
        if last:
            self.write(last)
        self._ending = True
        if self._waiting is None and not self.over.done():
            self._responder.finish()
            self._done()

    # Faults

    def _strike(self, fault: Fault, event: bytes) -> None:
        match fault.kind:
            case "delay" | "hang":
                self._waiting = [event]
                if fault.kind == "delay":
                    self._clock.at(self._clock.now() + fault.value, self._resume)
            case "error":
                self._responder.write(_ERROR + DONE)
                self._responder.finish()
                self._done()
            case "badjson":
                self._chunks += 1
                self._responder.write(event[: max(len(event) // 2, 8)].rstrip() + b"\n\n")
            case "truncate":
                # The chunk says it is longer than it is.
                half = event[: len(event) // 2]
                self._transport.write(b"%x\r\n%b" % (len(event), half))
                self._cut()
            case "reset":
                self._reset()
            case _:
                self._cut()

    def _resume(self) -> None:
        waiting, self._waiting = self._waiting or [], None
        for event in waiting:
            self.write(event)  # which waits again where there is another delay
        if self._ending:
            self.end()

    def _send_broken(self, fault: Fault, fields: Headers, data: bytes) -> None:
        """A whole answer, of which a fault lets through a part."""
        match fault.kind:
            case "error":
                self._responder.send(200, fields, encode(internal_error().body()))
                self._done()
            case "badjson":
                self._responder.send(200, fields, data[: len(data) // 2])
                self._done()
            case _:
                self._responder.start(200, fields)
                self._responder.write(data[: len(data) // 2])
                if fault.kind == "reset":
                    self._reset()
                elif fault.kind != "hang":
                    self._cut()

    def _cut(self) -> None:
        self._responder.abort() if self._responder.started else self._transport.close()
        self._responder.client_left()
        self._done()

    def _reset(self) -> None:
        # Not an orderly close: the peer's kernel reports "connection reset".
        sock = self._transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()
        self._responder.client_left()
        self._done()

    @property
    def _transport(self) -> asyncio.Transport:
        # A responder keeps answers whole, which is just what is not wanted here.
        return self._responder._transport

    def _done(self) -> None:
        if not self.over.done():
            self.over.set_result(None)
