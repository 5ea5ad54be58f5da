"""A request's JSON body: read field by field, edited without touching what is not edited.

The top level is split into raw values by msgspec; a value that nobody edits goes on byte for byte as
the client wrote it (numbers, escapes, unknown fields). A name given twice keeps its last value only,
so no engine can read a duplicate otherwise than the router did.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from tandem.router.errors import ApiError

if TYPE_CHECKING:
    from tandem.router.facts import Facts

MOST_FIELDS = 1024
"""Fields of a request; vLLM has a tenth of that."""
LARGE_VALUE = 64 * 1024
"""Bytes of an object or a list that is not decoded where a large body is known by its facts."""

_SMALL_VALUE = 100

# What a list of token ids has between its brackets.
_NUMBERS = b"0123456789, \t\r\n"

_split = msgspec.json.Decoder(dict[str, msgspec.Raw])
_decode = msgspec.json.Decoder()
_encode = msgspec.json.Encoder()


class Body:
    """The fields of one request."""

    __slots__ = ("_decoded", "_raw", "data", "facts")

    def __init__(self, raw: dict[str, msgspec.Raw], data: bytes = b"", facts: Facts | None = None) -> None:
        self._raw = raw
        self.facts = facts
        """What is known of it, where it was read elsewhere: to decode it here would take long."""
        #: The body as it came.
        self.data = data
        self._decoded: dict[str, Any] = {}

    @classmethod
    def parse(cls, data: bytes) -> Body:
        """Split a body. Raises ApiError 400 when it is not a JSON object, or has too many fields."""
        try:
            raw = _split.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(400, f"The request body is not a JSON object: {error}") from None
        if len(raw) > MOST_FIELDS:
            raise ApiError(400, f"The request body has {len(raw)} fields; at most {MOST_FIELDS} are taken.")
        return cls(raw, data)

    @classmethod
    def known(cls, data: bytes, facts: Facts) -> Body:
        """A body that was read elsewhere."""
        whole = memoryview(data)
        return cls({name: msgspec.Raw(whole[at:end]) for name, at, end in facts.fields}, data, facts)

    def __contains__(self, name: str) -> bool:
        return name in self._raw

    def names(self) -> list[str]:
        return list(self._raw)

    def get(self, name: str, default: Any = None) -> Any:
        """The decoded value of a field. Raises ApiError 400 when its text is not valid JSON."""
        if name not in self._raw:
            return default
        if name not in self._decoded:
            if self.facts is not None and self._is_large(name):
                raise ApiError(400, f"The field {name!r} is too large for what it is for.", param=name)
            self._decoded[name] = self._value(name, self._raw[name])
        return self._decoded[name]

    def decoded(self) -> dict[str, Any]:
        """All fields, decoded, however long it takes."""
        if self.facts is not None:
            return Body.parse(self.data).decoded()
        return {name: self.get(name) for name in self._raw}

    def given(self, name: str) -> bool:
        """Whether a field is there, and not null."""
        return name in self._raw and bytes(memoryview(self._raw[name])[:4]) != b"null"

    def raw(self, name: str) -> bytes:
        """A field's value as it came, copied."""
        return bytes(self._raw[name])

    @property
    def ids(self) -> int | None:
        """How many token ids its prompt is; None: it is something else. They are not decoded: a hundred
        thousand would take 10 ms."""
        if self.facts is not None:
            return self.facts.ids
        value = self.raw("prompt") if "prompt" in self else b""
        if not value.startswith(b"[") or value.translate(None, _NUMBERS) != b"[]":
            return None
        return value.count(b",") + 1 if value.strip(b"[] \t\r\n") else 0

    def replaced(self, name: str, value: str) -> Body:
        """The same request with another value of a field that neither its facts nor its prompt's tokens
        depend on."""
        raw = {**self._raw, name: msgspec.Raw(_encode.encode(value))}
        return Body(raw, self.data, self.facts)

    def drop(self) -> None:
        """Let go of the body, but for fields that are small."""
        small = {name: bytes(raw) for name, raw in self._raw.items() if len(memoryview(raw)) <= _SMALL_VALUE}
        self._raw = {name: msgspec.Raw(raw) for name, raw in small.items()}
        self._decoded = {}
        self.data = b""

    def _is_large(self, name: str) -> bool:
        """Whether a value is what takes long to decode."""
        value = memoryview(self._raw[name])
        return len(value) > LARGE_VALUE and value[0] != ord('"')

    def picked(self, names: Iterable[str]) -> bytes:
        """The body with these fields only, as they came."""
        return _encode.encode({name: self._raw[name] for name in names if name in self._raw})

    def edited(self, changes: Mapping[str, Any], *, drop: Iterable[str] = ()) -> bytes:
        """The body with some fields set (a msgspec.Raw is inserted verbatim) and some left out."""
        fields: dict[str, Any] = {**self._raw, **changes}
        for name in drop:
            fields.pop(name, None)
        return _encode.encode(fields)

    def _value(self, name: str, raw: msgspec.Raw) -> Any:
        try:
            return _decode.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(400, f"The field {name!r} is not valid JSON: {error}", param=name) from None
