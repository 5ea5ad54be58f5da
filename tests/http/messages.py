"""The messages of corpus/, and damaged ones made of them."""

import os
from itertools import pairwise
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st

from tandem.http import Limits, ProtocolError, Request, UpstreamClosed
from tandem.http._request_parser import Refusal, RequestParser

LIMITS = Limits(head_bytes=2000, body_bytes=1000)
"""Under which the corpus is read."""

_CORPUS = Path(__file__).parent / "corpus"


def messages(folder: str) -> dict[str, bytes]:
    """The messages of a folder of the corpus, by name."""
    return {file.stem: file.read_bytes() for file in sorted((_CORPUS / folder).glob("*.http"))}


REFUSED = {
    name: (data, int(folder.name))
    for folder in sorted((_CORPUS / "requests").iterdir())
    if folder.name != "taken"
    for name, data in messages(f"requests/{folder.name}").items()
}
"""Requests that two parsers could read differently, or that our server declines; and with which status."""
TAKEN = messages("requests/taken")
WHOLE = messages("responses/whole")
BROKEN = {
    **{name: (data, UpstreamClosed) for name, data in messages("responses/closed").items()},
    **{name: (data, ProtocolError) for name, data in messages("responses/protocol").items()},
}


def examples(count: int) -> settings:
    """So many examples of a property, times FUZZ where that is set."""
    return settings(max_examples=count * int(os.environ.get("FUZZ", "1")), deadline=None)


CUTS = st.lists(st.integers(0), max_size=8)

# What has a meaning in HTTP, and what is often mistaken for it.
_WORDS = st.sampled_from(
    [
        *(
            b"\r",
            b"\n",
            b"\r\n",
            b"\r\n\r\n",
            b"\n\n",
            b"\r\r\n",
            b"\0",
            b" ",
            b"\t",
            b"\x0b",
            b"\x85",
            b"\xa0",
        ),
        *(b":", b",", b";", b"=", b'"', b"0", b"1", b"-1", b"+1", b"0x1", b"f", b"0\r\n\r\n", b"1\r\na\r\n"),
        *(b"content-length", b"content-length: 1\r\n", b"content-length: 2\r\n", b"content_length: 1\r\n"),
        *(b"transfer-encoding: chunked\r\n", b"transfer-encoding: identity\r\n", b"chunked", b"identity"),
        *(
            b"connection: close\r\n",
            b"connection: upgrade\r\n",
            b"upgrade: h2c\r\n",
            b"expect: 100-continue\r\n",
        ),
        *(
            b"host: b\r\n",
            b"HTTP/1.0",
            b"HTTP/1.1",
            b"GET / HTTP/1.1\r\nhost: a\r\n\r\n",
            b"HTTP/1.1 200 OK\r\n",
        ),
    ]
)


def split(data: bytes, cuts: list[int] | range) -> list[bytes]:
    """The pieces of data cut at these places, taken modulo its length."""
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in pairwise(edges) if end > start]


def parse(
    data: bytes, cuts: list[int] | range = range(0), limits: Limits = LIMITS
) -> tuple[list[Request], Refusal | None]:
    """Feed our server's parser `data`, cut at `cuts`; the requests, and the refusal that ended it."""
    parser = RequestParser(limits, "peer")
    try:
        for piece in split(data, cuts):
            parser.feed(piece)
    except Refusal as refusal:
        return list(parser.ready), refusal
    return list(parser.ready), None


@st.composite
def damaged(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> bytes:
    """A few messages one behind the other, in which a few bytes are cut out, put in, or moved."""
    data = b"".join(draw(st.lists(whole, min_size=1, max_size=3)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        gone = draw(st.integers(0, 3) | st.integers(0, 30))
        put = draw(st.just(b"") | _WORDS | _WORDS | st.binary(max_size=3))
        data = data[:at] + put + data[at + gone :]
    return data
