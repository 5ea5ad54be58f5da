"""The decode leg: sent once to one decoder, its answer relayed to the client."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tandem.config import RouterConfig
from tandem.http import Headers, Response
from tandem.router.classify import Api
from tandem.router.engines import Engine
from tandem.router.explain import explanation
from tandem.router.handover import Handover
from tandem.router.headers import engine_request_id, to_client, to_engine
from tandem.router.job import Job
from tandem.router.legs import MAX_REPLY_BYTES, LegFailed, Legs, Reply
from tandem.router.metrics import Metrics
from tandem.router.relay import StreamRelay, judge
from tandem.router.strategies import OutputEstimate

# What the types of vLLM's errors look like.
_KIND = re.compile(r"[A-Za-z_ ]{1,40}")


class Decoding:
    def __init__(
        self,
        config: RouterConfig,
        legs: Legs,
        metrics: Metrics,
        outputs: OutputEstimate,
        clock: Callable[[], float],
    ) -> None:
        """`outputs` learns how long answers are."""
        self._config = config
        self._legs = legs
        self._metrics = metrics
        self._outputs = outputs
        self._clock = clock

    async def run(
        self, job: Job, decoder: Engine, handover: Handover | None, on_first: Callable[[], None]
    ) -> str:
        """Have a decoder answer the client. Returns how the request ended.

        `on_first` is called when a stream's first token shows that the prompt is computed. Raises LegFailed:
        as long as the client has received nothing, another leg may be tried.
        """
        body = handover.decode_body() if handover is not None else job.body.edited({})
        hit = job.decode_choice.hit_tokens if job.decode_choice is not None else 0
        computes = max(0, job.tokens - hit) if handover is None else 0
        with decoder.busy(computes) as computed:
            # What it is believed to have, and has not, it computes too.
            tokens = decoder.pending_tokens + (hit if handover is None else 0)
            patience = self._config.patience(self._config.first_token_timeout, tokens)
            if not job.body.get("stream"):
                patience += self._config.answer_timeout  # its head comes with its end
            sent = self._clock()
            async with self._legs.open(
                decoder,
                "POST",
                job.api.value,
                body,
                # KV that was handed over goes to any rank; a prompt to compute, to the one that has most.
                to_engine(
                    job.request,
                    engine_request_id(job.id),
                    job.rank(job.decode_choice) if handover is None else None,
                ),
                head_timeout=patience,
                # A leg that carries a hand-off may reach an engine once only.
                resend=handover is None,
            ) as response:
                del body
                leg = _Leg(job, decoder, handover, sent, patience)
                headers = to_client(response.headers, job.id) + self._explanation(job, decoder)
                if response.status == 200 and _is_event_stream(response.header(b"content-type")):
                    return await self._relay(leg, response, headers, (computed, on_first))
                reply = Reply(response.status, headers, await response.read(MAX_REPLY_BYTES))
        if not (reply.status == 200 or 400 <= reply.status < 500):
            raise LegFailed(decoder, "status", f"{decoder.url} answered HTTP {reply.status}", reply)
        if reply.status == 200:
            wrong, usage = judge(reply.body)
            if wrong is not None:
                raise LegFailed(decoder, "in_band_error", f"{decoder.url} answered 200 with {wrong}")
            if usage.generated:  # else it has not said
                self._outputs.seen(usage.generated)
            job.scan, job.usage = None, usage
        if reply.status == 200 and handover is not None:
            handover.taken()
        job.answer.send(reply.status, reply.headers, reply.body)
        return "ok" if reply.status == 200 else "rejected"

    async def _relay(
        self, leg: _Leg, response: Response, headers: Headers, on_computed: Iterable[Callable[[], None]]
    ) -> str:
        job, decoder = leg.job, leg.decoder
        ttft = self._metrics.ttft.labels(job.path)

        def on_first(now: float) -> None:
            response.idle_timeout = self._config.stream_idle_timeout
            for tell in on_computed:
                tell()
            ttft.observe(now - job.arrived)
            if leg.handover is not None:
                leg.handover.taken()
                self._metrics.handoff.observe(now - leg.sent)
            job.answer_begun()

        relay = StreamRelay(
            job.answer,
            response,
            headers,
            silent_events=1 if job.api is Api.CHAT else 0,
            on_first=on_first,
            observe_gap=self._metrics.itl.of(job.path).observe,
            clock=self._clock,
        )
        job.scan = relay.scan
        response.idle_timeout = leg.patience
        await response.relay(relay)
        relay.end()
        scan = relay.scan
        if not job.answer.started:
            said = _in_short(scan.error) if scan.error else scan.finish_reason or "no answer"
            raise LegFailed(decoder, "in_band_error", f"{decoder.url} began its stream with {said}")
        if scan.done and scan.error is None and scan.finish_reason is None:
            job.answer.finish()
            self._outputs.seen(scan.events)  # about as many as tokens
            return "ok"
        if scan.error is None:
            why = scan.finish_reason or "no [DONE]"
            raise LegFailed(decoder, "in_band_error", f"{decoder.url} ended its answer early ({why})")
        self._metrics.leg_failures.labels("decode", "in_band_error").inc()
        job.answer.break_off()  # the engine's own error event has been relayed
        return "failed"

    def _explanation(self, job: Job, decoder: Engine) -> Headers:
        """Response headers that tell the path taken, for clients that ask (and where it is enabled)."""
        if not job.explain:
            return []
        told = explanation(job, decoder, self._config.routing_threshold)
        return [(f"x-tandem-{k}".encode(), str(v).encode()) for k, v in told.items()]


@dataclass(slots=True)
class _Leg:
    """What one decode leg's relay needs to know."""

    job: Job
    decoder: Engine
    handover: Handover | None
    sent: float
    patience: float
    """Longest wait for the first token, in seconds."""


def _in_short(error: dict[str, Any]) -> str:
    """What may be logged of an engine's error: not its own words, which may quote the prompt."""
    kind, code, message = error.get("type"), error.get("code"), str(error.get("message", ""))
    told = [f"type {kind}"] if isinstance(kind, str) and _KIND.fullmatch(kind) else []
    told += [f"code {code}"] if isinstance(code, int) and abs(code) < 10**6 else []
    return f"an error ({', '.join([*told, f'{len(message)} characters'])})"


def _is_event_stream(content_type: bytes | None) -> bool:
    return content_type is not None and content_type.startswith(b"text/event-stream")
