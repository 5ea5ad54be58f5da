"""A request's JSON body: read field by field, edited without touching what is not edited.

The top level is split into raw values by msgspec; a value that nobody edits goes on byte for byte as
the client wrote it (numbers, escapes, unknown fields). A name given twice keeps its last value only,
so no engine can read a duplicate otherwise than the router did.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from tandem.router.errors import ApiError

_split = msgspec.json.Decoder(dict[str, msgspec.Raw])
_decode = msgspec.json.Decoder()
_encode = msgspec.json.Encoder()


class Body:
    """The fields of one request."""

    __slots__ = ("_decoded", "_raw", "data")

    def __init__(self, raw: dict[str, msgspec.Raw], data: bytes = b"") -> None:
        self._raw = raw
        #: The body as it came.
        self.data = data
        self._decoded: dict[str, Any] = {}

    @classmethod
    def parse(cls, data: bytes) -> Body:
        """Split a body. Raises ApiError 400 when it is not a JSON object."""
        try:
            return cls(_split.decode(data), data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(400, f"The request body is not a JSON object: {error}") from None

    def __contains__(self, name: str) -> bool:
        return name in self._raw

    def names(self) -> list[str]:
        return list(self._raw)

    def get(self, name: str, default: Any = None) -> Any:
        """The decoded value of a field. Raises ApiError 400 when its text is not valid JSON."""
        if name not in self._raw:
            return default
        if name not in self._decoded:
            self._decoded[name] = self._value(name, self._raw[name])
        return self._decoded[name]

    def decoded(self) -> dict[str, Any]:
        """All fields, decoded."""
        return {name: self.get(name) for name in self._raw}

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
