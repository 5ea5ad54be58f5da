"""The operator's own HTTP: health and metrics, and webhooks over TLS."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from tandem.api.conversion import convert_review
from tandem.operator.webhooks.admission import admission_review
from tandem.operator.webhooks.trust import CONVERT_PATH, VALIDATE_PATH

LARGEST_REVIEW = 32 * 1024 * 1024
"""Bytes. A conversion carries a list of objects, each of up to 1.5 MiB."""

log = logging.getLogger(__name__)

Review = Callable[[Mapping[str, Any]], dict[str, Any]]


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
            web.post(CONVERT_PATH, _answering(convert_review)),
            web.post(VALIDATE_PATH, _answering(admission_review)),
        ]
    )
    return app


def _answering(review: Review) -> Callable[[web.Request], Any]:
    async def answer(request: web.Request) -> web.Response:
        try:
            asked = await request.json()
            # Judging a resource takes milliseconds; the loop has leases to renew.
            made = await asyncio.to_thread(review, asked)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("%s: not a review: %r", request.path, error)
            raise web.HTTPBadRequest(text=f"not a review: {error!r}\n") from error
        return web.json_response(made)

    return answer


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
