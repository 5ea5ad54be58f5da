"""Proof before traffic: an engine is used once it has answered a canary, a pair once KV went across it.

Canaries carry text never sent before, so that no cache answers them. An engine that was lost is proved
anew when it comes back. A ready engine is only looked after for being reachable: one that is deep in a
long prefill may not answer /health for a while, which is no reason to give it up.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import suppress
from itertools import count
from math import inf
from typing import Annotated, Any
from weakref import WeakKeyDictionary

import msgspec

from tandem.http import Headers, Origin
from tandem.router import engine_metrics
from tandem.router.body import Body
from tandem.router.budgets import Budgets
from tandem.router.classify import Api
from tandem.router.connectors import PrefillFailed
from tandem.router.counting import Counter
from tandem.router.discovery import Discovery, Member
from tandem.router.engines import Engine, EngineRole, State
from tandem.router.few import few
from tandem.router.fleet import Fleet
from tandem.router.handover import Handovers
from tandem.router.legs import LegFailed, Legs
from tandem.router.visits import Visits

logger = logging.getLogger("tandem.router")

# More than a canary's prompt has in any vocabulary: it has 45 characters.
_CANARY_TOKENS = 64

# Seconds in which a second suspicion counts as a relapse, and the longest time that it is left alone then.
_RELAPSE = 60.0
_LONGEST_HOLD = 30.0

# Visits to a ready engine after which it is asked again for its models: adapters come and go.
_MODELS_EVERY = 6

# Engines from which on each of them is visited less often.
_MANY = 2000

# Seconds that an engine may take to say how it is: one in use may be deep in work.
_HEALTH_TIMEOUT, _WAITING_HEALTH_TIMEOUT = 10.0, 5.0

# Names in one line of the log.
_SHOWN = 8

# Causes of failed legs that may be nothing but work.
_SILENCE = ("head_timeout", "idle_timeout")


class _Card(msgspec.Struct):
    """What is relied on in a card of /v1/models; the rest is passed on as it is."""

    id: Annotated[str, msgspec.Meta(min_length=1)]
    parent: str | None = None
    max_model_len: Annotated[int, msgspec.Meta(ge=1)] | None = None


class _Models(msgspec.Struct):
    data: list[_Card] = []


class Prober:
    """Keeps a fleet true: members from discovery, state from probes and canaries."""

    def __init__(
        self,
        discovery: Discovery,
        fleet: Fleet,
        legs: Legs,
        counter: Counter,
        handovers: Handovers,
        budgets: Budgets,
        *,
        waiting_interval: float = 0.5,
        ready_interval: float = 5.0,
        canary_timeout: float = 60.0,
        on_restart: Callable[[Engine], None] = lambda engine: None,
        block_size: int | None = None,
        served: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = lambda: random.uniform(0.8, 1.2),
    ) -> None:
        """`waiting_interval`, `ready_interval`: seconds between two visits to an engine that starts, and to
        one in use; `jitter`: what they are multiplied by. `served`: the names that requests may use; none:
        all."""
        self._discovery = discovery
        self._fleet = fleet
        self._legs = legs
        self._counter = counter
        self._handovers = handovers
        self._budgets = budgets
        self._waiting_interval = waiting_interval
        self._ready_interval = ready_interval
        self._canary_timeout = canary_timeout
        self._on_restart = on_restart
        self._block_size = block_size
        self._served = frozenset(served)
        self._clock = clock
        self._sleep = sleep
        self._jitter = jitter
        self._visits = Visits(waiting_interval, clock)
        self._tasks: dict[Member, asyncio.Task[None]] = {}
        self._engines: dict[Member, Engine] = {}
        self._cleared: WeakKeyDictionary[Engine, tuple[int, float]] = WeakKeyDictionary()
        self._read_at: WeakKeyDictionary[Engine, float] = WeakKeyDictionary()

    async def run(self) -> None:
        """Follow discovery until cancelled."""
        try:
            while True:
                try:
                    async for members in self._discovery.watch():
                        self._follow(members)
                    await asyncio.Event().wait()
                except Exception:
                    logger.exception("discovery failed; the engines known so far stay in use")
                    await asyncio.sleep(self._ready_interval)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _follow(self, members: frozenset[Member]) -> None:
        left, new = self._tasks.keys() - members, members - self._tasks.keys()
        gone = []
        for member in left:
            self._tasks.pop(member).cancel()
            gone.append(self._engines.pop(member))
            self._visits.answered(gone[-1])
        come = {
            member: Engine(
                member.url,
                member.role,
                Origin.parse(member.url),
                labels=dict(member.labels),
                kv_events=member.kv_events,
            )
            for member in new
        }
        if gone:
            urls = _names(f"{e.role.value} {e.url}" for e in gone)
            logger.info("engines left, and get no new requests: %s", urls)
        self._engines |= come
        self._fleet.update(add=come.values(), remove=gone)
        for member, engine in come.items():
            self._tasks[member] = asyncio.create_task(self._look_after(engine))
        if left or new:
            self._visits.stir()

    async def _look_after(self, engine: Engine) -> None:
        """Visit an engine for ever: soon again while it starts, ever later while it does not answer or its
        canaries fail (a failed canary may hold KV blocks on the prefiller until their lease ends)."""
        pause = self._waiting_interval
        silences = 0
        for visits in count():
            engine.alarm.clear()
            if engine.state is State.SUSPECT:
                await self._sleep(self._hold(engine))
            try:
                async with self._visits.place(engine):
                    await self._visit(engine)
                # After it: while models are asked for, the engine may become suspect, and be held first.
                if (visits + 1) % _MODELS_EVERY == 0 and engine.state is State.READY:
                    self._fleet.told(engine, await self._ask_models(engine))
                pause = self._waiting_interval
                silences = 0
            except LegFailed as failure:
                silences = silences + 1 if failure.reason in _SILENCE else 0
                # A suspect engine that is silent twice, with no request that worked in between, hangs.
                hangs = engine.state is State.SUSPECT and silences > 1
                if engine.state is State.WAITING or hangs or self._is_gone(engine, failure):
                    self._lose(engine, str(failure))
                pause = min(2 * pause, self._ready_interval)
                if self._visits.is_silent(engine):
                    pause = self._visits.pause(engine)
            except Exception:
                logger.exception("probing %s", engine.url)
                self._lose(engine, "the probe failed; see the router's log")
                pause = self._ready_interval
            settled = self._ready_interval * max(1.0, len(self._engines) / _MANY)
            with suppress(TimeoutError):
                async with asyncio.timeout((settled if self._settled(engine) else pause) * self._jitter()):
                    await engine.alarm.wait()

    def _is_gone(self, engine: Engine, failure: LegFailed) -> bool:
        """Whether a failed visit shows that an engine which was in use is not fit for it."""
        if failure.reason in ("connect", "unhealthy"):
            return True
        # A canary that was answered with a failure is one; silence may be work.
        return engine.state is State.SUSPECT and failure.reason not in _SILENCE

    def _settled(self, engine: Engine) -> bool:
        """Whether there is nothing left to prove of an engine."""
        if engine.state is not State.READY or engine.answers:
            return engine.state is State.READY
        decoders = self._fleet.ready(EngineRole.DECODE)
        return all(self._fleet.is_proved(engine, d) for d in decoders if self._fleet.may_pair(engine, d))

    def _lose(self, engine: Engine, why: str) -> None:
        why = why.removeprefix(f"{engine.url}: ")
        if engine.state is State.WAITING:
            if engine.why != why:
                logger.info("%s %s is not ready: %s", engine.role.value, engine.url, why)
            engine.why = why  # nothing else has changed
        else:
            self._fleet.lost(engine, why)

    async def _visit(self, engine: Engine) -> None:
        suspect = engine.state is State.SUSPECT
        try:
            timeout = _WAITING_HEALTH_TIMEOUT if engine.state is State.WAITING else _HEALTH_TIMEOUT
            await self._legs.call(engine, "GET", "/health", head_timeout=timeout)
        except LegFailed as failure:
            if failure.reply is None:
                self._visits.silent(engine)
                raise
            self._visits.answered(engine)
            # Silence may be work; an answer that it is not well is one.
            raise LegFailed(engine, "unhealthy", str(failure), failure.reply) from None
        self._visits.answered(engine)
        if self._is_to_tell(engine):
            engine.doubted = False
            await self._read_metrics(engine)
        if engine.state is State.SUSPECT and not suspect:
            return  # only now: the alarm is set, and it shall perhaps be left alone first
        if engine.answers:
            match engine.state:
                case State.WAITING:
                    await self._prove(engine)
                case State.SUSPECT:
                    await self._send(engine, self._canary(engine.models[0]["id"]).edited({}))
                    self._clear(engine)
            return
        if engine.state is State.WAITING:
            self._fleet.told(engine, await self._ask_models(engine))
        ready = self._fleet.ready(EngineRole.DECODE)
        decoders = [d for d in ready if self._fleet.may_pair(engine, d)]
        if not decoders and not ready:
            engine.why = "answers, and waits for a decode engine to be proved with"
        elif not decoders:
            why = "answers, and no decode engine in use agrees with it in labels and models"
            if engine.why != why:
                logger.info("%s %s is not ready: %s", engine.role.value, engine.url, why)
            engine.why = why
        failed: LegFailed | None = None
        tried = False
        for decoder in decoders:
            here = decoder in self._fleet.engines  # it may have left meanwhile
            wanted = here and (suspect or not self._fleet.is_proved(engine, decoder))
            if wanted and self._fleet.may_meet(engine, decoder):
                try:
                    tried |= await self._prove_pair(engine, decoder)
                except LegFailed as failure:
                    failed = failure  # the pairs are proved one by one: the others may work
        if failed is not None:
            raise failed
        if suspect and tried:
            self._clear(engine)

    def _hold(self, engine: Engine) -> float:
        """Seconds until a suspect engine's canary: the longer, the more often it was suspect again soon after
        one, so that an engine which passes canaries and fails requests is left alone most of the time."""
        times, last = self._cleared.get(engine, (0, 0.0))
        if self._clock() - last >= _RELAPSE:
            self._cleared.pop(engine, None)
            return 0.0
        return min((1 << min(times, 5)) - 1, _LONGEST_HOLD)

    def _clear(self, engine: Engine) -> None:
        times, _ = self._cleared.get(engine, (0, 0.0))
        self._cleared[engine] = times + 1, self._clock()
        logger.info("%s %s has answered a canary and is in use again", engine.role.value, engine.url)
        self._fleet.worked(engine)

    def _is_to_tell(self, engine: Engine) -> bool:
        """Whether an engine's /metrics are to be read. Not when one that is in use is only visited because
        another has joined, or soon again because a pair is not proved yet: in a large fleet that is often,
        and to write the page costs an engine milliseconds."""
        if engine.doubted or engine.state is not State.READY:
            return True
        age = asyncio.get_running_loop().time() - self._read_at.get(engine, -inf)
        return age > self._ready_interval / 2

    async def _read_metrics(self, engine: Engine) -> None:
        """Take what an engine tells of itself, and find out whether it is still the process that it was: one
        may die and be back between two visits.

        Raises LegFailed when an engine that is in use is another one now."""
        try:
            page = await self._legs.call(engine, "GET", "/metrics")
        except LegFailed as failure:
            if failure.reply is None:
                engine.doubted = True  # still
                raise
            page = b""
        self._read_at[engine] = asyncio.get_running_loop().time()
        told = engine_metrics.read(page)
        engine.kv_use = told.kv_use or 0.0
        engine.running, engine.waiting = told.running, told.waiting
        engine.cache_tokens = 0 if told.prefix_caching is False else told.cache_tokens
        if self._block_size is not None and told.block_size not in (None, self._block_size):
            logger.warning(
                "%s has KV blocks of %d tokens, and --kv-block-size is %d: cached prefixes are expected in "
                "the wrong sizes. Give --kv-block-size %d; this is logged once",
                engine.url,
                told.block_size,
                self._block_size,
                told.block_size,
            )
            self._block_size = None
        if engine.state is not State.WAITING:
            if told.started is not None and told.started != engine.started:
                engine.alarm.set()  # it answers, so it can be proved at once
                raise LegFailed(engine, "unhealthy", f"{engine.url} was restarted")
            return
        if told.started is None and not self._handovers.connector.survives_decoder_restart:
            logger.warning(
                "%s does not tell when it started (process_start_time_seconds): whenever it is lost, it is "
                "taken for another process",
                engine.url,
            )
        if engine.identify(told.started):
            self._on_restart(engine)

    async def _ask_models(self, engine: Engine) -> list[dict[str, Any]]:
        answer = await self._legs.call(engine, "GET", "/v1/models")
        try:
            told = msgspec.json.decode(answer)
            msgspec.convert(told, _Models)
        except msgspec.DecodeError as error:
            why = f"{engine.url}/v1/models is not a list of models: {error}"
            raise LegFailed(engine, "no_models", why) from error
        cards: list[dict[str, Any]] = told.get("data", [])
        if not cards:
            raise LegFailed(engine, "no_models", f"{engine.url}/v1/models names no model")
        return cards

    async def _prove(self, engine: Engine) -> None:
        """Have an engine that generates answers answer a canary."""
        cards = await self._ask_models(engine)
        self._fleet.told(engine, cards)
        body = self._canary(cards[0]["id"])
        await self._send(engine, body.edited({}))
        await self._counter.check(engine, cards[0]["id"])
        self._fleet.prove(engine, cards)
        logger.info("%s %s is ready", engine.role.value, engine.url)
        if self._served and self._served.isdisjoint(engine.model_ids):
            logger.warning(
                "%s serves %s, and --served-model-name allows %s only: it gets no request that it can answer",
                engine.url,
                _names(engine.model_ids),
                _names(self._served),
            )
        for prefiller in self._fleet.of(EngineRole.PREFILL):
            if not self._visits.is_silent(prefiller):
                prefiller.alarm.set()  # to be proved with it; nothing else about it is in doubt

    async def _prove_pair(self, prefiller: Engine, decoder: Engine) -> bool:
        """Send a canary across a pair. False: there is no room for one now."""
        names = [card["id"] for card in decoder.models if "id" in card]
        shared = [name for name in names if name in prefiller.model_ids]
        body = self._canary((shared or names)[0])
        claims = self._handovers.connector.reservation(_CANARY_TOKENS, decoder)
        if not self._budgets.fit(claims):
            return False  # its buffer is full of real requests: later
        reservation = self._budgets.take(claims)
        begun = self._fleet.pair(prefiller, decoder)
        async with self._handovers.begin(Api.COMPLETIONS, body, prefiller, decoder, reservation) as handover:
            try:
                await handover.prefill(_canary_headers(), tokens=0, timeout=self._canary_timeout)
            except PrefillFailed as failure:
                raise LegFailed(prefiller, failure.reason, f"{prefiller.url}: {failure}") from None
            try:
                await self._send(decoder, handover.decode_body(), resend=False)
            except LegFailed as failure:
                # The decoder serves others; what failed is this prefiller's KV.
                reason = failure.reason if failure.reason in _SILENCE else "canary"
                message = f"{decoder.url} cannot read the KV of {prefiller.url}: {failure}"
                raise LegFailed(prefiller, reason, message) from None
            handover.taken()
        if self._fleet.prove_pair(prefiller, decoder, begun):
            logger.info("prefill %s is ready with decode %s", prefiller.url, decoder.url)
        return True

    def _canary(self, model: str) -> Body:
        prompt = f"canary {secrets.token_hex(16)} sings"
        request = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        return Body.parse(msgspec.json.encode(request))

    async def _send(self, engine: Engine, body: bytes, *, resend: bool = True) -> bytes:
        return await self._legs.call(
            engine,
            "POST",
            Api.COMPLETIONS.value,
            body,
            _canary_headers(),
            head_timeout=self._canary_timeout,
            resend=resend,
        )


def _names(given: Iterable[str]) -> str:
    """In order, and not more than a line holds."""
    return ", ".join(few(sorted(given), _SHOWN))


def _canary_headers() -> Headers:
    return [
        (b"content-type", b"application/json"),
        (b"x-request-id", f"canary-{secrets.token_hex(8)}".encode()),
        (b"x-tandem-canary", b"1"),
    ]
