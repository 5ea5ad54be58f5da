"""Sends the requests of a trace at their times and notes how each was answered.

Times are the running loop's, so it works in virtual time (`tandem.sim.virtual`) as well as in real time; for
the latter on asyncio's own loop, as uvloop's clock counts whole milliseconds.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from traces import TraceRequest

from tandem.bench.load import LoadError, timed
from tandem.http import Client, Origin


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one request. Seconds; `sent`: since the replay began."""

    request: TraceRequest
    sent: float
    ttft: float = 0.0
    latency: float = 0.0
    tokens: int = 0
    """Pieces in which the answer came; of an engine that streams each token, its tokens."""
    error: str = ""
    """Why there is no whole answer; its times mean nothing then."""


async def replay(
    requests: Sequence[TraceRequest],
    url: str,
    model: str,
    *,
    speed: float = 1.0,
    prompt: Callable[[TraceRequest], str | list[int]] = lambda request: request.text,
    fields: Callable[[TraceRequest], Mapping[str, Any]] = lambda request: {},
) -> list[Answer]:
    """Put a trace on the server at `url`, `speed` times as fast as it was. Answers in the requests' order.

    prompt: how a request's prompt is written. fields: what its body has besides the usual.
    Whatever the server does, there is an answer for each request; it is not asked a second time.
    """
    origin, loop = Origin.parse(url), asyncio.get_running_loop()
    # Before the clock starts, so that nothing is sent late for it.
    bodies = [_body(request, model, prompt(request), fields(request)) for request in requests]
    client = Client(idle_per_origin=1024)
    begun = loop.time()

    async def send(request: TraceRequest, body: dict[str, Any]) -> Answer:
        await asyncio.sleep(begun + request.at / speed - loop.time())
        sent = loop.time() - begun
        try:
            timing = await timed(client, origin, body)
        except LoadError as error:
            return Answer(request, sent, error=str(error))
        latency = timing.ttft + sum(timing.gaps)
        return Answer(request, sent, timing.ttft, latency, 1 + len(timing.gaps))

    try:
        sending = [asyncio.create_task(send(r, body)) for r, body in zip(requests, bodies, strict=True)]
        return await asyncio.gather(*sending)
    finally:
        await client.aclose()


def _body(
    request: TraceRequest, model: str, prompt: str | list[int], fields: Mapping[str, Any]
) -> dict[str, Any]:
    """A greedy completion of exactly the tokens that the trace has."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": request.output_tokens,
        "min_tokens": request.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        **fields,
    }


def figures(answers: Sequence[Answer], speed: float = 1.0) -> dict[str, float]:
    """Of one replay: seconds, numbers of requests, and how late the last one was sent."""
    good = [a for a in answers if not a.error]
    ttft = [a.ttft for a in good]
    return {
        "requests": len(answers),
        "errors": len(answers) - len(good),
        "ttft_p50": percentile(ttft, 50),
        "ttft_p99": percentile(ttft, 99),
        "latency_p50": percentile([a.latency for a in good], 50),
        "latency_p99": percentile([a.latency for a in good], 99),
        "short_answers": sum(a.tokens < a.request.output_tokens for a in good),
        "late": max((a.sent - a.request.at / speed for a in answers), default=0.0),
        "seconds": max((a.sent + a.latency for a in good), default=0.0),
    }


def percentile(values: Sequence[float], percent: int) -> float:
    """Linear between values; 0 of none."""
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
