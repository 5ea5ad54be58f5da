"""Errors that a client of the router sees, in OpenAI's form."""

from __future__ import annotations

import msgspec

from tandem.http import Headers


class ApiError(Exception):
    """Ends a request with an HTTP status and `{"error": {message, type, param, code}}`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | int | None = None,
        retry_after_s: int | None = None,
        quotes: bool = False,
    ) -> None:
        """`quotes`: the message may have words of the prompt in it, and is not to be logged."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code if code is not None else status
        self.retry_after_s = retry_after_s
        self.quotes = quotes

    def body(self) -> bytes:
        return msgspec.json.encode(
            {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}
        )

    def headers(self) -> Headers:
        headers: Headers = [(b"content-type", b"application/json")]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % self.retry_after_s))
        return headers

    def event(self) -> bytes:
        """The same error as an event of a stream that has begun, and may have broken off in a line."""
        return b"\n\ndata: " + self.body() + b"\n\n"


def unavailable(message: str, *, retry_after_s: int = 1) -> ApiError:
    return ApiError(503, message, kind="service_unavailable", retry_after_s=retry_after_s)


def bad_gateway(message: str) -> ApiError:
    return ApiError(502, message, kind="engine_error")


class Unauthorized(ApiError):
    """A request without a key that is known here; `given`: it has one."""

    def __init__(self, message: str, *, given: bool) -> None:
        super().__init__(401, message, code="invalid_api_key")
        self._challenge = b'Bearer error="invalid_token"' if given else b"Bearer"

    def headers(self) -> Headers:
        return [*super().headers(), (b"www-authenticate", self._challenge)]


class OverLimit(ApiError):
    """More than a key may use. `kind`, as OpenAI has it: `requests` or `tokens`."""

    def __init__(self, message: str, *, kind: str, retry_after_s: int) -> None:
        super().__init__(429, message, kind=kind, code="rate_limit_exceeded", retry_after_s=retry_after_s)


class TooManyRequests(ApiError):
    """More requests than the endpoint's limits allow. The body is HyperPod's: `error` is a string, and the
    numbers stand beside it."""

    def __init__(
        self, status: int, *, max_concurrent: int, max_queue_size: int, current: int, retry_after_s: int
    ) -> None:
        super().__init__(status, "Too many concurrent requests", retry_after_s=retry_after_s)
        self._numbers = {
            "max_concurrent": max_concurrent,
            "max_queue_size": max_queue_size,
            "current": current,
        }

    def body(self) -> bytes:
        return msgspec.json.encode({"error": self.message, **self._numbers})
