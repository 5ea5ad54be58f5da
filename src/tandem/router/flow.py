"""The request engine: one flow for every generation request, disaggregated or not.

classify → count → choose the decoder → (choose a prefiller, prefill leg, hand-off) → decode leg → relay.
One task runs a request from start to end; when the client leaves, the task is cancelled and whichever
leg is open closes its connection, which ends the work on the engine.

Failures before the client's first byte are repaired: another prefiller, else the decoder computes the
prompt itself (a bounded number at a time); another decoder with a new prefill. After the first byte an
error event ends the stream, and the message is left unfinished so that it cannot look whole.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.config import RouterConfig
from tandem.http import Headers, Request, Responder, Response
from tandem.router.body import Body
from tandem.router.classify import Api, Class, classify, refuse_internal
from tandem.router.connectors import Connector, Handoff, PrefillFailed
from tandem.router.counting import Counter
from tandem.router.engines import Engine, EngineRole, Fleet
from tandem.router.errors import ApiError, bad_gateway, unavailable
from tandem.router.headers import engine_request_id, request_id, to_client, to_engine
from tandem.router.legs import MAX_REPLY_BYTES, LegFailed, Legs, Reply
from tandem.router.metrics import Metrics
from tandem.router.relay import StreamRelay
from tandem.router.strategies import LeastLoaded, Strategy

logger = logging.getLogger("tandem.router")

ConnectorFactory = Callable[[], Connector]

DISAGGREGATED = "disaggregated"
DECODE_ONLY = "decode_only"


@dataclass(slots=True)
class Job:
    """One request on its way through the router."""

    request: Request
    responder: Responder
    api: Api
    body: Body
    asked: Class
    id: str
    arrived: float
    explain: bool
    tokens: int | None = None
    path: str = DECODE_ONLY
    reason: str = "short"
    prefiller: Engine | None = None
    prefill_seconds: float | None = None
    tried: set[Engine] = field(default_factory=set)


class Flow:
    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        legs: Legs,
        counter: Counter,
        strategy: Strategy,
        connector: ConnectorFactory,
        metrics: Metrics,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._legs = legs
        self._counter = counter
        self._choose_prefiller = strategy
        self._choose_decoder = LeastLoaded()
        self._connector = connector
        self._metrics = metrics
        self._clock = clock
        self._fallbacks = 0

    async def serve(self, request: Request, responder: Responder, api: Api) -> None:
        """Answer one generation request, whatever happens to it."""
        arrived = self._clock()
        rid = request_id(request)
        job: Job | None = None
        outcome = "client_left"
        try:
            job = self._accept(request, responder, api, rid, arrived)
            await self._decide(job)
            outcome = await self._generate(job)
        except ApiError as error:
            outcome = "rejected" if error.status < 500 else "failed"
            logger.warning("%s ends with HTTP %d: %s", rid, error.status, error.message)
            if responder.started:
                responder.write(error.event())
                responder.abort()
            else:
                headers = error.headers()
                headers.append((b"x-request-id", rid.encode()))
                responder.send(error.status, headers, error.body())
        finally:
            path, reason = (job.path, job.reason) if job else ("none", "invalid")
            self._metrics.requests.labels(path, reason, outcome).inc()

    def _accept(self, request: Request, responder: Responder, api: Api, rid: str, arrived: float) -> Job:
        body = Body.parse(request.body)
        refuse_internal(body, request.headers)
        self._check_model(body)
        return Job(
            request=request,
            responder=responder,
            api=api,
            body=body,
            asked=classify(api, body),
            id=rid,
            arrived=arrived,
            explain=self._config.explain and request.header(b"x-tandem-explain") == b"1",
        )

    def _check_model(self, body: Body) -> None:
        model = body.get("model")
        known = set(self._config.served_model_name) | {m["id"] for m in self._fleet.models}
        if model is None or not known or model in known:
            return
        raise ApiError(
            404,
            f"The model {model!r} does not exist here. Served: {', '.join(sorted(known))}.",
            kind="not_found_error",
            param="model",
            code="model_not_found",
        )

    async def _decide(self, job: Job) -> None:
        """Choose the path: sets the job's tokens, path and reason."""
        threshold = self._config.routing_threshold
        if not self._fleet.ready(EngineRole.DECODE):
            raise unavailable(f"Not ready: {self._fleet.missing}")
        if job.asked.decode_only is not None:
            job.reason = job.asked.decode_only
            logger.info("Conditional routing: reason=%s, disaggregate=False", job.reason)
            return
        if threshold > 0 or job.explain:
            job.tokens = (await self._counter.count(job.api, job.body)).tokens
        counted = "not counted" if job.tokens is None else str(job.tokens)
        disaggregate = job.tokens is None or job.tokens >= threshold
        logger.info(
            "Conditional routing: estimated_tokens=%s, threshold=%d, disaggregate=%s",
            counted,
            threshold,
            disaggregate,
        )
        if not disaggregate:
            return
        if not self._fleet.of(EngineRole.PREFILL):
            job.reason = "no_prefillers_configured"
        elif job.tokens is not None and self._over_context(job.tokens):
            # No engine can serve it; the decoder's own error says so before a prefiller computes anything.
            job.reason = "over_context"
        else:
            job.path, job.reason = DISAGGREGATED, "threshold"

    def _over_context(self, tokens: int) -> bool:
        lengths = [m["max_model_len"] for m in self._fleet.models if isinstance(m.get("max_model_len"), int)]
        return bool(lengths) and tokens >= max(lengths)

    async def _generate(self, job: Job) -> str:
        """Run the legs until the client has an answer. Returns how the request ended."""
        for attempt in range(1, self._config.max_attempts + 1):
            decoder = self._pick_decoder(job)
            handoff = await self._prefill(job, decoder) if job.path == DISAGGREGATED else None
            try:
                if handoff is None and job.reason in ("no_prefiller", "prefill_failed", "handoff_failed"):
                    return await self._fall_back(job, decoder)
                return await self._decode(job, decoder, handoff)
            except LegFailed as failure:
                self._note_failure(failure)
                if job.responder.started:
                    raise bad_gateway(f"The answer broke off: {failure}") from None
                if attempt == self._config.max_attempts:
                    return self._give_up(job, failure)
                job.tried.add(decoder)
                if not self._untried_decoders(job):
                    # There is only this decoder, and it answers: let it compute the prompt alone.
                    if failure.unreachable or job.path == DECODE_ONLY:
                        return self._give_up(job, failure)
                    job.tried.clear()
                    job.path, job.reason = DECODE_ONLY, "handoff_failed"
        raise AssertionError("unreachable: max_attempts is at least 1")

    def _untried_decoders(self, job: Job) -> list[Engine]:
        return [d for d in self._fleet.ready(EngineRole.DECODE) if d not in job.tried]

    def _pick_decoder(self, job: Job) -> Engine:
        decoders = self._untried_decoders(job)
        if not decoders:
            raise unavailable(f"Not ready: {self._fleet.missing or 'every decode engine failed'}")
        if job.path == DISAGGREGATED:
            decoders = [d for d in decoders if self._fleet.prefillers_for(d)] or decoders
        return self._choose_decoder.choose(decoders)

    async def _prefill(self, job: Job, decoder: Engine) -> Handoff | None:
        """Run the prefill leg on one prefiller after another. None: the decoder must compute the prompt."""
        connector = self._connector()
        tried: set[Engine] = set()
        reason = "no_prefiller"
        for _ in range(self._config.max_attempts):
            candidates = [p for p in self._fleet.prefillers_for(decoder) if p not in tried]
            if not candidates:
                break
            prefiller = self._choose_prefiller.choose(candidates)
            tried.add(prefiller)
            logger.info(
                "DPD prefill selection: %s selected %s",
                type(self._choose_prefiller).__name__,
                prefiller.url,
            )
            try:
                return await self._prefill_on(job, prefiller, connector)
            except LegFailed as failure:
                self._note_failure(failure)
                reason = "prefill_failed"
                if failure.reply is not None and failure.reply.status in (400, 404, 413, 422):
                    # The request itself may be at fault; the decoder's answer tells the client so.
                    break
            except PrefillFailed as failure:
                self._metrics.leg_failures.labels("prefill", failure.reason).inc()
                logger.warning("%s prefill on %s: %s", job.id, prefiller.url, failure)
                reason = "prefill_failed"
        job.path, job.reason = DECODE_ONLY, reason
        logger.warning("%s falls back to a decoder alone: %s", job.id, reason)
        return None

    async def _prefill_on(self, job: Job, prefiller: Engine, connector: Connector) -> Handoff:
        sent = self._clock()
        with prefiller.busy():
            reply = await self._legs.call(
                prefiller,
                "POST",
                job.api.value,
                connector.prepare_prefill(job.api, job.body),
                to_engine(job.request, engine_request_id(job.id)),
                head_timeout=self._config.prefill_timeout,
            )
        now = self._clock()
        handoff = connector.on_prefill_reply(reply)
        job.prefiller, job.prefill_seconds = prefiller, now - sent
        self._metrics.prefill.observe(now - sent)
        logger.info("%s prefill time (TTFT): %.4f", job.id, now - sent)
        self._log_routing(job, prefiller.url, now - job.arrived)
        return handoff

    async def _fall_back(self, job: Job, decoder: Engine) -> str:
        """A long prompt on a decoder stalls that decoder's streams, so only a few may be there at once."""
        if self._fallbacks >= self._config.max_fallbacks:
            raise unavailable(
                f"No prefill engine can take this prompt ({job.reason}) and decode engines already compute "
                f"{self._fallbacks} long prompts.",
                retry_after_s=5,
            )
        self._fallbacks += 1
        try:
            return await self._decode(job, decoder, None)
        finally:
            self._fallbacks -= 1

    async def _decode(self, job: Job, decoder: Engine, handoff: Handoff | None) -> str:
        sent = self._clock()
        body = (
            self._connector().prepare_decode(job.api, job.body, handoff)
            if handoff is not None
            else job.body.edited({})
        )
        self._log_routing(job, f"decoder {decoder.url}", self._clock() - sent)
        self._metrics.prompt_tokens.labels(job.path).inc(job.tokens or 0)
        with decoder.busy():
            async with self._legs.open(
                decoder,
                "POST",
                job.api.value,
                body,
                to_engine(job.request, engine_request_id(job.id)),
                head_timeout=self._config.first_token_timeout,
                # A leg that carries a hand-off may reach an engine once only.
                resend=handoff is None,
            ) as response:
                headers = to_client(response.headers, job.id) + self._explanation(job, decoder)
                streamed = response.status == 200 and _is_event_stream(response.header(b"content-type"))
                if not streamed:
                    reply = Reply(response.status, headers, await response.read(MAX_REPLY_BYTES))
                    if reply.status >= 500:
                        raise LegFailed(
                            decoder, "status", f"{decoder.url} answered HTTP {reply.status}", reply
                        )
                    job.responder.send(reply.status, reply.headers, reply.body)
                    return "ok" if reply.status < 400 else "rejected"
                return await self._relay(job, decoder, handoff, response, headers, sent)

    async def _relay(
        self,
        job: Job,
        decoder: Engine,
        handoff: Handoff | None,
        response: Response,
        headers: Headers,
        sent: float,
    ) -> str:
        ttft = self._metrics.ttft.labels(job.path)

        def on_first(now: float) -> None:
            ttft.observe(now - job.arrived)
            if handoff is not None:
                self._metrics.handoff.observe(now - sent)

        relay = StreamRelay(
            job.responder,
            response,
            headers,
            on_first=on_first,
            observe_gap=self._metrics.itl.labels(job.path).observe,
            clock=self._clock,
        )
        await response.relay(relay)
        if not job.responder.started:
            raise LegFailed(
                decoder, "in_band_error", f"{decoder.url} began its stream with {relay.scan.error!r}"
            )
        scan = relay.scan
        if scan.done and scan.error is None and scan.finish_reason is None:
            job.responder.finish()
            return "ok"
        self._metrics.leg_failures.labels("decode", "in_band_error").inc()
        if scan.error is None:
            raise bad_gateway(f"The engine ended its answer early ({scan.finish_reason or 'no [DONE]'}).")
        job.responder.abort()  # the engine's own error event has been relayed
        return "failed"

    def _explanation(self, job: Job, decoder: Engine) -> Headers:
        """Response headers that tell the path taken, for clients that ask (and where it is enabled)."""
        if not job.explain:
            return []
        told = {
            "path": job.path,
            "reason": job.reason,
            "prompt-tokens": job.tokens,
            "threshold": self._config.routing_threshold,
            "prefill-url": job.prefiller.url if job.path == DISAGGREGATED and job.prefiller else None,
            "prefill-ms": f"{job.prefill_seconds * 1000:.1f}" if job.prefill_seconds is not None else None,
            "decode-url": decoder.url,
        }
        return [(f"x-tandem-{k}".encode(), str(v).encode()) for k, v in told.items() if v is not None]

    def _note_failure(self, failure: LegFailed) -> None:
        engine = failure.engine
        self._metrics.leg_failures.labels(engine.role.value, failure.reason).inc()
        logger.warning("%s leg failed: %s", engine.role.value, failure)
        if failure.unreachable:
            self._fleet.lost(engine, f"cannot be reached: {failure}")

    def _give_up(self, job: Job, failure: LegFailed) -> str:
        """The last failure is final: the engine's own error where it gave one."""
        if failure.reply is None:
            raise bad_gateway(f"The {failure.engine.role.value} engine failed: {failure}")
        job.responder.send(failure.reply.status, failure.reply.headers, failure.reply.body)
        return "failed"

    def _log_routing(self, job: Job, target: str, seconds: float) -> None:
        logger.info(
            "Routing request %s to %s at %.3f, process time = %.4f", job.id, target, time.time(), seconds
        )


def _is_event_stream(content_type: bytes | None) -> bool:
    return content_type is not None and content_type.startswith(b"text/event-stream")
