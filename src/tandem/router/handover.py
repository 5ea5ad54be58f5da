"""One hand-off at work: its reservation, its prefill leg, its notifications, and what is left to clean up.

What a prefiller pushes lies in the decoder's buffer until somebody reads it. So with such a connector a
prefill leg goes on when its client leaves, and a hand-off that was not used is read by a request of one
token; until then its reservation is held.

Whether a decode leg has read its KV is known from its first token. One that is not streamed shows none
before its end: until then it holds its reservation, and when it breaks off, a release follows that may find
nothing and then costs the decoder one prefill. Nothing cheaper is safe. vLLM sends the head of such an answer
with its body, tells of no single request in its metrics, and may start requests in another order than they
came; and KV taken for read that was not stays for ever, until prompts wait for room that never comes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any
from weakref import WeakKeyDictionary

from tandem.http import Headers
from tandem.router.body import Body
from tandem.router.budgets import Reservation
from tandem.router.classify import Api
from tandem.router.connectors import Connector, PrefillFailed
from tandem.router.engines import Engine, State
from tandem.router.fleet import Fleet
from tandem.router.headers import RANK
from tandem.router.legs import LegFailed, Legs
from tandem.router.notifications import Expected, Notifications

logger = logging.getLogger("tandem.router")


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a clean-up waits for what, in seconds."""

    settle: float = 1.0
    """For a decoder to notice that a decode leg was cancelled, before its KV is released: LMCache's receiver
    dies when two requests look the same chunks up before one has read them."""
    retries: tuple[float, ...] = (1.0, 2.0, 5.0, 10.0)
    """Between two tries to release; the last one repeats. None is shorter than `settle`, for its reason."""
    release: float = 60.0
    """For the answer to a release, at least."""
    late: float = 120.0
    """For notifications that did not come in time, before a release without them: a prefiller that was
    stalled may yet write, and chunks that were freed meanwhile may be another request's."""
    refusals: int = 4
    """Releases that a decoder answers with an error; it is not asked more often."""
    shutdown: float = 5.0
    """For clean-ups under way when the router ends: what they leave is not known to the next one."""


_PACE = Pace()


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
        pace: Pace = _PACE,
    ) -> None:
        self.connector = connector
        self.legs = legs
        self.notifications = notifications
        self.notification_timeout = notification_timeout
        self.pace = pace
        self._fleet = fleet
        self._legs_begun: set[asyncio.Task[Any]] = set()
        self._cleaning: set[asyncio.Task[Any]] = set()
        # A release finds its KV there, as a rule; where it does not, the decoder computes a whole prompt.
        self._releasing: WeakKeyDictionary[Engine, asyncio.Lock] = WeakKeyDictionary()

    @property
    def cleaning_up(self) -> int:
        """Hand-offs that nobody uses and that still hold something."""
        return len(self._cleaning)

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
                _spawn(handover.clean_up(), self._cleaning)
            else:
                handover.forget()

    async def aclose(self) -> None:
        """Give clean-ups a moment to end, then stop: what is left stays where it is."""
        if self._cleaning:
            await asyncio.wait(self._cleaning, timeout=self.pace.shutdown)
        if self._cleaning:
            logger.warning(
                "%d hand-offs are not cleaned up: what they wrote to decode engines stays there until these "
                "are restarted",
                len(self._cleaning),
            )
        while tasks := self._legs_begun | self._cleaning:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def run_leg(self, leg: Coroutine[Any, Any, bytes]) -> asyncio.Task[bytes]:
        """Run a prefill leg that outlives whoever waits for it."""
        return _spawn(leg, self._legs_begun)

    def lock(self, decoder: Engine) -> asyncio.Lock:
        """To be held while something is released on a decoder: one at a time."""
        return self._releasing.setdefault(decoder, asyncio.Lock())

    def knows(self, engine: Engine) -> bool:
        return engine in self._fleet.engines


def _spawn(work: Coroutine[Any, Any, Any], tasks: set[asyncio.Task[Any]]) -> asyncio.Task[Any]:
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
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
        self._life = decoder.life
        self._reservation = reservation
        self._attempt = owner.connector.attempt(decoder)
        self._expected: Expected | None = None
        self._leg: asyncio.Task[bytes] | None = None
        self._headers: Headers = []
        self._patience = owner.pace.release
        self._prefilled = False
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
        # A release that finds nothing takes as long as this leg.
        self._patience = max(self._patience, timeout)
        self._expected = self._owner.notifications.expect(self._attempt)
        self.dirty = True
        self._leg = self._owner.run_leg(call)
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
            if await self._may_have_written():
                await self._release()
        finally:
            self.forget()

    async def _call_prefiller(self, body: bytes, headers: Headers, tokens: int, timeout: float) -> bytes:
        with self._prefiller.busy(tokens):
            return await self._owner.legs.call(
                self._prefiller,
                "POST",
                self._api.value,
                body,
                headers,
                head_timeout=timeout,
                # Under the same tag it would be told as written without being so.
                resend=not self._owner.connector.pushes,
            )

    async def _may_have_written(self) -> bool:
        """Wait until the prefiller has written, or can be expected to have."""
        assert self._leg is not None
        assert self._expected is not None
        try:
            self._attempt.on_prefill_reply(await self._leg)
            self._prefilled = True
        except LegFailed as failure:
            if failure.unreachable or failure.rejected:
                return False
            # A request that is cancelled in the middle of a step is written at the step's end.
            self._attempt.on_prefill_failure()
        if not await self._expected.complete(self._owner.pace.late):
            logger.warning("KV from %s: %s did not come", self._prefiller.url, self._attempt.missing)
        return True

    async def _release(self) -> None:
        """Read what lies on the decoder with a request of one token, now or when it is back. One that is
        another process now holds nothing, and one that was removed is no longer this router's.

        Where the decoder refuses again and again, what a prefiller has written stays there, and its room
        reserved; where the prefill leg failed too, nothing was written.
        """
        body = self._attempt.prepare_release(self._api, self._body)
        if body is None:
            return
        pace = self._owner.pace
        if self._decoding:
            await asyncio.sleep(pace.settle)
        refusals = 0
        for pause in chain(pace.retries, repeat(pace.retries[-1])):
            async with self._owner.lock(self._decoder):
                known_to_be_another = self._decoder.life != self._life and self._decoder.started is not None
                if known_to_be_another or not self._owner.knows(self._decoder):
                    return
                if self._decoder.state is not State.WAITING and refusals < pace.refusals:
                    try:
                        await self._call_decoder(body)
                        return
                    except LegFailed as failure:
                        refusals += failure.reply is not None
                        if failure.reply is None:
                            self._decoder.doubt()
                        logger.warning("KV on %s is not released yet: %s", self._decoder.url, failure)
            if refusals >= pace.refusals and not self._prefilled:
                return
            await asyncio.sleep(pause)

    async def _call_decoder(self, body: bytes) -> None:
        headers = [(n, v + b"-release" if n == b"x-request-id" else v) for n, v in self._headers if n != RANK]
        with self._decoder.busy():
            await self._owner.legs.call(
                self._decoder,
                "POST",
                self._api.value,
                body,
                headers,
                head_timeout=self._patience,
                resend=False,
            )
