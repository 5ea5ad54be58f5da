"""A request's body: what nobody edits goes on byte for byte."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tandem.router.body import Body
from tandem.router.errors import ApiError

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(TEXT, below, max_size=3),
    max_leaves=8,
)
SPACE = st.text(" \t\n\r", max_size=2)
# Spellings that decoding and encoding again would change.
AS_WRITTEN = st.sampled_from(
    [
        "1.0",
        "1.50E+2",
        "-0",
        "1e400",
        "123456789012345678901234567890",
        '"\\u00e9\\/"',
        '"\\ud83d\\ude00"',
        '{"a":1,"a":2}',
        "[ 1 ,2]",
    ]
)


@st.composite
def written(draw: st.DrawFn) -> tuple[bytes, list[tuple[str, str]]]:
    """A body as a client might write it, and its fields in order, each with its text. Names may repeat."""
    ascii_only = draw(st.booleans())
    values = JSON_VALUES.map(lambda v: json.dumps(v, ensure_ascii=ascii_only))
    fields = draw(st.lists(st.tuples(TEXT, values | AS_WRITTEN), max_size=6))
    parts = [
        f"{draw(SPACE)}{json.dumps(name)}{draw(SPACE)}:{draw(SPACE)}{value}{draw(SPACE)}"
        for name, value in fields
    ]
    return f"{draw(SPACE)}{{{','.join(parts)}}}{draw(SPACE)}".encode(), fields


def values_of(body: bytes) -> dict[str, bytes]:
    """The text of each field; a name that is there twice fails."""
    names = [name for name, _ in json.loads(body, object_pairs_hook=list)]
    raw = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    assert names == list(raw)
    return {name: bytes(value) for name, value in raw.items()}


@given(written())
def test_values_that_nobody_edits_stay_byte_for_byte(case: tuple[bytes, list[tuple[str, str]]]) -> None:
    data, fields = case
    body = Body.parse(data)
    last = {name: value.encode() for name, value in fields}
    assert values_of(body.edited({})) == last
    assert body.names() == list(last)


@given(written(), st.dictionaries(TEXT, JSON_VALUES, max_size=3), st.lists(TEXT, max_size=2))
def test_edits_win_and_what_is_dropped_is_gone(
    case: tuple[bytes, list[tuple[str, str]]], changes: dict[str, Any], drop: list[str]
) -> None:
    data, fields = case
    drop = [*drop, *(name for name, _ in fields[:1])]
    out = values_of(Body.parse(data).edited(changes, drop=drop))
    for name, value in dict(fields).items():
        if name not in drop and name not in changes:
            assert out[name] == value.encode()
    for name, changed in changes.items():
        if name not in drop:
            assert json.loads(out[name]) == changed
    assert out.keys() == ({n for n, _ in fields} | changes.keys()) - set(drop)


@given(written())
def test_a_field_reads_as_the_last_of_its_name(case: tuple[bytes, list[tuple[str, str]]]) -> None:
    data, fields = case
    body = Body.parse(data)
    assume(not any("1e400" in value for _, value in fields))  # not a number that can be decoded
    for name, value in dict(fields).items():
        assert name in body
        assert body.get(name) == json.loads(value) == body.decoded()[name]
    assert body.get("\x00 no field", 7) == 7


def test_a_duplicate_cannot_be_read_otherwise_by_an_engine() -> None:
    """The engine gets what the router judged: one of each name."""
    body = Body.parse(b'{"n": 1, "prompt": "a", "n": 8}')
    assert body.get("n") == 8
    assert body.edited({}) == b'{"n":8,"prompt":"a"}'


def test_a_raw_value_is_inserted_as_it_is() -> None:
    edited = Body.parse(b'{"a": 1.50}').edited({"b": msgspec.Raw(b'{"x" : 1.0e2}')})
    assert edited == b'{"a":1.50,"b":{"x" : 1.0e2}}'


def test_editing_leaves_the_body_as_it_was() -> None:
    body = Body.parse(b'{"a": 1}')
    body.edited({"a": 2, "b": 3}, drop=["a"])
    assert body.edited({}) == b'{"a":1}'


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[1]",
        b'"text"',
        b"null",
        b"{'a': 1}",
        b'{"a": 1,}',
        b'{"a": NaN}',
        b'{"a": 1} {"b": 2}',
        b'{"a": "\xff"}',
        b'{"\xff": 1}',
        b"\xef\xbb\xbf{}",
        b'{"a": "\\ud800"}',
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_what_is_not_a_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(ApiError) as error:
        Body.parse(data).decoded()
    assert error.value.status == 400


@pytest.mark.parametrize("text", [b"1e400", b'"\xff"'])
def test_a_value_that_cannot_be_decoded_is_told_by_its_field(text: bytes) -> None:
    body = Body.parse(b'{"fine": 1, "odd": ' + text + b"}")
    assert body.get("fine") == 1
    with pytest.raises(ApiError) as error:
        body.get("odd")
    assert (error.value.status, error.value.param) == (400, "odd")
