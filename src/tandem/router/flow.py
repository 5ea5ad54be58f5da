"""The request engine: one flow for every generation request, disaggregated or not.

classify → count → choose decoder and prefiller, reserve → (prefill leg, hand-off) → decode leg → relay.
One task runs a request from start to end; when the client leaves, the task is cancelled and whichever
leg is open closes its connection, which ends the work on the engine. (A prefill leg that pushes its KV goes
on, and is cleaned up after: see `handover`.)

Failures before the client's first byte are repaired: another prefiller, else the decoder computes the
prompt itself (a bounded number at a time); another decoder with a new prefill. After the first byte an
error event ends the stream, and the message is left unfinished so that it cannot look whole.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tandem.config import RouterConfig
from tandem.http import Request, Responder
from tandem.router.answer import Answer
from tandem.router.body import Body
from tandem.router.choosing import Choosing, FallBack, Pair
from tandem.router.classify import Api, refuse_internal
from tandem.router.connectors import PrefillFailed
from tandem.router.decoding import Decoding
from tandem.router.engines import Engine, EngineRole, State
from tandem.router.errors import ApiError, OverLimit, TooManyRequests, bad_gateway, unavailable
from tandem.router.fleet import Fleet
from tandem.router.gate import Gate
from tandem.router.handover import Handover, Handovers
from tandem.router.headers import (
    check_content_type,
    engine_request_id,
    request_id,
    to_client,
    to_engine,
)
from tandem.router.invocations import invoked
from tandem.router.job import Job, Path, Reason
from tandem.router.keys import Caller
from tandem.router.legs import LegFailed, Legs
from tandem.router.metrics import Metrics
from tandem.router.reading import Reading
from tandem.router.retries import RetryBudget
from tandem.router.waiting import Line, LineFull, WaitedTooLong

logger = logging.getLogger("tandem.router")


class Flow:
    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        legs: Legs,
        choosing: Choosing,
        gate: Gate,
        handovers: Handovers,
        line: Line,
        metrics: Metrics,
        reading: Reading,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`line`: those who wait for room on engines."""
        self._config = config
        self._fleet = fleet
        self._choosing = choosing
        self._handovers = handovers
        self._line = line
        self._metrics = metrics
        self._reading = reading
        self._clock = clock
        self._gate = gate
        self._retries = RetryBudget(config.retry_ratio, clock)
        self._decoding = Decoding(config, legs, metrics, choosing.outputs, clock)
        self._served = frozenset(config.served_model_name)
        self._fallbacks = 0
        self._fallback_tokens = 0

    async def serve(
        self, request: Request, responder: Responder, api: Api | None, caller: Caller | None = None
    ) -> None:
        """Answer one generation request, whatever happens to it. `api`: None where its body says which.
        `caller`: whose it is, where there are API keys."""
        rid = request_id(request)
        answer = Answer(responder)
        job: Job | None = None
        admitted = limited = False
        outcome = "failed"
        try:
            if caller is not None:
                caller.begin()
            job = await self.accept(request, answer, api, rid, caller)
            async with self._gate.passing():
                admitted = True
                self._retries.request()
                heartbeat = self._config.heartbeat if job.body.get("stream") is True else None
                with answer.beating(heartbeat, [_id_field(rid)]):
                    await self._choosing.decide(job)
                    if caller is not None:
                        caller.prompt(job.prompt.tokens)
                    outcome = await self._generate(job)
        except asyncio.CancelledError:
            outcome = "client_left"
            raise
        except ApiError as error:
            outcome = "rejected" if error.status < 500 or isinstance(error, TooManyRequests) else "failed"
            limited = isinstance(error, OverLimit)
            said = "it is told why; that may quote the prompt" if error.quotes else error.message
            logger.warning("%s ends with HTTP %d: %s", rid, error.status, said)
            if answer.started:
                answer.break_off(error.event())
            else:
                answer.send(error.status, [*error.headers(), _id_field(rid)], error.body())
        finally:
            path, reason = ("none", "limit") if limited else _labels(job, admitted)
            self._metrics.requests.labels(path, reason, outcome).inc()
            if caller is not None:
                caller.end(*_used(job, left=outcome == "client_left"))
            if job is not None and job.prompt.tokens is not None and not limited:
                self._metrics.prompt_tokens.labels(path).inc(job.prompt.tokens)

    async def accept(
        self,
        request: Request,
        answer: Answer,
        api: Api | None,
        rid: str = "-",
        caller: Caller | None = None,
    ) -> Job:
        """Read a request. Raises ApiError for one that may not be served."""
        arrived = self._clock()
        check_content_type(request)
        body = await self._reading.read(request.body)
        refuse_internal(body, request.headers)
        if api is None:
            api, body = invoked(request, body)
        model = self._check_model(body, caller)
        if caller is not None:
            body = caller.salted(body)
        return Job(
            request=request,
            answer=answer,
            api=api,
            body=body,
            id=rid,
            arrived=arrived,
            explain=self._config.explain and request.header(b"x-tandem-explain") == b"1",
            model=model,
            caller=caller,
            longest=self._fleet.group(model).max_model_len,
        )

    def _check_model(self, body: Body, caller: Caller | None) -> str | None:
        """The model that a request names, if any."""
        model = body.get("model")
        if not isinstance(model, str | None):
            raise ApiError(400, "The field 'model' must be a string.", param="model")
        if caller is not None:
            caller.check_model(model)
        told = self._fleet.names
        known = self._served or told
        if model is None and self._fleet.parted:
            names = ", ".join(sorted(known))
            raise ApiError(400, f"The field 'model' is missing; several are served: {names}.", param="model")
        if model is None or not known:
            return model
        unheard_of = bool(told) and model not in told and not self._fleet.all_told
        if unheard_of and (not self._served or model in self._served):
            raise unavailable(
                f"The model {model[:100]!r} may be one of an engine that is not up yet. Try again."
            )
        if model in known:
            return model
        raise ApiError(
            404,
            f"The model {model[:100]!r} does not exist here. Served: {', '.join(sorted(known))}.",
            kind="not_found_error",
            param="model",
            code="model_not_found",
        )

    async def _generate(self, job: Job) -> str:
        """Run legs until the client has an answer. Returns how the request ended."""
        while True:
            if job.path is Path.DISAGGREGATED and (pair := await self._reserve(job)) is not None:
                outcome = await self._hand_over(job, pair)
            else:
                outcome = await self._decode_alone(job)
            if outcome is not None:
                return outcome

    async def _reserve(self, job: Job) -> Pair | None:
        """The engines of the next attempt and what it needs of them, when that is free. None: the job has
        fallen back."""
        try:
            return await self._line.turn(lambda: self._choosing.pair(job), self._config.reservation_timeout)
        except (LineFull, WaitedTooLong):
            job.fall_back(Reason.NO_ROOM)
        except FallBack as fallen:
            job.fall_back(fallen.reason)
        logger.warning("%s falls back to a decoder alone: %s", job.id, job.reason)
        return None

    async def _hand_over(self, job: Job, pair: Pair) -> str | None:
        """One attempt on a prefiller and a decoder. None: it failed, and the request can go on."""
        logger.info("DPD prefill selection: %s selected %s", self._choosing.strategy, pair.prefiller.url)
        begun = self._handovers.begin(job.api, job.body, pair.prefiller, pair.decoder, pair.reservation)
        async with begun as handover:
            # The decoder is busy with it from here on: other requests shall go elsewhere.
            with pair.decoder.holding(job.tokens + job.expected_output):
                return await self._both_legs(job, pair, handover)

    async def _both_legs(self, job: Job, pair: Pair, handover: Handover) -> str | None:
        try:
            await self._prefill(job, pair.prefiller, handover)
        except LegFailed as failure:
            self._prefill_failed(job, pair, failure)
            return None
        except PrefillFailed as failure:
            self._metrics.leg_failures.labels("prefill", failure.reason).inc()
            self._fleet.failed(pair.prefiller)
            logger.warning("%s prefill on %s: %s", job.id, pair.prefiller.url, failure)
            self._next_prefiller(job, pair)
            return None
        outcome = await self._decode(job, pair.decoder, handover)
        if outcome == "ok":
            self._fleet.worked(pair.prefiller)
        elif outcome is None:
            job.doubted_prefillers.add(pair.prefiller)
        if outcome not in ("ok", "rejected") and pair.decoder.state is not State.WAITING:
            # Perhaps it was the KV: several failures in a row have a canary sent across.
            self._fleet.failed(pair.prefiller)
        return outcome

    async def _prefill(self, job: Job, prefiller: Engine, handover: Handover) -> None:
        sent = self._clock()
        job.prefills += 1
        await handover.prefill(
            to_engine(job.request, engine_request_id(job.id), job.rank(job.prefill_choice)),
            tokens=max(0, job.tokens - (job.prefill_choice.hit_tokens if job.prefill_choice else 0)),
            timeout=self._config.patience(
                self._config.prefill_timeout, prefiller.pending_tokens + job.tokens
            ),
        )
        now = self._clock()
        job.prefiller, job.prefill_seconds = prefiller, now - sent
        self._metrics.prefill.observe(now - sent)
        logger.info("%s prefill time (TTFT): %.4f", job.id, now - sent)
        self._log_routing(job, prefiller.url, now - job.arrived)

    def _prefill_failed(self, job: Job, pair: Pair, failure: LegFailed) -> None:
        if failure.rejected:
            self._count_failure(job, failure)
            job.fall_back(Reason.PREFILL_REJECTED)
            job.rejection = failure.reply
            return
        self._note_failure(job, failure)
        self._next_prefiller(job, pair)

    def _next_prefiller(self, job: Job, pair: Pair) -> None:
        """Have the next attempt leave out the one that failed; without one, a decoder serves alone."""
        job.failed_prefillers.add(pair.prefiller)
        if job.prefills >= self._config.max_attempts or not self._retries.retry():
            job.fall_back(Reason.PREFILL_FAILED)
            logger.warning("%s falls back to a decoder alone: %s", job.id, job.reason)

    async def _decode_alone(self, job: Job) -> str | None:
        """A decoder computes the prompt and answers. None: it failed, and the request can go on."""
        decoder = self._choosing.alone(job)
        with decoder.holding(job.tokens + job.expected_output):
            return await self._answer(job, decoder)

    async def _answer(self, job: Job, decoder: Engine) -> str | None:
        free = not job.fallback or decoder.role is EngineRole.BOTH
        if free or job.reason == Reason.DOUBTFUL:  # which is rejected before it is computed
            return await self._decode(job, decoder, None)
        # A long prompt on a decoder stalls that decoder's streams, so only a few may be there at once.
        if not self._may_fall_back(job):
            if (said := job.rejection) is not None:
                job.answer.send(said.status, to_client(said.headers, job.id), said.body)
                return "rejected"
            raise unavailable(
                "No prefill engine can take this prompt, and decode engines compute as many long prompts "
                "as they may. Try again.",
                retry_after_s=5,
            )
        with self._fallback(job.tokens) as computed:
            return await self._decode(job, decoder, None, computed)

    def _may_fall_back(self, job: Job) -> bool:
        if self._fallbacks >= self._config.max_fallbacks:
            return False
        # One alone may be of any length.
        tokens = self._fallback_tokens + job.tokens
        return self._fallbacks == 0 or tokens <= self._config.max_fallback_tokens

    @contextmanager
    def _fallback(self, tokens: int) -> Iterator[Callable[[], None]]:
        """Count a long prompt on a decoder until the block ends or its value is called."""
        self._fallbacks += 1
        self._fallback_tokens += tokens
        counted = True

        def computed() -> None:
            nonlocal counted
            if counted:
                counted = False
                self._fallbacks -= 1
                self._fallback_tokens -= tokens

        try:
            yield computed
        finally:
            computed()

    async def _decode(
        self,
        job: Job,
        decoder: Engine,
        handover: Handover | None,
        on_first: Callable[[], None] = lambda: None,
    ) -> str | None:
        """The decode leg. None: it failed, the client has received nothing, and the request can go on."""
        job.decodes += 1
        self._log_routing(job, f"decoder {decoder.url}", 0.0)

        def first() -> None:
            on_first()
            self._choosing.answered(job, decoder)

        try:
            outcome = await self._decoding.run(job, decoder, handover, first)
        except LegFailed as failure:
            self._note_failure(job, failure)
            if job.answer.started:
                raise bad_gateway(
                    f"The answer broke off: the {decoder.kind} failed ({failure.reason})."
                ) from None
            job.failed_decoders.add(decoder)
            return None if self._may_go_on(job, failure) else self._give_up(job, failure)
        if outcome == "ok":
            self._fleet.worked(decoder)
            if not job.body.get("stream"):
                self._choosing.answered(job, decoder)
        elif outcome == "failed":
            self._fleet.failed(decoder)
        return outcome

    def _may_go_on(self, job: Job, failure: LegFailed) -> bool:
        """Whether another decode leg may be tried after one has failed."""
        if job.decodes >= self._config.max_attempts:
            return False
        if self._choosing.others(job):
            if not self._retries.retry():
                return False
            # Two hand-offs failed on two decoders: it may be what fails, so the next attempt is without one.
            enough = job.decodes >= 2 or job.prefills >= self._config.max_attempts
            if job.path is Path.DISAGGREGATED and enough:
                job.fall_back(Reason.HANDOFF_FAILED)
            elif job.reason == Reason.CACHED:  # what made it short for one decoder is not on the others
                self._choosing.disaggregate(job)
            return True
        if failure.unreachable or job.path is Path.DECODE_ONLY or not self._retries.retry():
            return False
        # There is only this decoder, and it answers: let it compute the prompt alone.
        job.failed_decoders.clear()
        job.fall_back(Reason.HANDOFF_FAILED)
        return True

    def _note_failure(self, job: Job, failure: LegFailed) -> None:
        self._count_failure(job, failure)
        if failure.reply is None:
            failure.engine.doubt()
        if failure.unreachable:
            self._fleet.lost(failure.engine, f"cannot be reached: {failure}")
        else:
            self._fleet.failed(failure.engine)

    def _count_failure(self, job: Job, failure: LegFailed) -> None:
        role = failure.engine.role.value
        self._metrics.leg_failures.labels(role, failure.reason).inc()
        logger.warning("%s %s leg failed: %s", job.id, role, failure)

    def _give_up(self, job: Job, failure: LegFailed) -> str:
        """The last failure is final: the engine's own error where it gave one."""
        if failure.reply is None:
            raise bad_gateway(f"The {failure.engine.kind} failed ({failure.reason}).")
        job.answer.send(failure.reply.status, failure.reply.headers, failure.reply.body)
        return "failed"

    def _log_routing(self, job: Job, target: str, seconds: float) -> None:
        logger.info(
            "Routing request %s to %s at %.3f, process time = %.4f", job.id, target, time.time(), seconds
        )


def _id_field(rid: str) -> tuple[bytes, bytes]:
    return b"x-request-id", rid.encode()


def _labels(job: Job | None, admitted: bool) -> tuple[str, str]:
    """Path and reason of a request for its metrics."""
    if job is None:
        return "none", "invalid"
    if not admitted:
        return "none", "queue"
    return ("none" if job.reason == Reason.UNDECIDED else job.path), job.reason


def _used(job: Job | None, *, left: bool) -> tuple[int, int]:
    """Tokens of prompt and answer that a request is charged for: none where it got no answer, unless its
    client has left meanwhile."""
    if job is None or not (left or job.answer.status == 200):
        return 0, 0
    usage = job.used()
    if job.prompt.tokens is not None:
        return job.prompt.tokens, usage.generated or 0
    prompt = usage.prompt
    if prompt is None:
        metered = job.answer.started and job.caller is not None and job.caller.metered
        prompt = job.most_tokens if metered else 0
    return prompt, usage.generated or 0
