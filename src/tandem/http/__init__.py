"""HTTP/1.1 on asyncio protocols: a server, a client that keeps connections, and a scan of streamed answers.

Knows nothing of routing. llhttp parses; see `server.serve` and `client.Client`.
"""

from tandem.http._responder import Source
from tandem.http.client import Client, Exchange, Origin, Response, Sink
from tandem.http.errors import (
    BodyTooLarge,
    ConnectFailed,
    HeadTimeout,
    HTTPClientError,
    IdleTimeout,
    InvalidHeader,
    ProtocolError,
    UpstreamClosed,
)
from tandem.http.messages import Headers, Limits, Request, end_to_end, error_body, find_header
from tandem.http.server import Handler, Responder, Server, serve
from tandem.http.sse import StreamScan

__all__ = [
    "BodyTooLarge",
    "Client",
    "ConnectFailed",
    "Exchange",
    "HTTPClientError",
    "Handler",
    "HeadTimeout",
    "Headers",
    "IdleTimeout",
    "InvalidHeader",
    "Limits",
    "Origin",
    "ProtocolError",
    "Request",
    "Responder",
    "Response",
    "Server",
    "Sink",
    "Source",
    "StreamScan",
    "UpstreamClosed",
    "end_to_end",
    "error_body",
    "find_header",
    "serve",
]
