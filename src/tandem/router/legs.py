"""One call to one engine: a leg of a request, a canary, a question. Every way to fail becomes LegFailed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from tandem.config import RouterConfig
from tandem.http import (
    BodyTooLarge,
    Client,
    ConnectFailed,
    Headers,
    HeadTimeout,
    HTTPClientError,
    IdleTimeout,
    Response,
    UpstreamClosed,
)
from tandem.router.engine_authorization import EngineAuthorization
from tandem.router.engines import Engine

# An answer that is read whole (a prefill reply, a non-streamed completion) may not be larger than this.
MAX_REPLY_BYTES = 64 * 1024 * 1024

# Labels of tandem_leg_failures.
_CAUSES: dict[type[HTTPClientError], str] = {
    ConnectFailed: "connect",
    HeadTimeout: "head_timeout",
    IdleTimeout: "idle_timeout",
    UpstreamClosed: "closed",
    BodyTooLarge: "too_large",
}


@dataclass(frozen=True, slots=True)
class Reply:
    """An engine's whole answer."""

    status: int
    headers: Headers
    body: bytes


class LegFailed(Exception):
    """A leg gave no usable answer. `reason` is a metric label; `reply` is there when the engine answered."""

    def __init__(self, engine: Engine, reason: str, message: str, reply: Reply | None = None) -> None:
        super().__init__(message)
        self.engine = engine
        self.reason = reason
        self.reply = reply

    @property
    def unreachable(self) -> bool:
        """Whether the engine could not be connected to at all."""
        return self.reason == "connect"

    @property
    def rejected(self) -> bool:
        """Whether the engine says that the request itself is at fault (429: that there are too many)."""
        return (
            self.reply is not None and 400 <= self.reply.status < 500 and self.reply.status not in (408, 429)
        )

    def engine_message(self) -> str:
        """The engine's own words, where it gave any."""
        if self.reply is None:
            return str(self)
        try:
            error = msgspec.json.decode(self.reply.body, type=_ErrorReply).error
        except msgspec.DecodeError:
            return f"HTTP {self.reply.status}"
        return error.message


class _Error(msgspec.Struct):
    message: str = ""


class _ErrorReply(msgspec.Struct):
    error: _Error


class Legs:
    def __init__(
        self, client: Client, config: RouterConfig, authorization: EngineAuthorization | None = None
    ) -> None:
        """`authorization`: the configuration's by default."""
        self._client = client
        self._config = config
        self._authorization = authorization or EngineAuthorization(config)

    @asynccontextmanager
    async def open(
        self,
        engine: Engine,
        method: str,
        path: str,
        body: bytes,
        headers: Headers,
        *,
        head_timeout: float,
        idle_timeout: float | None = None,
        resend: bool = True,
    ) -> AsyncIterator[Response]:
        """Send one request; the block runs with the answer's head there.

        Transport failures inside the block become LegFailed as well. Leaving the block early closes the
        connection: the engine sees the request cancelled. `idle_timeout`: between two reads of the body; the
        configured one by default. `resend`: a kept connection that turns out to be dead is replaced once.
        """
        exchange = self._client.stream(
            engine.origin,
            method,
            path.encode(),
            self._authorization.applied(headers),
            body,
            connect_timeout=self._config.connect_timeout,
            head_timeout=head_timeout,
            idle_timeout=self._config.stream_idle_timeout if idle_timeout is None else idle_timeout,
            retry=resend,
        )
        del body  # which nobody needs any more once it is sent
        try:
            async with exchange as response:
                if response.status == 401 and not self._authorization.passes:
                    # It is not the client whom it does not know.
                    what = f"{engine.url}{path} answered HTTP 401: {self._authorization.missing}"
                    raise LegFailed(engine, "unauthorized", what)
                yield response
        except HTTPClientError as error:
            cause = next((c for kind, c in _CAUSES.items() if isinstance(error, kind)), "protocol")
            raise LegFailed(engine, cause, str(error)) from None

    async def call(
        self,
        engine: Engine,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Headers | None = None,
        *,
        head_timeout: float = 30.0,
        resend: bool = True,
    ) -> bytes:
        """Send one request and read its whole answer. Raises LegFailed unless it is a 200. `head_timeout` is
        for a silence in the body, too. `resend`: as for `open`."""
        sent: Headers = headers if headers is not None else [(b"content-type", b"application/json")]
        async with self.open(
            engine,
            method,
            path,
            body,
            sent,
            head_timeout=head_timeout,
            idle_timeout=head_timeout,
            resend=resend,
        ) as response:
            answer = await response.read(MAX_REPLY_BYTES)
            if response.status != 200:
                reply = Reply(response.status, response.headers, answer)
                what = f"{engine.url}{path} answered HTTP {response.status}"
                if response.status == 401:  # to the router itself, or to a client's own key
                    what += f": {self._authorization.missing}"
                raise LegFailed(engine, "status", what, reply)
            return answer
