"""The interface of a KV connector. No sockets: bytes and values in, bytes and values out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec

from tandem.router.body import Body
from tandem.router.classify import Api


class PrefillFailed(Exception):
    """The prefill leg answered, but gave nothing to hand over. `reason` is a metric label."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True)
class Handoff:
    """What a prefill leg leaves for one decode leg. Spent when used: parameters are never sent twice,
    since an engine accepts stale ones with another prompt and answers from the wrong KV."""

    params: msgspec.Raw
    _spent: bool = False

    def spend(self) -> msgspec.Raw:
        if self._spent:
            raise RuntimeError("hand-off parameters must not be used twice")
        self._spent = True
        return self.params


class Connector(Protocol):
    """One attempt to serve a request on a prefiller and a decoder; a second attempt has its own."""

    def prepare_prefill(self, api: Api, body: Body) -> bytes:
        """The body of the prefill leg."""
        ...

    def on_prefill_reply(self, reply: bytes) -> Handoff:
        """Read the prefill leg's 200 answer. Raises PrefillFailed when it holds no hand-off."""
        ...

    def prepare_decode(self, api: Api, body: Body, handoff: Handoff) -> bytes:
        """The body of the decode leg."""
        ...
