"""The port that clients come to: its limits, its TLS, and which pages in browsers may use it."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from typing import Any

from tandem.config import RouterConfig
from tandem.http import BadTls, Cors, Handler, Limits, Server, Tls, TlsFiles, serve, with_cors

logger = logging.getLogger("tandem.router")

_FILES_BESIDE = 512
"""Open files that are no connections of clients and of the requests they bring."""


@asynccontextmanager
async def listening(
    config: RouterConfig, handler: Handler, on_refused: Callable[[HTTPStatus], None]
) -> AsyncIterator[Server]:
    """A server for clients; closing it is the block's. Raises OSError and ValueError that name the flags."""
    if config.cors_origins:
        methods = config.cors_methods or Cors.methods
        handler = with_cors(handler, Cors(frozenset(config.cors_origins), methods, config.cors_headers))
    tls = _tls(config)
    limits = _limits(config)
    server = await listen(
        handler, "--", config.host, config.port, limits=limits, tls=tls, on_refused=on_refused
    )
    following = asyncio.create_task(tls.follow()) if tls is not None else None
    try:
        yield server
    finally:
        if following is not None:
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following


async def listen(handler: Handler, flags: str, host: str, port: int, **more: Any) -> Server:
    """As `http.serve`. Raises OSError that names the flags of the place: those that begin so."""
    try:
        return await serve(handler, host, port, **more)
    except OSError as error:
        raise OSError(f"{flags}host {host} {flags}port {port}: cannot listen there: {error}") from error


def _limits(config: RouterConfig) -> Limits:
    return Limits(
        head_bytes=config.max_head_bytes,
        body_bytes=config.max_body_bytes,
        held_bytes=config.max_held_bytes,
        head_timeout=config.head_timeout,
        keep_alive_timeout=config.keep_alive_timeout,
        body_timeout=config.body_timeout,
        body_rate=config.body_rate,
        write_timeout=config.write_timeout,
        connections=_connections(config.max_connections),
    )


def _tls(config: RouterConfig) -> Tls | None:
    if config.tls_certificate is None or config.tls_key is None:
        return None
    try:
        return Tls(TlsFiles(config.tls_certificate, config.tls_key, config.tls_client_ca))
    except BadTls as error:
        flags = "--tls-certificate, --tls-key" + (", --tls-client-ca" if config.tls_client_ca else "")
        raise ValueError(f"{flags}: {error}") from error


def _connections(wanted: int) -> int:
    """How many connections of clients there may be: each may bring one to an engine. With fewer files than
    that takes, it would be the engines that seem dead when clients are many."""
    files = 2 * wanted + _FILES_BESIDE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < files:
        soft = files if hard == resource.RLIM_INFINITY else min(files, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft >= files:
        return wanted
    possible = max(1, (soft - _FILES_BESIDE) // 2)
    logger.info(
        "at most %d connections of clients, not %d (--max-connections), since this process may open %d files "
        "(ulimit -n)",
        possible,
        wanted,
        soft,
    )
    return possible
