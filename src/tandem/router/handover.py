"""One hand-off at work: its reservation, its prefill leg, its notifications, and what is left to clean up.

What a prefiller pushes lies in the decoder's buffer until somebody reads it. So with such a connector a
prefill leg goes on when its client leaves, and a hand-off that was not used is read by a request of one
token; until then its reservation is held.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from itertools import chain, repeat
from typing import Any
from weakref import WeakKeyDictionary

from tandem.http import Headers
from tandem.router.body import Body
from tandem.router.budgets import Reservation
from tandem.router.classify import Api
from tandem.router.connectors import Connector, PrefillFailed
from tandem.router.engines import Engine, Fleet, State
from tandem.router.legs import LegFailed, Legs
from tandem.router.notifications import Expected, Notifications

logger = logging.getLogger("tandem.router")

# Seconds for a decoder to notice that a decode leg was cancelled, before its KV is released: LMCache's
# receiver dies when two requests look the same chunks up before one has read them.
_SETTLE = 1.0

# Seconds between two tries to release what lies on a decoder that cannot be reached; the last one repeats.
_PAUSES = (0.5, 1.0, 2.0, 5.0, 10.0)


class Handovers:
    """All hand-offs of one router."""

    def __init__(
        self,
        connector: Connector,
        legs: Legs,
        fleet: Fleet,
        notifications: Notifications,
        *,
        notification_timeout: float,
        release_timeout: float = 60.0,
        settle: float = _SETTLE,
    ) -> None:
        self.connector = connector
        self.legs = legs
        self.notifications = notifications
        self.notification_timeout = notification_timeout
        self.release_timeout = release_timeout
        self.settle = settle
        self._fleet = fleet
        self._tasks: set[asyncio.Task[Any]] = set()
        # A release finds its KV there, as a rule; where it does not, the decoder computes a whole prompt.
        self._releasing: WeakKeyDictionary[Engine, asyncio.Lock] = WeakKeyDictionary()

    @property
    def cleaning_up(self) -> int:
        """Hand-offs that nobody uses and that still hold something."""
        return len(self._tasks)

    @asynccontextmanager
    async def begin(
        self, api: Api, body: Body, prefiller: Engine, decoder: Engine, reservation: Reservation
    ) -> AsyncIterator[Handover]:
        """A hand-off inside the block. What it still holds at the end is cleaned up in the background."""
        handover = Handover(self, api, body, prefiller, decoder, reservation)
        try:
            yield handover
        finally:
            if handover.dirty:
                self.spawn(handover.clean_up())
            else:
                handover.forget()

    async def aclose(self) -> None:
        """Stop cleaning up: what is left stays where it is."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def lock(self, decoder: Engine) -> asyncio.Lock:
        """To be held while something is released on a decoder: one at a time."""
        return self._releasing.setdefault(decoder, asyncio.Lock())

    def knows(self, engine: Engine) -> bool:
        return engine in self._fleet.engines

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class Handover:
    def __init__(
        self,
        owner: Handovers,
        api: Api,
        body: Body,
        prefiller: Engine,
        decoder: Engine,
        reservation: Reservation,
    ) -> None:
        self._owner = owner
        self._api = api
        self._body = body
        self._prefiller = prefiller
        self._decoder = decoder
        self._reservation = reservation
        self._attempt = owner.connector.attempt(decoder)
        self._expected: Expected | None = None
        self._leg: asyncio.Task[bytes] | None = None
        self._headers: Headers = []
        self._decoding = False
        self.dirty = False
        """Whether something may lie on the decoder that nobody has read."""

    async def prefill(self, headers: Headers, *, tokens: int, timeout: float) -> None:
        """Run the prefill leg and wait for all that must come before the decode leg.

        `tokens` of prompt are computed; `timeout` is the longest wait for the answer, in seconds. Raises
        LegFailed or PrefillFailed.
        """
        body = self._attempt.prepare_prefill(self._api, self._body)
        call = self._call_prefiller(body, headers, tokens, timeout)
        if not self._owner.connector.pushes:
            self._attempt.on_prefill_reply(await call)
            return
        self._headers = headers
        self._expected = self._owner.notifications.expect(self._attempt)
        self.dirty = True
        self._leg = self._owner.spawn(call)
        self._attempt.on_prefill_reply(await asyncio.shield(self._leg))
        if not await self._expected.complete(self._owner.notification_timeout):
            raise PrefillFailed("no_notification", f"{self._attempt.missing} did not come")

    def decode_body(self) -> bytes:
        """The body of the decode leg. Once only."""
        self._decoding = True
        return self._attempt.prepare_decode(self._api, self._body)

    def taken(self) -> None:
        """The decoder has read the KV: nothing of it is left there."""
        self.dirty = False
        self.forget()

    def forget(self) -> None:
        """Let go of what this router holds for the hand-off."""
        self._owner.notifications.forget(self._attempt)
        self._reservation.release()

    async def clean_up(self) -> None:
        """See that nothing is left on the decoder."""
        try:
            if await self._has_begun():
                await self._release()
        finally:
            self.forget()

    async def _call_prefiller(self, body: bytes, headers: Headers, tokens: int, timeout: float) -> bytes:
        with self._prefiller.busy(tokens):
            return await self._owner.legs.call(
                self._prefiller, "POST", self._api.value, body, headers, head_timeout=timeout
            )

    async def _has_begun(self) -> bool:
        """Wait for the prefill leg's end. False: it cannot have written anything."""
        assert self._leg is not None
        assert self._expected is not None
        try:
            self._attempt.on_prefill_reply(await self._leg)
        except LegFailed as failure:
            rejected = failure.reply is not None and failure.reply.status < 500
            return not failure.unreachable and not rejected
        if not await self._expected.complete(self._owner.notification_timeout):
            logger.warning("KV from %s: %s did not come", self._prefiller.url, self._attempt.missing)
        return True

    async def _release(self) -> None:
        """Read what lies on the decoder with a request of one token, now or when it is back. A decoder that
        was removed, or is another process now, holds nothing."""
        body = self._attempt.prepare_release(self._api, self._body)
        if body is None:
            return
        if self._decoding:
            await asyncio.sleep(self._owner.settle)
        life = self._decoder.life
        headers = [(n, v + b"-release" if n == b"x-request-id" else v) for n, v in self._headers]
        for pause in chain(_PAUSES, repeat(_PAUSES[-1])):
            if self._decoder.state is not State.WAITING:
                async with self._owner.lock(self._decoder):
                    try:
                        await self._owner.legs.call(
                            self._decoder,
                            "POST",
                            self._api.value,
                            body,
                            headers,
                            head_timeout=self._owner.release_timeout,
                        )
                        return
                    except LegFailed as failure:
                        logger.warning("KV on %s is not released yet: %s", self._decoder.url, failure)
            await asyncio.sleep(pause)
            if self._decoder.life != life or not self._owner.knows(self._decoder):
                return
