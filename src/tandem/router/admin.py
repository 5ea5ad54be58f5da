"""The admin port: every engine's state, what would be chosen for a request, and the metrics.

It names engines and tells of their load, so it listens on the loopback address unless told otherwise, and has
no part in serving requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST

from tandem.http import Request, Responder
from tandem.router.answer import Answer
from tandem.router.budgets import Budgets
from tandem.router.choosing import Choosing, FallBack
from tandem.router.discovery import Source
from tandem.router.engines import Engine, EngineRole, State
from tandem.router.errors import ApiError
from tandem.router.explain import as_json
from tandem.router.fleet import Fleet
from tandem.router.flow import Flow
from tandem.router.job import Path
from tandem.router.metrics import Metrics
from tandem.router.strategies import KvIndex

_JSON = (b"content-type", b"application/json")


class Admin:
    def __init__(
        self,
        fleet: Fleet,
        flow: Flow,
        choosing: Choosing,
        budgets: Budgets,
        metrics: Metrics,
        *,
        threshold: int,
        index: KvIndex | None = None,
        sources: Callable[[], list[Source]] = list,
        model_files: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        """`sources`: how it stands with the sources of engines. `model_files`: with their tokenizers' files,
        where these are fetched."""
        self._fleet = fleet
        self._flow = flow
        self._choosing = choosing
        self._budgets = budgets
        self._metrics = metrics
        self._threshold = threshold
        self._index = index
        self._sources = sources
        self._model_files = model_files

    async def __call__(self, request: Request, responder: Responder) -> None:
        methods: dict[str, tuple[str, ...]] = {
            "/engines": ("GET", "HEAD"),
            "/metrics": ("GET", "HEAD"),
            "/admin/route": ("POST",),
        }
        allowed = methods.get(request.path)
        try:
            if allowed is None:
                paths = ", ".join(methods)
                raise ApiError(404, f"There is no {request.path} here, only {paths}.", kind="not_found_error")
            if request.method not in allowed:
                error = ApiError(405, f"{request.path} takes {' and '.join(allowed)}.")
                responder.send(405, [*error.headers(), (b"allow", ", ".join(allowed).encode())], error.body())
                return
            if request.path == "/metrics":
                content_type = CONTENT_TYPE_LATEST.encode()
                responder.send(200, [(b"content-type", content_type)], self._metrics.render())
                return
            told = self._engines() if request.path == "/engines" else await self._route(request, responder)
            responder.send(200, [_JSON], msgspec.json.encode(told))
        except ApiError as error:
            responder.send(error.status, error.headers(), error.body())

    def _engines(self) -> dict[str, Any]:
        return {
            "missing": self._fleet.missing,
            "sources": self._sources(),
            **({"modelFiles": self._model_files()} if self._model_files is not None else {}),
            "engines": [self._engine(engine) for engine in sorted(self._fleet.engines, key=lambda e: e.url)],
        }

    def _engine(self, engine: Engine) -> dict[str, Any]:
        told: dict[str, Any] = {
            "url": engine.url,
            "role": engine.role.value,
            "labels": dict(engine.labels),
            "state": engine.state.value,
            "why": engine.why or self._why_unused(engine),
            "models": sorted(engine.model_ids),
            "requestsInFlight": engine.in_flight,
            "requestsHeld": engine.held,
            "tokensInFlight": engine.held_tokens,
            "pendingPromptTokens": engine.pending_tokens,
            "failuresInARow": engine.failures,
            "runningByItsMetrics": engine.running,
            "waitingByItsMetrics": engine.waiting,
            "kvUse": round(engine.kv_use, 4),
            "cacheTokens": engine.cache_tokens,
            "reserved": round(self._budgets.share(engine), 4),
            "rampUp": round(self._fleet.ramp_up(engine), 4),
        }
        if engine.role is EngineRole.DECODE:
            told["prefillers"] = [p.url for p in self._fleet.prefillers_for(engine).all]
        if self._index is not None:
            told["kvEvents"] = None if engine.kv_events is None else engine.kv_events.events
            told["kvIndex"] = [
                {
                    "rank": rank.number,
                    "blocks": rank.blocks,
                    "coverage": round(rank.coverage, 4),
                    "sinceStart": rank.complete,
                }
                for rank in self._index.ranks(engine)
            ]
        return told

    def _why_unused(self, engine: Engine) -> str | None:
        """Why an engine that is ready gets no requests, if so."""
        if engine.state is not State.READY:
            return None
        if engine.role is EngineRole.PREFILL:
            decoders = self._fleet.of(EngineRole.DECODE)
            if not any(engine in self._fleet.prefillers_for(decoder).all for decoder in decoders):
                return "no decode engine that it was proved with is in use"
        elif not any(engine in self._fleet.group(name).decoders.all for name in engine.model_ids or (None,)):
            return "decode engines serve its models; engines without a role are used when none of them is"
        return None

    async def _route(self, request: Request, responder: Responder) -> dict[str, Any]:
        """What would be chosen for a body now. Nothing is generated, reserved or remembered of it; where
        engines count prompts, one counts this.

        Raises ApiError as the request itself would get it."""
        job = await self._flow.accept(request, Answer(responder), None)
        job.explain = True
        await self._choosing.decide(job)
        waits = False
        if job.path is Path.DISAGGREGATED:
            try:
                waits = self._choosing.pair(job, take=False) is None
            except FallBack as fallen:
                job.fall_back(fallen.reason)
        if job.path is Path.DECODE_ONLY:
            self._choosing.alone(job, take=False)
        return {
            "path": job.path.value,
            "reason": str(job.reason),
            "promptTokens": job.prompt.tokens,
            "effectiveTokens": job.effective_tokens,
            "threshold": self._threshold,
            "expectedOutputTokens": job.expected_output,
            "waitsForRoom": waits,
            "prefill": as_json(job.prefill_choice),
            "decode": as_json(job.decode_choice),
        }
