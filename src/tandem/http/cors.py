"""Which pages in browsers may use a server (Cross-Origin Resource Sharing, fetch.spec.whatwg.org)."""

from dataclasses import dataclass

from tandem.http._responder import Responder
from tandem.http._server_connection import Handler
from tandem.http.messages import Headers, Request, error_body

# Browsers ask again after so many seconds at the latest; Chromium's own limit is two hours.
_MAX_AGE = b"600"


@dataclass(frozen=True)
class Cors:
    """Cookies are never asked for: who may see what is told by a header that the page itself sets."""

    origins: frozenset[str]
    """As browsers send them (`https://app.example`), or `*` for all."""
    methods: tuple[str, ...] = ("GET", "HEAD", "POST")
    headers: tuple[str, ...] = ()
    """Names, in lower case, of the request headers that pages may set; none: whatever they ask for."""

    def answer_fields(self, request: Request) -> Headers:
        """What every answer carries, errors included: else a page cannot even read why it was refused."""
        allowed = self._allowed(request)
        return [*allowed, (b"access-control-expose-headers", b"*")] if allowed else self._vary

    def preflight(self, request: Request) -> tuple[int, Headers, bytes] | None:
        """The answer to the question that browsers ask before a request; None for any other request."""
        wanted = request.header(b"access-control-request-method")
        origin = request.header(b"origin")
        if request.method != "OPTIONS" or wanted is None or origin is None:
            return None
        if not self._allowed(request):
            said = f"Pages of {origin[:200].decode('ascii', 'replace')} may not use this server."
            return 403, [(b"content-type", b"application/json")], error_body(said, 403, "permission_error")
        headers = ", ".join(self.headers).encode() or request.header(b"access-control-request-headers")
        fields: Headers = [
            (b"access-control-allow-methods", ", ".join(self.methods).encode()),
            (b"access-control-max-age", _MAX_AGE),
        ]
        if headers is not None:
            fields.append((b"access-control-allow-headers", headers))
        return 204, fields, b""

    @property
    def _vary(self) -> Headers:
        return [] if "*" in self.origins else [(b"vary", b"origin")]

    def _allowed(self, request: Request) -> Headers:
        """The fields that let the request's origin in; none if it may not."""
        origin = request.header(b"origin")
        if origin is None or not ("*" in self.origins or origin.decode("latin-1") in self.origins):
            return []
        told = b"*" if "*" in self.origins else origin
        return [(b"access-control-allow-origin", told), *self._vary]


def with_cors(handler: Handler, cors: Cors) -> Handler:
    """A handler for the pages that may use it. Preflights do not reach it."""

    async def handle(request: Request, responder: Responder) -> None:
        responder.add(cors.answer_fields(request))
        preflight = cors.preflight(request)
        if preflight is None:
            await handler(request, responder)
        else:
            responder.send(*preflight)

    return handle
