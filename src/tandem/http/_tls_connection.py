"""TLS between a socket's transport and a connection that speaks plain bytes.

Not asyncio's own: that makes a connection known only after its handshake, so that those which never finish it
are neither counted nor timed; and it cannot half-close, so that a client which is still sending would not
see why its request was refused.
"""

import asyncio
import logging
import ssl
from contextlib import suppress
from typing import Any, cast

log = logging.getLogger("tandem.http")

_AT_ONCE = 256 * 1024
"""Bytes that are encrypted, or decrypted, in one go."""


class TlsStream:
    """The server's side of TLS, without any I/O: what is received goes in, what is to be sent comes out."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self.established = False
        """Whether the handshake is done."""
        self.peer_ended = False
        """Whether the peer has said that it sends no more."""

    def receive(self, data: bytes) -> bytes:
        """Take what came; return what it holds for the application. Raises `ssl.SSLError`."""
        self._incoming.write(data)
        plain = bytearray()
        try:
            if not self.established:
                self._tls.do_handshake()
                self.established = True
            while piece := self._tls.read(_AT_ONCE):
                plain += piece
            self.peer_ended = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self.peer_ended = True
        return bytes(plain)

    def send(self, data: bytes | memoryview) -> None:
        """Have data sent, at most `_AT_ONCE` bytes of it, once the handshake is done."""
        while data:
            data = data[self._tls.write(data) :]

    def end(self) -> None:
        """Say that no more will be sent."""
        with suppress(ssl.SSLError):  # the peer has not said the same yet, and need not
            self._tls.unwrap()

    def to_send(self) -> bytes:
        """What is to be sent now."""
        return self._outgoing.read()


class TlsConnection(asyncio.Protocol, asyncio.Transport):
    """The protocol of a socket, and the transport of the connection on top.

    The connection is made with the socket's, before the handshake: who dawdles over that has no more time
    than who dawdles over a request. What is written before it is done goes out after it.
    """

    def __init__(self, context: ssl.SSLContext, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._stream = TlsStream(context)
        self._protocol = protocol
        self._early = bytearray()  # written before the handshake was done
        self._ended = False  # no more is sent
        self._reading = True
        self._wanted = True  # by the connection on top
        self._congested = False

    # What the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._protocol.connection_made(self)

    def data_received(self, data: bytes) -> None:
        if self._ended and self._stream.established:
            return
        fresh = not self._stream.established
        try:
            plain = self._stream.receive(data)
        except ssl.SSLError as error:
            log.debug("TLS with %s failed: %s", self.get_extra_info("peername"), error.reason or error)
            self._flush()  # the alert, which says why
            self.eof_received()  # now: it may be long until the client has taken what it has not yet
            self._transport.close()
            return
        if fresh and self._stream.established:
            self._send_early()
        self._flush()
        if plain and not self._ended:
            self._protocol.data_received(plain)
        if self._stream.peer_ended:
            self.eof_received()
            self.close()

    def eof_received(self) -> None:
        self._protocol.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        # A peer can have TLS answer it without any end; so it is not heard while it does not listen.
        self._congested = True
        self._set_reading()
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._congested = False
        self._set_reading()
        self._protocol.resume_writing()

    # What the connection on top calls

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._ended:
            return
        if not self._stream.established:
            self._early += data
            return
        view = memoryview(data)
        for start in range(0, len(view), _AT_ONCE):
            if self._transport.is_closing():
                return
            self._stream.send(view[start : start + _AT_ONCE])
            self._flush()

    def write_eof(self) -> None:
        if not self._ended:
            self._ended = True
            if self._stream.established:
                self._end()

    def close(self) -> None:
        if self._stream.established and not self._ended:
            self._ended = True
            self._stream.end()
            self._flush()
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        self._wanted = False
        self._set_reading()

    def resume_reading(self) -> None:
        self._wanted = True
        self._set_reading()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._transport.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    # Inside

    def _send_early(self) -> None:
        early, self._early = bytes(self._early), bytearray()
        self._stream.send(early)
        if self._ended:
            self._end()

    def _end(self) -> None:
        self._stream.end()
        self._flush()
        self._transport.write_eof()

    def _flush(self) -> None:
        if data := self._stream.to_send():
            self._transport.write(data)

    def _set_reading(self) -> None:
        wanted = self._wanted and not self._congested
        if wanted != self._reading and not self._transport.is_closing():
            self._reading = wanted
            if wanted:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()
