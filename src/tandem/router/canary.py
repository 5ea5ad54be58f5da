"""Proof before traffic: an engine is used once it has answered a canary, a pair once KV went across it.

Canaries carry text never sent before, so that no cache answers them. An engine that was lost is proved
anew when it comes back. A ready engine is only looked after for being reachable: one that is deep in a
long prefill may not answer /health for a while, which is no reason to give it up.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Any

import msgspec

from tandem.http import Origin
from tandem.router.body import Body
from tandem.router.classify import Api
from tandem.router.connectors import PrefillFailed
from tandem.router.counting import Counter
from tandem.router.discovery import Discovery, Member
from tandem.router.engines import Engine, EngineRole, Fleet, State
from tandem.router.flow import ConnectorFactory
from tandem.router.legs import LegFailed, Legs

logger = logging.getLogger("tandem.router")


class Prober:
    """Keeps a fleet true: members from discovery, state from probes and canaries."""

    def __init__(
        self,
        discovery: Discovery,
        fleet: Fleet,
        legs: Legs,
        counter: Counter,
        connector: ConnectorFactory,
        *,
        waiting_interval: float = 0.5,
        ready_interval: float = 5.0,
        canary_timeout: float = 60.0,
    ) -> None:
        self._discovery = discovery
        self._fleet = fleet
        self._legs = legs
        self._counter = counter
        self._connector = connector
        self._waiting_interval = waiting_interval
        self._ready_interval = ready_interval
        self._canary_timeout = canary_timeout
        self._tasks: dict[Member, asyncio.Task[None]] = {}
        self._engines: dict[Member, Engine] = {}

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
        for member in self._tasks.keys() - members:
            self._tasks.pop(member).cancel()
            engine = self._engines.pop(member)
            self._fleet.remove(engine)
        for member in members - self._tasks.keys():
            engine = Engine(member.url, member.role, Origin.parse(member.url))
            self._engines[member] = engine
            self._fleet.add(engine)
            self._tasks[member] = asyncio.create_task(self._look_after(engine))

    async def _look_after(self, engine: Engine) -> None:
        """Visit an engine for ever: soon again while it starts, ever later while its canaries fail
        (a failed canary may hold KV blocks on the prefiller until their lease ends)."""
        pause = self._waiting_interval
        while True:
            try:
                await self._visit(engine)
                pause = self._waiting_interval
            except LegFailed as failure:
                if engine.state is State.WAITING or failure.reason in ("connect", "unhealthy"):
                    self._lose(engine, str(failure))
                pause = (
                    self._waiting_interval if failure.unreachable else min(2 * pause, self._ready_interval)
                )
            except Exception:
                logger.exception("probing %s", engine.url)
                self._lose(engine, "the probe failed; see the router's log")
                pause = self._ready_interval
            await asyncio.sleep(self._ready_interval if self._settled(engine) else pause)

    def _settled(self, engine: Engine) -> bool:
        """Whether there is nothing left to prove of an engine."""
        if engine.state is State.WAITING or engine.role is EngineRole.DECODE:
            return engine.state is State.READY
        return all(self._fleet.is_proved(engine, d) for d in self._fleet.ready(EngineRole.DECODE))

    def _lose(self, engine: Engine, why: str) -> None:
        why = why.removeprefix(f"{engine.url}: ")
        if engine.state is State.READY:
            logger.warning("%s %s is lost: %s", engine.role.value, engine.url, why)
        elif engine.why != why:
            logger.info("%s %s is not ready: %s", engine.role.value, engine.url, why)
        self._fleet.lost(engine, why)

    async def _visit(self, engine: Engine) -> None:
        try:
            await self._legs.call(engine, "GET", "/health", head_timeout=10.0)
        except LegFailed as failure:
            if failure.reply is None:
                raise
            # Silence may be work; an answer that it is not well is one.
            raise LegFailed(engine, "unhealthy", str(failure), failure.reply) from None
        if engine.role is EngineRole.DECODE:
            if engine.state is State.WAITING:
                await self._prove_decoder(engine)
            return
        decoders = self._fleet.ready(EngineRole.DECODE)
        if not decoders:
            engine.why = "answers, and waits for a decode engine to be proved with"
        failed: LegFailed | None = None
        for decoder in decoders:
            if not self._fleet.is_proved(engine, decoder):
                try:
                    await self._prove_pair(engine, decoder)
                except LegFailed as failure:
                    failed = failure  # the pairs are proved one by one: the others may work
        if failed is not None:
            raise failed

    async def _prove_decoder(self, decoder: Engine) -> None:
        cards = msgspec.json.decode(
            await self._legs.call(decoder, "GET", "/v1/models"), type=dict[str, Any]
        ).get("data", [])
        if not cards:
            raise LegFailed(decoder, "no_models", f"{decoder.url}/v1/models names no model")
        body = self._canary(cards[0]["id"])
        await self._send(decoder, body.edited({}))
        await self._counter.check(decoder, cards[0]["id"])
        self._fleet.prove_decoder(decoder, cards)
        logger.info("decode %s is ready", decoder.url)

    async def _prove_pair(self, prefiller: Engine, decoder: Engine) -> None:
        begun = self._fleet.pair(prefiller, decoder)
        connector = self._connector()
        body = self._canary(decoder.models[0]["id"])
        reply = await self._send(prefiller, connector.prepare_prefill(Api.COMPLETIONS, body))
        try:
            handoff = connector.on_prefill_reply(reply)
        except PrefillFailed as failure:
            raise LegFailed(prefiller, failure.reason, f"{prefiller.url}: {failure}") from None
        try:
            await self._send(decoder, connector.prepare_decode(Api.COMPLETIONS, body, handoff))
        except LegFailed as failure:
            # The decoder serves others; what failed is this prefiller's KV.
            message = f"{decoder.url} cannot read the KV of {prefiller.url}: {failure}"
            raise LegFailed(prefiller, "canary", message) from None
        if self._fleet.prove_pair(prefiller, decoder, begun):
            logger.info("prefill %s is ready with decode %s", prefiller.url, decoder.url)

    def _canary(self, model: str) -> Body:
        prompt = f"canary {secrets.token_hex(16)} sings"
        request = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        return Body.parse(msgspec.json.encode(request))

    async def _send(self, engine: Engine, body: bytes) -> bytes:
        headers = [
            (b"content-type", b"application/json"),
            (b"x-request-id", f"canary-{secrets.token_hex(8)}".encode()),
            (b"x-tandem-canary", b"1"),
        ]
        return await self._legs.call(
            engine, "POST", Api.COMPLETIONS.value, body, headers, head_timeout=self._canary_timeout
        )
