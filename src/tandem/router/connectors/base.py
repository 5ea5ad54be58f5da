"""The interface of a KV connector. No sockets: bytes and values in, bytes and values out.

A connector describes one way to hand KV over; `attempt` begins one hand-off, a small state machine:

    prepare_prefill → on_prefill_reply, on_notification (in any order) → prepare_decode

`prepare_decode` refuses before everything that the connector waits for has come, and a second time: an engine
accepts stale parameters with another prompt and answers from the wrong KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.router.body import Body
from tandem.router.classify import Api
from tandem.router.engines import Engine


class PrefillFailed(Exception):
    """The prefill leg answered, but gave nothing to hand over. `reason` is a metric label."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Claim:
    """A share of something limited on one engine that a hand-off needs before its prefill begins."""

    engine: Engine
    resource: str
    amount: int
    capacity: int
    """All that the engine has of the resource."""


class Attempt(Protocol):
    """One hand-off between one prefiller and one decoder."""

    key: str | None
    """What the notifications of this hand-off carry; None: there are none to wait for."""

    def prepare_prefill(self, api: Api, body: Body) -> bytes:
        """The body of the prefill leg."""

    def on_prefill_reply(self, reply: bytes) -> None:
        """Read the prefill leg's 200 answer. Raises PrefillFailed when it holds no hand-off."""

    def on_prefill_failure(self) -> None:
        """The prefill leg has ended without one: there will be no decode leg, and all that can still come are
        notifications."""

    def on_notification(self) -> None:
        """One rank of the prefiller says that its KV has been written."""

    @property
    def missing(self) -> str | None:
        """What has to come before the decode leg, in words; None when it may be sent."""

    def prepare_decode(self, api: Api, body: Body) -> bytes:
        """The body of the decode leg, once. RuntimeError when something is missing, or the second time."""

    def prepare_release(self, api: Api, body: Body) -> bytes | None:
        """The body of a request to the decoder that frees what an unused hand-off holds there; None when
        nothing stays there, or it frees itself."""


class Connector(Protocol):
    """One way to hand KV over, as one router is configured for it."""

    counts: bool
    """Whether a prompt's tokens must be known before its hand-off begins."""
    pushes: bool
    """The prefiller writes into the decoder: a prefill leg that has begun must not be cancelled, and what
    nobody reads must be released."""
    survives_decoder_restart: bool
    """Whether a prefiller finds a decoder again that came back as another process at the same address."""

    @property
    def longest(self) -> int | None:
        """Tokens of the longest prompt that can be handed over; None: of any."""

    def reservation(self, tokens: int, decoder: Engine) -> Sequence[Claim]:
        """What a prompt of so many tokens needs on a decoder before its prefill begins."""

    def attempt(self, decoder: Engine) -> Attempt:
        """Begin a hand-off to this decoder."""
