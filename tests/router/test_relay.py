"""A stream on its way to the client, however its bytes are split: whole, in order, begun in time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tandem.http import Headers, Responder, Response
from tandem.router.answer import Answer
from tandem.router.relay import StreamRelay, judge

from .fakes import DONE, ERROR, ROLE, chunk


class Client:
    """Stands for the responder: what the client was sent."""

    def __init__(self) -> None:
        self.status = 0
        self.sent: list[bytes] = []
        self.source: object = None

    @property
    def started(self) -> bool:
        return self.status != 0

    def start(self, status: int, headers: Headers) -> None:
        assert not self.status
        self.status = status

    def write(self, data: bytes) -> None:
        assert self.status
        self.sent.append(data)

    def attach(self, source: object) -> None:
        self.source = source


class Relayed:
    """A relay that was given some reads, each a second after the one before."""

    def __init__(self, reads: list[bytes], *, chat: bool) -> None:
        self.client = Client()
        self.began: list[float] = []
        self.gaps: list[float] = []
        self.response = cast(Response, SimpleNamespace(status=200))
        clock: Iterator[float] = iter(range(len(reads) + 1))
        relay = StreamRelay(
            Answer(cast(Responder, self.client)),
            self.response,
            [],
            silent_events=1 if chat else 0,
            on_first=self.began.append,
            observe_gap=self.gaps.append,
            clock=lambda: next(clock),
        )
        self.sent_after: list[bytes] = []
        for read in reads:
            relay(read)
            self.sent_after.append(b"".join(self.client.sent))
        relay.end()
        self.sent = b"".join(self.client.sent)


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    """A stream in reads that end at these places."""
    at = sorted({0, len(stream), *(p % len(stream) for p in places)})
    return [stream[a:b] for a, b in pairwise(at)]


PLACES = st.lists(st.integers(0, 10_000), max_size=12)
TOKENS = st.lists(st.text(max_size=5).map(chunk), max_size=4)
ENDS = st.sampled_from([DONE, b"data: [DONE]", b"data: [DONE]\r\n\r\n"])


@given(TOKENS, ENDS, PLACES, st.booleans())
def test_a_good_stream_arrives_whole_however_it_is_split(
    tokens: list[bytes], end: bytes, places: list[int], chat: bool
) -> None:
    stream = (ROLE if chat else b"") + b"".join(tokens) + end
    reads = cut(stream, places)
    relayed = Relayed(reads, chat=chat)
    assert relayed.sent == stream
    assert relayed.client.status == 200
    assert relayed.client.source is relayed.response, "so that a client that does not read makes it wait"
    assert len(relayed.began) == 1
    later = len(reads) - 1 - int(relayed.began[0])
    assert relayed.gaps == [1.0] * max(later, 0)
    first_event_ends = len(stream) - len(end) if not tokens else stream.index(tokens[0]) + len(tokens[0])
    whole = 0
    for read, sent in zip(reads, relayed.sent_after, strict=True):
        whole += len(read)
        if tokens and whole >= first_event_ends:
            assert len(sent) == whole, "nothing is held once the first token has come"


@given(PLACES, st.booleans(), st.sampled_from([b"", DONE, chunk("late") + DONE]))
@example([], True, DONE)
def test_a_stream_that_begins_with_an_error_has_not_begun(places: list[int], chat: bool, rest: bytes) -> None:
    relayed = Relayed(cut((ROLE if chat else b"") + ERROR + rest, places), chat=chat)
    assert (relayed.client.status, relayed.client.sent, relayed.began) == (0, [], [])


@given(PLACES)
def test_an_error_in_the_middle_is_relayed(places: list[int]) -> None:
    stream = ROLE + chunk("x") + ERROR
    assert Relayed(cut(stream, [len(ROLE + chunk("x")), *places]), chat=True).sent == stream


@given(st.integers(0, 200_000), PLACES)
def test_what_is_held_before_the_second_event_is_bounded(size: int, places: list[int]) -> None:
    reads = cut(ROLE + chunk("x" * size), [p * 20 for p in places])
    relayed = Relayed(reads, chat=True)
    whole = 0
    for read, sent in zip(reads, relayed.sent_after, strict=True):
        whole += len(read)
        assert whole - len(sent) <= 64 * 1024


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        (b'{"choices":[{"finish_reason":"length"}]}', None),
        (b'{"choices":[{"finish_reason":null},{}],"usage":{}}', None),
        (b'{"choices":[],"error":null}', "no choice"),
        (b"{}", "no choice"),
        (b'{"choices":[{"text":"an error, abort"}]}', None),
        (b'{"choices":[{"finish_reason":"stop"},{"finish_reason":"abort"}]}', "finish_reason abort"),
        (b'{"choices":[{"finish_reason":"error"}]}', "finish_reason error"),
        (b'{"error":{"message":"x"}}', "an error"),
        (b'{"choices":[{"te', "a body that is not a whole answer"),
        (b"", "a body that is not a whole answer"),
        (b'{"choices":[{"text":"\xff"}]}', None),
    ],
)
def test_a_whole_answer_with_status_200_may_be_none(body: bytes, wrong: Any) -> None:
    assert judge(body)[0] == wrong
