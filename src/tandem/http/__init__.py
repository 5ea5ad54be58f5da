"""HTTP/1.1 on asyncio protocols: a server, a client that keeps connections, and a scan of streamed answers.

Knows nothing of routing. llhttp parses; see `server.serve` and `client.Client`.
"""

from tandem.http._responder import Source
from tandem.http.client import Client, Exchange, Origin, Response, Sink
from tandem.http.cors import Cors, with_cors
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
from tandem.http.messages import Headers, Limits, Request, end_to_end
from tandem.http.server import Handler, Responder, Server, serve
from tandem.http.sse import StreamScan
from tandem.http.tls import BadTls, Tls, TlsFiles

__all__ = [
    "BadTls",
    "BodyTooLarge",
    "Client",
    "ConnectFailed",
    "Cors",
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
    "Tls",
    "TlsFiles",
    "UpstreamClosed",
    "end_to_end",
    "serve",
    "with_cors",
]
