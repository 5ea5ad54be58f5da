"""Which headers cross the router, in each direction."""

from __future__ import annotations

import re

from tandem.http import Headers, Request, end_to_end
from tandem.router.errors import ApiError
from tandem.router.random_ids import random_hex

# Not forwarded to engines: spoken to the router, or rewritten for the leg. (Framing is the http layer's.)
_REQUEST_ONLY = frozenset({b"accept-encoding", b"content-type", b"x-request-id"})
# Not relayed to clients: an engine's own, or written anew by the router.
_RESPONSE_ONLY = frozenset({b"server", b"date", b"x-request-id"})
# Spoken between the router and its clients; of engines nobody's.
_OURS = b"x-tandem-"
# Whether a page of another origin may read an answer is the router's to say; vLLM says yes to all.
_NOT_THE_ENGINES = (_OURS, b"access-control-")

RANK = b"x-data-parallel-rank"
"""By which vLLM is told which of an engine's ranks is to take a request."""

_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
# In an id, vLLM's P2P connector looks for addresses to fetch KV from.
_ADDRESS_IN_ID = b"_addr_"


_JSON = b"application/json"


def check_content_type(request: Request) -> None:
    """Raises ApiError 400, as vLLM does, for a body that is not said to be JSON.

    A page in a browser may have any server sent one that is said to be text, a form or nothing at all; before
    one that is said to be JSON the browser asks the server whether the page may.
    """
    given = request.header(b"content-type")
    if given == _JSON or (given is not None and given.partition(b";")[0].strip().lower() == _JSON):
        return
    found = "is missing" if given is None else f"is {given[:100].decode('latin-1')!r}"
    raise ApiError(400, f"The header Content-Type {found}; send Content-Type: application/json.")


def request_id(request: Request) -> str:
    """The client's own request id where it is usable as one, else a fresh one."""
    given = request.header(b"x-request-id")
    if given is not None and _ID.fullmatch(given) and _ADDRESS_IN_ID not in given:
        return given.decode()
    return random_hex(16)


def engine_request_id(request_id: str) -> str:
    """The id that engines see: KV is keyed by it, so clients must not be able to guess or repeat it."""
    return f"{request_id}-{random_hex(8)}"


def to_engine(request: Request, engine_id: str, rank: int | None = None) -> Headers:
    """A leg's headers: the client's end-to-end headers, with the leg's own id, and the data-parallel rank
    that is to compute it; None: any.

    `Connection: x-request-id` must not remove the leg's, so the client's hop-by-hop headers go first.
    """
    headers = [
        (name, value)
        for name, value in end_to_end(request.headers)
        if name not in _REQUEST_ONLY and not name.startswith(_OURS)
    ]
    headers += [(b"content-type", b"application/json"), (b"x-request-id", engine_id.encode())]
    if rank is not None:
        headers.append((RANK, b"%d" % rank))
    return headers


def to_client(headers: Headers, request_id: str) -> Headers:
    """An answer's headers: the engine's end-to-end headers, with the client's id. What begins with
    `x-tandem-` or `access-control-` is said by the router alone."""
    relayed = [
        (name, value)
        for name, value in end_to_end(headers)
        if name not in _RESPONSE_ONLY and not name.startswith(_NOT_THE_ENGINES)
    ]
    relayed.append((b"x-request-id", request_id.encode()))
    return relayed
