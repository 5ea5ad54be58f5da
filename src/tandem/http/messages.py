"""What a handler sees of HTTP: requests, headers, limits, and the JSON shape of an error."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

Headers = list[tuple[bytes, bytes]]
"""Header fields in the order they came. Names are lower-case."""

# RFC 9110, 7.6.1, and the older names still seen. Each hop sets its own; none may be passed on.
HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)


def find_header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    """The value of the field `name` (lower-case), or None if there is none.

    Several fields of one name are one list, joined with ", " (RFC 9110, 5.3). So nothing depends on which of
    two is looked at: a field that may only come once and came twice has a value that nothing accepts.
    """
    values = [value for field_name, value in headers if field_name == name]
    return b", ".join(values) if values else None


def end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """The fields that may be passed on to the next hop: without the hop-by-hop ones and those that
    `Connection` names."""
    headers = list(headers)
    connection = find_header(headers, b"connection")
    dropped = HOP_BY_HOP
    if connection is not None:
        dropped = dropped | {token.strip().lower() for token in connection.split(b",")}
    return [pair for pair in headers if pair[0] not in dropped]


def error_body(message: str, status: int, error_type: str | None = None) -> bytes:
    """The body of an error as OpenAI's clients expect it: `{"error": {"message", "type", "code"}}`."""
    if error_type is None:
        error_type = "invalid_request_error" if status < 500 else "server_error"
    return json.dumps({"error": {"message": message, "type": error_type, "code": status}}).encode()


@dataclass(slots=True)
class Request:
    """One whole request."""

    method: str
    target: bytes
    """The request target as sent."""
    path: str
    """The target's path, percent-decoded, without the query."""
    headers: Headers
    body: bytes
    http_version: str
    """"1.1" or "1.0"."""
    client: str
    """The peer's IP address, without its port."""
    keep_alive: bool = field(default=True, repr=False)
    """Whether the connection may carry another request after this one."""
    on_body_dropped: Callable[[], None] | None = field(default=None, repr=False, compare=False)

    def drop_body(self) -> None:
        """For a handler that needs the body no more, and goes on for long: others may have its room."""
        self.body = b""
        if self.on_body_dropped is not None:
            self.on_body_dropped()

    def header(self, name: bytes) -> bytes | None:
        """See `find_header`."""
        return find_header(self.headers, name)


@dataclass(frozen=True)
class Limits:
    """What a server grants a connection. Sizes in bytes, times in seconds."""

    head_bytes: int = 64 * 1024
    """Request line and header fields, each of these 32 more; also the allowance for chunk framing and
    trailers."""
    body_bytes: int = 64 * 1024 * 1024
    held_bytes: int = 1024**3
    """Of the large bodies of all connections, see `BodyRoom`."""
    head_timeout: float = 10.0
    """From a request's first byte (of the first: from the connection's opening, TLS included) to the end of
    its head."""
    keep_alive_timeout: float = 75.0
    """Idle time between requests; longer than load balancers' usual 60 s, so that the client closes first."""
    body_timeout: float = 30.0
    """The longest pause within a request body, and what a body may take beyond `body_rate`; also after what
    time it makes way for others where `held_bytes` are held."""
    body_rate: float = 1000.0
    """Bytes a second that a request body must come at, over all of it; 0: at any pace."""
    write_timeout: float = 60.0
    """How long a client may take no byte while more than `write_high_water` waits for it, or while its
    connection closes with something still to send."""
    connections: int = 10_000
    """Further connections are answered with 503; closed without a word where many of them come at a time."""
    write_high_water: int = 64 * 1024
    """Bytes waiting for one client beyond which its source is paused."""
