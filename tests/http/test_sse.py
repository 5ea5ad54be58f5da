"""What the scan of a relayed event stream sees."""

import json
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tandem.http import StreamScan


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def scan(data: bytes, *cuts: int, line_bytes: int = 64 * 1024) -> StreamScan:
    result = StreamScan(line_bytes=line_bytes)
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in pairwise(edges):
        result.feed(data[start:end])
    result.end()
    return result


def findings(result: StreamScan) -> tuple[object, ...]:
    return result.events, result.done, result.usage, result.error, result.finish_reason


TOKEN = event(choices=[{"index": 0, "text": "a", "finish_reason": None}])
DONE = b"data: [DONE]\n\n"
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}


def test_a_whole_stream() -> None:
    result = scan(TOKEN * 3 + event(choices=[], usage=USAGE) + DONE)
    assert findings(result) == (4, True, USAGE, None, None)


def test_a_stream_that_breaks_off_is_not_done() -> None:
    assert findings(scan(TOKEN * 2 + TOKEN[:-3])) == (3, False, None, None, None)


def test_the_last_usage_counts_and_null_does_not() -> None:
    first, last = {**USAGE, "completion_tokens": 1}, USAGE
    result = scan(event(usage=first) + event(usage=last) + event(usage=None))
    assert result.usage == last


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (event(error={"message": "out of blocks", "code": 500}), {"message": "out of blocks", "code": 500}),
        (b'data:{"error":"plain"}\n\n', {"message": "plain"}),
        (event(object="error", message="old", code=400), {"object": "error", "message": "old", "code": 400}),
        (b"event: error\r\n" + event(type="error", error={"message": "m"}), {"message": "m"}),
        (event(id="1", error=None), None),
        (event(choices=[{"text": '{"error": {"message": "quoted"}}'}]), None),
        (event(choices=[{"delta": {"content": "error"}}]), None),
        (b': {"error": {"message": "comment"}}\n\n', None),
        (b'data: ["error"]\n\n', None),
    ],
)
def test_errors_within_the_stream(data: bytes, error: object) -> None:
    assert scan(TOKEN + data + DONE).error == error


def test_the_first_error_is_kept() -> None:
    assert scan(event(error={"message": "cause"}) + event(error={"message": "sequel"})).error == {
        "message": "cause"
    }


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_a_choice_that_failed(reason: str) -> None:
    failed = event(choices=[{"index": 0, "finish_reason": "stop"}, {"index": 1, "finish_reason": reason}])
    assert scan(TOKEN + failed + DONE).finish_reason == reason
    compact = b'data: {"choices":[{"delta":{},"finish_reason":"%b"}]}\n\n' % reason.encode()
    assert scan(compact).finish_reason == reason


def test_text_that_only_speaks_of_such_things() -> None:
    text = 'data: [DONE] "usage": {"error"} "finish_reason":"abort"'
    assert findings(scan(event(choices=[{"text": text, "finish_reason": "stop"}]))) == (
        1,
        False,
        None,
        None,
        None,
    )


def test_lines_beyond_the_bound_cost_no_memory_but_count() -> None:
    long = event(choices=[{"text": "a" * 100_000}], usage=USAGE)
    result = StreamScan()
    for start in range(0, len(long), 1000):
        result.feed(long[start : start + 1000])
        assert len(result._partial) <= 64 * 1024
    result.feed(TOKEN)
    assert findings(result) == (2, False, None, None, None)


def test_an_error_too_long_to_decode_is_still_an_error() -> None:
    error = scan(event(error={"message": "m" * 100_000})).error
    assert error is not None
    assert len(error["message"]) <= 1000


@pytest.mark.parametrize(
    "payload", [b"[" * 50_000 + b'"error"', b'{"error": ', b'"usage": {', b'{"usage": {}]']
)
def test_broken_events_are_passed_over(payload: bytes) -> None:
    result = scan(b"data: " + payload + b"\n\n" + TOKEN)
    assert findings(result) == (2, False, None, None, None)


PIECES = st.sampled_from(
    [
        TOKEN,
        DONE,
        b"data: [DONE]\r\n\r\n",
        b": ping\n\n",
        b"event: x\n",
        b"data:\n",
        b"\n",
        b"\r\n",
        b"data: x",
        event(usage=USAGE),
        event(usage={"total_tokens": 1}),
        event(usage=None),
        event(error={"message": "m"}),
        event(choices=[{"finish_reason": "abort"}]),
        event(choices=[{"text": "l" * 80, "finish_reason": "error"}], usage=USAGE),
    ]
)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(PIECES, max_size=8).map(b"".join), st.lists(st.integers(0), max_size=10), st.integers(20, 200)
)
@example(TOKEN + DONE, list(range(200)), 64)
@example(b"data: " + b"x" * 14 + b"\n" + DONE, [20], 20)
def test_splits_change_nothing(data: bytes, cuts: list[int], line_bytes: int) -> None:
    whole = scan(data, line_bytes=line_bytes)
    assert findings(scan(data, *cuts, line_bytes=line_bytes)) == findings(whole)
