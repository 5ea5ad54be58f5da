"""The request engine: one flow for every generation request, disaggregated or not.

classify → count → choose the decoder → (choose a prefiller, prefill leg, hand-off) → decode leg → relay.
One task runs a request from start to end; when the client leaves, the task is cancelled and whichever
leg is open closes its connection, which ends the work on the engine.

Failures before the client's first byte are repaired: another prefiller, else the decoder computes the
prompt itself (a bounded number at a time); another decoder with a new prefill. After the first byte an
error event ends the stream, and the message is left unfinished so that it cannot look whole.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from tandem.config import RouterConfig
from tandem.http import Headers, Request, Responder, Response
from tandem.router.body import Body
from tandem.router.classify import Api, refuse_internal, why_decode_only
from tandem.router.connectors import Connector, Handoff, PrefillFailed
from tandem.router.counting import Counter
from tandem.router.engines import Engine, EngineRole, Fleet
from tandem.router.errors import ApiError, bad_gateway, unavailable
from tandem.router.headers import engine_request_id, request_id, to_client, to_engine
from tandem.router.job import Job, Path, Reason
from tandem.router.legs import MAX_REPLY_BYTES, LegFailed, Legs, Reply
from tandem.router.metrics import Metrics
from tandem.router.relay import StreamRelay, what_is_wrong
from tandem.router.strategies import LeastLoaded, Strategy

logger = logging.getLogger("tandem.router")

ConnectorFactory = Callable[[], Connector]

# Statuses by which an engine says that the request itself is at fault.
_REJECTIONS = (400, 404, 413, 422)


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
        self._prefill_strategy = strategy
        self._decode_strategy = LeastLoaded()
        self._connector = connector
        self._metrics = metrics
        self._clock = clock
        self._served = frozenset(config.served_model_name)
        self._fallbacks = 0

    async def serve(self, request: Request, responder: Responder, api: Api) -> None:
        """Answer one generation request, whatever happens to it."""
        arrived = self._clock()
        rid = request_id(request)
        job: Job | None = None
        outcome = "failed"
        try:
            job = self._accept(request, responder, api, rid, arrived)
            await self._decide(job)
            outcome = await self._generate(job)
        except asyncio.CancelledError:
            outcome = "client_left"
            raise
        except ApiError as error:
            outcome = "rejected" if error.status < 500 else "failed"
            logger.warning("%s ends with HTTP %d: %s", rid, error.status, error.message)
            if responder.started:
                responder.write(error.event())
                responder.abort()
            else:
                headers = [*error.headers(), (b"x-request-id", rid.encode())]
                responder.send(error.status, headers, error.body())
        finally:
            path, reason = (job.path, job.reason) if job else ("none", "invalid")
            self._metrics.requests.labels(path, reason, outcome).inc()
            if job is not None and job.prompt.tokens is not None:
                self._metrics.prompt_tokens.labels(path).inc(job.prompt.tokens)

    def _accept(self, request: Request, responder: Responder, api: Api, rid: str, arrived: float) -> Job:
        body = Body.parse(request.body)
        refuse_internal(body, request.headers)
        self._check_model(body)
        return Job(
            request=request,
            responder=responder,
            api=api,
            body=body,
            id=rid,
            arrived=arrived,
            explain=self._config.explain and request.header(b"x-tandem-explain") == b"1",
        )

    def _check_model(self, body: Body) -> None:
        model = body.get("model")
        if not isinstance(model, str | None):
            raise ApiError(400, "The field 'model' must be a string.", param="model")
        known = self._served or self._fleet.model_ids
        if model is None or not known or model in known:
            return
        raise ApiError(
            404,
            f"The model {model[:100]!r} does not exist here. Served: {', '.join(sorted(known))}.",
            kind="not_found_error",
            param="model",
            code="model_not_found",
        )

    async def _decide(self, job: Job) -> None:
        """Choose the path: sets the job's prompt, path and reason."""
        threshold = self._config.routing_threshold
        decode_only = why_decode_only(job.api, job.body)
        if not self._fleet.ready(EngineRole.DECODE):
            raise self._not_ready(job)
        if decode_only is not None:
            job.reason = decode_only
            logger.info("Conditional routing: reason=%s, disaggregate=False", job.reason)
            return
        if threshold > 0 or job.explain:
            job.prompt = await self._counter.count(job.api, job.body)
        tokens = job.prompt.tokens
        disaggregate = tokens is None or tokens >= threshold
        logger.info(
            "Conditional routing: estimated_tokens=%s, threshold=%d, disaggregate=%s",
            "not counted" if tokens is None else tokens,
            threshold,
            disaggregate,
        )
        if not disaggregate:
            return
        longest = self._fleet.max_model_len
        if not self._fleet.of(EngineRole.PREFILL):
            job.reason = Reason.NO_PREFILLERS_CONFIGURED
        elif tokens is not None and longest is not None and tokens >= longest:
            job.reason = Reason.OVER_CONTEXT
        else:
            job.path, job.reason = Path.DISAGGREGATED, Reason.THRESHOLD

    async def _generate(self, job: Job) -> str:
        """Run the legs until the client has an answer. Returns how the request ended."""
        for attempt in range(1, self._config.max_attempts + 1):
            decoder = self._pick_decoder(job)
            connector = self._connector()
            handoff: Handoff | None = None
            rejection: Reply | None = None
            if job.path is Path.DISAGGREGATED:
                handoff, rejection = await self._prefill(job, decoder, connector)
            try:
                if job.fallback:
                    return await self._fall_back(job, decoder, connector, rejection)
                return await self._decode(job, decoder, connector, handoff)
            except LegFailed as failure:
                self._note_failure(job, failure)
                if job.responder.started:
                    raise bad_gateway(
                        f"The answer broke off: the decode engine failed ({failure.reason})."
                    ) from None
                job.failed_decoders.add(decoder)
                if attempt == self._config.max_attempts or not self._may_go_on(job, failure):
                    return self._give_up(job, failure)
        raise AssertionError("unreachable: max_attempts is at least 1")

    def _may_go_on(self, job: Job, failure: LegFailed) -> bool:
        """Whether a decoder is left to try after one has failed."""
        if self._untried_decoders(job):
            return True
        if failure.unreachable or job.path is Path.DECODE_ONLY:
            return False
        # There is only this decoder, and it answers: let it compute the prompt alone.
        job.failed_decoders.clear()
        job.fall_back(Reason.HANDOFF_FAILED)
        return True

    def _untried_decoders(self, job: Job) -> list[Engine]:
        ready = self._fleet.ready(EngineRole.DECODE)
        return [d for d in ready if d not in job.failed_decoders] if job.failed_decoders else ready

    def _pick_decoder(self, job: Job) -> Engine:
        decoders = self._untried_decoders(job)
        if not decoders:
            raise self._not_ready(job)
        if job.path is Path.DISAGGREGATED:
            decoders = [d for d in decoders if self._fleet.prefillers_for(d)] or decoders
        return self._decode_strategy.choose(job.prompt, decoders)

    async def _prefill(
        self, job: Job, decoder: Engine, connector: Connector
    ) -> tuple[Handoff | None, Reply | None]:
        """Run the prefill leg on one prefiller after another.

        Returns the hand-off; or none, and the job has fallen back to the decoder alone: then with the
        prefiller's answer if it rejected the request itself.
        """
        tried: set[Engine] = set()
        reason = Reason.NO_PREFILLER
        while job.prefills < self._config.max_attempts:
            candidates = [p for p in self._fleet.prefillers_for(decoder) if p not in tried]
            if not candidates:
                break
            prefiller = self._prefill_strategy.choose(job.prompt, candidates)
            tried.add(prefiller)
            job.prefills += 1
            strategy = type(self._prefill_strategy).__name__
            logger.info("DPD prefill selection: %s selected %s", strategy, prefiller.url)
            reason = Reason.PREFILL_FAILED
            try:
                return await self._prefill_on(job, prefiller, connector), None
            except LegFailed as failure:
                self._note_failure(job, failure)
                if failure.reply is not None and failure.reply.status in _REJECTIONS:
                    job.fall_back(Reason.PREFILL_REJECTED)
                    return None, failure.reply
            except PrefillFailed as failure:
                self._metrics.leg_failures.labels("prefill", failure.reason).inc()
                logger.warning("%s prefill on %s: %s", job.id, prefiller.url, failure)
        job.fall_back(reason)
        logger.warning("%s falls back to a decoder alone: %s", job.id, reason)
        return None, None

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

    async def _fall_back(
        self, job: Job, decoder: Engine, connector: Connector, rejection: Reply | None
    ) -> str:
        """A long prompt on a decoder stalls that decoder's streams, so only a few may be there at once."""
        if self._fallbacks >= self._config.max_fallbacks:
            if rejection is not None:
                job.responder.send(rejection.status, to_client(rejection.headers, job.id), rejection.body)
                return "rejected"
            raise unavailable(
                "No prefill engine can take this prompt, and decode engines compute as many long prompts "
                "as they may. Try again.",
                retry_after_s=5,
            )
        self._fallbacks += 1
        try:
            return await self._decode(job, decoder, connector, None)
        finally:
            self._fallbacks -= 1

    async def _decode(self, job: Job, decoder: Engine, connector: Connector, handoff: Handoff | None) -> str:
        sent = self._clock()
        body = (
            connector.prepare_decode(job.api, job.body, handoff)
            if handoff is not None
            else job.body.edited({})
        )
        self._log_routing(job, f"decoder {decoder.url}", self._clock() - sent)
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
                if response.status == 200 and _is_event_stream(response.header(b"content-type")):
                    return await self._relay(job, decoder, handoff, response, headers, sent)
                reply = Reply(response.status, headers, await response.read(MAX_REPLY_BYTES))
                if reply.status >= 500:
                    raise LegFailed(decoder, "status", f"{decoder.url} answered HTTP {reply.status}", reply)
                if reply.status == 200 and (wrong := what_is_wrong(reply.body)) is not None:
                    raise LegFailed(decoder, "in_band_error", f"{decoder.url} answered 200 with {wrong}")
                job.responder.send(reply.status, reply.headers, reply.body)
                return "ok" if reply.status < 400 else "rejected"

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
            response.idle_timeout = self._config.stream_idle_timeout
            ttft.observe(now - job.arrived)
            if handoff is not None:
                self._metrics.handoff.observe(now - sent)

        relay = StreamRelay(
            job.responder,
            response,
            headers,
            silent_events=1 if job.api is Api.CHAT else 0,
            on_first=on_first,
            observe_gap=self._metrics.itl.labels(job.path).observe,
            clock=self._clock,
        )
        response.idle_timeout = self._config.first_token_timeout
        await response.relay(relay)
        relay.end()
        scan = relay.scan
        if not job.responder.started:
            said = scan.error or "no answer"
            raise LegFailed(decoder, "in_band_error", f"{decoder.url} began its stream with {said!r}")
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
            "path": job.path.value,
            "reason": str(job.reason),
            "prompt-tokens": job.prompt.tokens,
            "threshold": self._config.routing_threshold,
            "prefill-url": job.prefiller.url if job.prefiller is not None else None,
            "prefill-ms": f"{job.prefill_seconds * 1000:.1f}" if job.prefill_seconds is not None else None,
            "decode-url": decoder.url,
        }
        return [(f"x-tandem-{k}".encode(), str(v).encode()) for k, v in told.items() if v is not None]

    def _not_ready(self, job: Job) -> ApiError:
        logger.warning("%s cannot be served: %s", job.id, self._fleet.missing or "every decode engine failed")
        return unavailable("The endpoint is not ready to serve this request. Try again.")

    def _note_failure(self, job: Job, failure: LegFailed) -> None:
        engine = failure.engine
        self._metrics.leg_failures.labels(engine.role.value, failure.reason).inc()
        logger.warning("%s %s leg failed: %s", job.id, engine.role.value, failure)
        if failure.unreachable:
            self._fleet.lost(engine, f"cannot be reached: {failure}")

    def _give_up(self, job: Job, failure: LegFailed) -> str:
        """The last failure is final: the engine's own error where it gave one."""
        if failure.reply is None:
            raise bad_gateway(f"The {failure.engine.role.value} engine failed ({failure.reason}).")
        job.responder.send(failure.reply.status, failure.reply.headers, failure.reply.body)
        return "failed"

    def _log_routing(self, job: Job, target: str, seconds: float) -> None:
        logger.info(
            "Routing request %s to %s at %.3f, process time = %.4f", job.id, target, time.time(), seconds
        )


def _is_event_stream(content_type: bytes | None) -> bool:
    return content_type is not None and content_type.startswith(b"text/event-stream")
