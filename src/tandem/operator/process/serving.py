"""The operator's own HTTP: health and metrics, and webhooks over TLS."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from tandem.api.conversion import convert_review
from tandem.operator.webhooks.admission import admission_review
from tandem.operator.webhooks.trust import CONVERT_PATH, VALIDATE_PATH

LARGEST_REVIEW = 32 * 1024 * 1024
"""Bytes. A conversion carries a list of objects, each of up to 1.5 MiB."""

MOST_VALUES = 1_000_000
"""In one object. In memory the shortest is twenty times as long as in JSON, and who can reach the port may
send anything; no object that an API server stores has so many."""
SMALL_REVIEW = 256 * 1024
"""Bytes, up to which reviews do not wait for each other."""
READ_SECONDS = 10.0

log = logging.getLogger(__name__)

Review = Callable[[bytes], bytes]
"""From what an API server sends to what it gets. Raises what comes of bytes that are no review."""


def health_app(ready: Callable[[], str | None]) -> web.Application:
    """`ready` says why not; None: ready."""

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        reason = ready()
        return web.Response(text=f"{reason or 'ok'}\n", status=200 if reason is None else 503)

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz)])
    return app


def metrics_app(text: Callable[[], bytes]) -> web.Application:
    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=text(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics)])
    return app


def webhook_app() -> web.Application:
    app = web.Application(client_max_size=LARGEST_REVIEW)
    app.add_routes(
        [
            web.post(CONVERT_PATH, _answering(_converted)),
            web.post(VALIDATE_PATH, _answering(_judged)),
        ]
    )
    return app


def _answering(review: Review) -> Callable[[web.Request], Any]:
    one_at_a_time = asyncio.Semaphore()

    async def answer(request: web.Request) -> web.Response:
        length = request.content_length
        large = length is None or length > SMALL_REVIEW
        try:
            async with one_at_a_time if large else nullcontext():
                async with asyncio.timeout(READ_SECONDS):
                    body = await request.read()
                # Judging a resource takes milliseconds; the loop has leases to renew.
                made = await asyncio.to_thread(review, body)
        except TimeoutError as error:
            raise web.HTTPRequestTimeout from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            log.warning("%s: not a review: %r", request.path, error)
            raise web.HTTPBadRequest(text=f"not a review: {error!r}\n") from error
        return web.Response(body=made, content_type="application/json")

    return answer


def _judged(body: bytes) -> bytes:
    return _encoded(admission_review(_decoded(body)))


def _encoded(answer: Any) -> bytes:
    """Not by msgspec, which takes no number beyond 64 bits, and makes null of what is none."""
    return json.dumps(answer, allow_nan=False).encode()


def _decoded(text: bytes | msgspec.Raw) -> Any:
    values = sum(map(bytes(text).count, (b",", b"[", b"{")))
    if values > MOST_VALUES:
        raise ValueError(f"it has some {values} values; at most {MOST_VALUES} are read")
    return msgspec.json.decode(text)


class _Conversion(msgspec.Struct):
    """A ConversionReview whose objects are still text."""

    apiVersion: str  # Kubernetes' own names
    kind: str
    request: _ConversionRequest


class _ConversionRequest(msgspec.Struct):
    uid: str
    desiredAPIVersion: str
    objects: list[msgspec.Raw]


def _converted(body: bytes) -> bytes:
    """Objects are converted one after the other: one alone is in memory, and a list with a large one in it,
    which may be another tenant's, can still be read."""
    review = msgspec.json.decode(body, type=_Conversion)
    asked = review.request
    converted: list[msgspec.Raw] = []

    def answer(objects: list[Any]) -> dict[str, Any]:
        request = {"uid": asked.uid, "desiredAPIVersion": asked.desiredAPIVersion, "objects": objects}
        return convert_review({"apiVersion": review.apiVersion, "kind": review.kind, "request": request})

    for text in asked.objects:
        one = answer([_decoded(text)])
        if "convertedObjects" not in one["response"]:
            return _encoded(one)
        converted.append(msgspec.Raw(_encoded(one["response"]["convertedObjects"][0])))
    whole = answer([])
    whole["response"]["convertedObjects"] = converted
    return msgspec.json.encode(whole)


@asynccontextmanager
async def serving(
    app: web.Application, host: str | None, port: int, tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """Serves until the context is left; yields the port. Raises OSError where it is taken."""
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port, ssl_context=tls)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def tls_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Raises OSError (ssl.SSLError is one) where the files are none. Loading files into it again serves
    the new ones from then on."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate, key)
    return context
