"""Bytes in, requests out: the server's side of HTTP/1.1 parsing, without any I/O.

llhttp (through httptools) does the parsing and is strict: bare LF, obs-fold, two lengths, a length beside a
transfer coding and their like are errors there. Added here are the limits, the rules about whole heads that
llhttp leaves to its user, and the parts of HTTP that a server may decline.
"""

import re
from collections import deque
from enum import Enum, auto
from http import HTTPStatus
from typing import Any, NoReturn
from urllib.parse import unquote

import httptools

from tandem.http._body_room import SMALL_BODY, BodyRoom, Share
from tandem.http._wire import encode_fields, framing_allowance
from tandem.http.messages import Headers, Limits, Request, find_header

# RFC 3986, 3.2.2 and 3.2.3: a name or an address (of an interface, perhaps), and a port. Empty where a target
# has no authority.
_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+(%[A-Za-z0-9\-._~%]+)?\]|[A-Za-z0-9\-._~!$&'()*+,;=%]*)(:[0-9]*)?")

# What a field counts beside its bytes, as in HTTP/2 (RFC 9113, 6.5.2): to keep it costs more than to send it.
_FIELD = 32

# llhttp cannot be paused at the end of a message, so all requests of one read are parsed at once.
_MAX_PIPELINED = 128


NO_ROOM = "no room for a large request now; try again"


class Refusal(Exception):
    """A request that is answered with an error and a closed connection."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Phase(Enum):
    """Where in a request the bytes fed so far end."""

    IDLE = auto()
    HEAD = auto()
    BODY = auto()
    FINISHED = auto()
    """The last request asked for the connection to be closed; what follows is ignored."""


class RequestParser:
    """Turns the bytes of one connection into whole requests, which `ready` holds in order."""

    def __init__(self, limits: Limits, client: str = "", share: Share | None = None) -> None:
        """`share`: what holds the room of its large bodies; whoever takes a request from `ready` gives that
        request's back."""
        self.ready: deque[Request] = deque()
        self.phase = Phase.IDLE
        self.awaits_continue = False
        """Whether the client wants to hear `100 Continue` before it sends the body."""
        self._limits = limits
        self._client = client
        self._share = share or Share(BodyRoom(limits.held_bytes, limits.body_timeout), self.drop_body)
        self._small = min(SMALL_BODY, limits.body_bytes)
        self._measured = 0
        self._llhttp: Any = httptools.HttpRequestParser(self)
        self._refusal: Refusal | None = None
        # Of the request under way, without what came in the read that ended the one before.
        self._wire_size = 0
        self._reset()

    def feed(self, data: bytes) -> None:
        """Parse `data`. Raises `Refusal` when the connection is to be closed with an error, and must not be
        called again then. Requests completed before are in `ready` and still deserve their answers."""
        if self.phase is Phase.FINISHED:
            return
        try:
            self._parse(data)
        except Refusal:
            self.drop_body()
            raise

    def drop_body(self) -> None:
        """Let go of the body that is coming; nothing may be fed any more."""
        self._body = bytearray()
        if self._measured:
            self._share.give(self._measured)
            self._share.whole()
            self._measured = 0

    def _parse(self, data: bytes) -> None:
        self._wire_size += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            self._stopped(error)
        if self.phase not in (Phase.HEAD, Phase.BODY):
            self._wire_size = 0
            return
        # The callbacks see whole fields and the body; what llhttp swallows or still collects counts here.
        overhead = self._wire_size - self.body_size
        if overhead > framing_allowance(self._limits.head_bytes, self.body_size):
            self._refuse_overhead()

    def close(self) -> None:
        """Nothing more will come. llhttp holds its user, and the two would wait for a search for cycles."""
        self._llhttp = None

    @property
    def body_size(self) -> int:
        """Bytes that have come of the body of the request that is not whole yet."""
        return len(self._body)

    def _stopped(self, error: Exception) -> None:
        if self.phase is not Phase.FINISHED:  # else it minds data after `Connection: close`, and we do not
            raise self._refusal or Refusal(HTTPStatus.BAD_REQUEST, f"malformed request: {error}") from None

    def _feed(self, data: bytes | memoryview) -> None:
        while True:
            try:
                self._llhttp.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                # llhttp stops behind the head of a request that offers an upgrade (curl and Java's client
                # offer HTTP/2 so), leaving the body. An offer is declined by ignoring it (RFC 9110, 7.8):
                # parse the head again without it, then the body.
                data = memoryview(data)[upgrade.args[0] :]
                self._llhttp = httptools.HttpRequestParser(self)
                self._llhttp.feed_data(self._head_without_upgrade())

    def _head_without_upgrade(self) -> bytes:
        fields = encode_fields(pair for pair in self._headers if pair[0] != b"upgrade")
        line = f"{self._method} ".encode() + self._target + f" HTTP/{self._version}\r\n".encode()
        return line + fields + b"\r\n"

    # What llhttp calls. An exception raised here stops it; `_refuse` leaves the reason for `feed`.

    def on_message_begin(self) -> None:
        if self.phase is Phase.FINISHED:
            raise ValueError("request behind the last one")  # stops llhttp, and nothing else
        if len(self.ready) >= _MAX_PIPELINED:
            self._refuse(HTTPStatus.BAD_REQUEST, f"more than {_MAX_PIPELINED} requests sent ahead")
        self.phase = Phase.HEAD
        self._reset()

    def on_url(self, url: bytes) -> None:
        self._target += url
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + _FIELD)
        if self.phase is Phase.HEAD:  # else a trailer, which nothing here has a use for
            self._headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        self._version = self._llhttp.get_http_version()
        self._method = self._llhttp.get_method().decode("ascii")
        if self._version not in ("1.1", "1.0"):
            self._refuse(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, f"HTTP/{self._version} is not spoken here")
        if self._method == "CONNECT":
            self._refuse(HTTPStatus.NOT_IMPLEMENTED, "CONNECT is not supported")
        self._check_host()
        has_body = self._check_body_framing()
        self._check_expectation(has_body)
        self._path = self._path_of_target()
        self._keep_alive = self._version == "1.1" and bool(self._llhttp.should_keep_alive())
        self.phase = Phase.BODY

    def on_body(self, data: bytes) -> None:
        self.awaits_continue = False
        self._body += data
        if len(self._body) > self._unmeasured:
            self._measure_body()

    def on_message_complete(self) -> None:
        if self._llhttp.should_upgrade():
            return  # not complete: its body is yet to come
        self.awaits_continue = False
        self._wire_size = 0
        if self._measured:
            self._measure_body()
            self._share.whole()
        self.phase = Phase.IDLE if self._keep_alive else Phase.FINISHED
        self.ready.append(
            Request(
                method=self._method,
                target=self._target,
                path=self._path,
                headers=self._headers,
                body=bytes(self._body),
                http_version=self._version,
                client=self._client,
                keep_alive=self._keep_alive,
            )
        )
        self._reset()

    def _reset(self) -> None:
        self._target = b""
        self._headers: Headers = []
        self._head_size = 0
        # Pieces in a list would cost more than what they hold: a chunk may be a byte.
        self._body = bytearray()
        self._measured = 0  # bytes of it that hold room, where it is large
        self._unmeasured = self._small  # its size beyond which there is to be room for more

    # Checks

    def _count_head(self, size: int) -> None:
        self._head_size += size
        if self._head_size > self._limits.head_bytes:
            self._refuse_overhead()

    def _check_host(self) -> None:
        hosts = [value for name, value in self._headers if name == b"host"]
        if len(hosts) > 1:
            self._refuse(HTTPStatus.BAD_REQUEST, "more than one Host header")
        if not hosts and self._version == "1.1":
            self._refuse(HTTPStatus.BAD_REQUEST, "no Host header")
        if hosts and not _HOST.fullmatch(hosts[0]):
            self._refuse(HTTPStatus.BAD_REQUEST, "the Host header is no name or address of a host")

    def _check_body_framing(self) -> bool:
        coding = find_header(self._headers, b"transfer-encoding")
        if coding is not None:
            if self._version == "1.0":
                self._refuse(HTTPStatus.BAD_REQUEST, "Transfer-Encoding in an HTTP/1.0 request")
            if coding.lower() != b"chunked":
                self._refuse(HTTPStatus.NOT_IMPLEMENTED, "no transfer coding but chunked is supported")
            return True
        length = int(find_header(self._headers, b"content-length") or 0)
        if length > self._limits.body_bytes:
            self._refuse_body()
        if not self._share.fits(length):
            self._refuse_for_now()
        return length > 0

    def _measure_body(self) -> None:
        size = len(self._body)
        if size > self._limits.body_bytes:
            self._refuse_body()
        if not self._share.take(size - self._measured):
            self._refuse_for_now()
        self._measured = size
        self._unmeasured = min(size + SMALL_BODY, self._limits.body_bytes)

    def _check_expectation(self, has_body: bool) -> None:
        expect = find_header(self._headers, b"expect")
        if expect is None or self._version == "1.0":
            return
        if expect.lower() != b"100-continue":
            self._refuse(HTTPStatus.EXPECTATION_FAILED, "no expectation but 100-continue is supported")
        self.awaits_continue = has_body

    def _path_of_target(self) -> str:
        target = self._target
        if b"#" in target:
            self._refuse(HTTPStatus.BAD_REQUEST, "fragment in the request target")
        path = target.partition(b"?")[0]
        if not path.startswith(b"/") and path != b"*":
            # The absolute form, as sent to a proxy (RFC 9112, 3.2.2): a server takes it as well.
            scheme, separator, rest = path.partition(b"://")
            if not separator or scheme.lower() not in (b"http", b"https"):
                self._refuse(HTTPStatus.BAD_REQUEST, "unsupported form of request target")
            path = b"/" + rest.partition(b"/")[2]
        text = path.decode("ascii")
        if "%" in text:
            try:
                text = unquote(text, errors="strict")
            except UnicodeDecodeError:
                self._refuse(HTTPStatus.BAD_REQUEST, "request target is not UTF-8")
        return text

    def _refuse_overhead(self) -> NoReturn:
        if self.phase is Phase.BODY:
            self._refuse(HTTPStatus.BAD_REQUEST, "too much chunk framing or too many trailers")
        status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        self._refuse(status, f"request head is larger than {self._limits.head_bytes} bytes")

    def _refuse_body(self) -> NoReturn:
        status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        self._refuse(status, f"request body is larger than {self._limits.body_bytes} bytes")

    def _refuse_for_now(self) -> NoReturn:
        self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, NO_ROOM)

    def _refuse(self, status: HTTPStatus, message: str) -> NoReturn:
        self._refusal = Refusal(status, message)
        raise self._refusal
