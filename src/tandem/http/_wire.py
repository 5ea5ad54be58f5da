"""How a message head is written, and what may stand in one."""

import re
import time
from collections.abc import Iterable
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus

from tandem.http.errors import InvalidHeader

# A body of n bytes sent one byte a chunk costs 5n bytes of framing. More than this many, beyond the head's
# allowance, is not framing but chunk extensions or trailers sent to burn time (CVE-2024-22019 and its kind).
_FRAMING_PER_BODY_BYTE = 8

_METHOD = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
# Lower-case only: the filters that drop framing and hop-by-hop fields compare names as they are.
_FIELD_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_FORBIDDEN_IN_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_TARGET = re.compile(rb"[\x21-\x7e]+")


def framing_allowance(head_bytes: int, body_size: int) -> int:
    """How many bytes on the wire, beside those of the body, a message may take with this much body seen."""
    return head_bytes + _FRAMING_PER_BODY_BYTE * body_size


def encode_fields(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The header fields as sent, each with its line end.

    Raises `InvalidHeader` for a name that is no lower-case token or a value that could end its line.
    """
    lines = []
    for name, value in headers:
        if not _FIELD_NAME.fullmatch(name):
            raise InvalidHeader(f"not a lower-case header name: {name!r}")
        if _FORBIDDEN_IN_VALUE.search(value):
            raise InvalidHeader(f"control character in the value of header {name.decode()}: {value[:80]!r}")
        lines.append(b"%b: %b\r\n" % (name, value))
    return b"".join(lines)


def encode_request_line(method: str, target: bytes) -> bytes:
    """Raises `InvalidHeader` for a method or target that could be taken for more than that."""
    verb = method.encode("ascii", "replace")
    if not _METHOD.fullmatch(verb):
        raise InvalidHeader(f"not a method: {method!r}")
    if not _TARGET.fullmatch(target):
        raise InvalidHeader(f"not a request target: {target[:80]!r}")
    return b"%b %b HTTP/1.1\r\n" % (verb, target)


@lru_cache(maxsize=128)
def status_line(status: int) -> bytes:
    """`HTTP/1.1 200 OK` and its line end; a status unknown to the standard has no reason phrase."""
    if not 200 <= status <= 999:
        raise ValueError(f"not a final status: {status}")
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode("ascii")


def date_field() -> bytes:
    """The `Date` field of a response that is sent now."""
    return _date_field(int(time.time()))


@lru_cache(maxsize=1)
def _date_field(second: int) -> bytes:
    return f"date: {formatdate(second, usegmt=True)}\r\n".encode("ascii")
