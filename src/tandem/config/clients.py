"""How a router serves its clients: what a connection is granted, TLS, browsers, long silences."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.config.options import option
from tandem.config.values import between, checked, header_token, method, origin, some_text


@dataclass(frozen=True, kw_only=True)
class ClientsConfig:
    """Times are seconds, sizes are bytes."""

    max_connections: int = option(
        "connections of clients at once; further ones are answered with 503",
        between(1, 1_000_000, int),
        10_000,
    )
    max_head_bytes: int = option(
        "request line and header fields of one request, each field 32 more than it has, as in HTTP/2; and as "
        "much again for the framing of its body",
        between(1024, 2**24, int),
        65_536,
    )
    max_body_bytes: int = option("body of one request", between(1, 2**30, int), 67_108_864)
    max_held_bytes: int = option(
        "bodies of all requests together, those of at most 64 KiB aside, each from its first byte until its "
        "answer is sent, or begins where it is streamed; large ones for which there is no room are answered "
        "with 503",
        between(1, 2**40, int),
        1_073_741_824,
    )
    head_timeout: float = option(
        "longest wait for a request's head, from its first byte on; for the first of a connection from the "
        "connection's opening, TLS handshake included",
        between(0.1, 3600, float),
        10.0,
    )
    body_timeout: float = option(
        "longest pause within a request's body, and what a body may take beyond --body-rate",
        between(0.1, 3600, float),
        30.0,
    )
    body_rate: float = option(
        "bytes a second that a request's body must come at, over all of it; 0 = at any pace",
        between(0, 2**30, float),
        1000.0,
    )
    keep_alive_timeout: float = option(
        "how long an idle connection of a client is kept; longer than proxies in front keep theirs",
        between(0.1, 86_400, float),
        75.0,
    )
    write_timeout: float = option(
        "how long a client may take no byte of what there is for it", between(0.1, 86_400, float), 60.0
    )
    engine_keep_alive: float = option(
        "how long an idle connection to an engine is kept; shorter than engines keep theirs (vLLM: 5 s)",
        between(0, 3600, float),
        4.0,
    )
    heartbeat: float | None = option(
        "send a comment line after so many seconds without a byte of a streamed answer, and again while "
        "there is none, so that nothing in between takes it for dead. The first one commits to status 200: "
        "an error after it is an event of the stream. Default: never",
        between(0.1, 3600, float),
        None,
    )
    tls_certificate: str | None = option(
        "PEM file with the certificate, and those between it and its root: clients are served over TLS then. "
        "Files that are replaced are used for new connections",
        checked(some_text),
        None,
    )
    tls_key: str | None = option("PEM file with the certificate's key", checked(some_text), None)
    tls_client_ca: str | None = option(
        "PEM file with the CAs of which every client must have a certificate. Default: clients need none",
        checked(some_text),
        None,
    )
    cors_origins: tuple[str, ...] = option(
        "origins of the pages in browsers that may use the router, as https://app.example; * = all. "
        "Default: no page of another origin may",
        origin,
        (),
    )
    cors_methods: tuple[str, ...] = option(
        "methods that those pages may use (default GET, HEAD, POST)", method, ()
    )
    cors_headers: tuple[str, ...] = option(
        "request headers that those pages may set; default: those that they ask for", header_token, ()
    )

    def __post_init__(self) -> None:
        if self.max_held_bytes < self.max_body_bytes:
            raise ValueError(
                f"--max-held-bytes: {self.max_held_bytes} is less than --max-body-bytes, "
                f"{self.max_body_bytes}, so that no body of that size would ever be taken"
            )
        if (self.tls_certificate is None) is not (self.tls_key is None):
            given, missing = "--tls-certificate", "--tls-key"
            if self.tls_certificate is None:
                given, missing = missing, given
            raise ValueError(f"{given}: needs {missing}, which is not given")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ValueError("--tls-client-ca: needs --tls-certificate and --tls-key, which are not given")
        if len(self.cors_origins) > 1 and "*" in self.cors_origins:
            raise ValueError("--cors-origins: * is all of them; give it alone, or leave it out")
