"""How a sender tells the router that KV has been written: msgpack over ZMQ, in LMCache's own encoding."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import zmq

logger = logging.getLogger("tandem.sim")


class ProxyNotif(msgspec.Struct, tag=True):
    """LMCache's message of the same name. `req_id` is the disagg_spec's, whatever its type."""

    req_id: Any


def encoded(req_id: Any) -> bytes:
    return msgspec.msgpack.encode(ProxyNotif(req_id))


class Push:
    """A ZMQ PUSH socket. Messages wait for a router that does not listen yet, up to ZMQ's limit of 1,000."""

    def __init__(self, url: str) -> None:
        """Raises OSError."""
        context: zmq.Context[Any] = zmq.Context.instance()
        self._url = url
        self._socket = context.socket(zmq.PUSH)
        try:
            self._socket.connect(url)
        except zmq.ZMQError as error:
            self.close()
            raise OSError(f"LMCache: cannot notify {url}: {error}") from None

    def send(self, message: bytes) -> None:
        """Never waits: LMCache's own thread would, with all writes behind it."""
        try:
            self._socket.send(message, zmq.NOBLOCK)
        except zmq.Again:
            logger.error("nobody takes notifications at %s: one is lost", self._url)

    def close(self) -> None:
        self._socket.close(linger=0)
