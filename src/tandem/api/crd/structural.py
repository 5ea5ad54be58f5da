"""Judging a value by a structural schema, as the API server does, all mistakes at once.

Rules in CEL (`x-kubernetes-validations`) are not judged here.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

Location = tuple[str | int, ...]
"""Where in a value: names of fields and places in lists."""

_MUST_BE = {
    "array": "a list",
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "object": "an object",
    "string": "a string",
}
_RANGES = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1)}


def schema_problems(value: Any, schema: dict[str, Any], at: Location = ()) -> Iterator[tuple[Location, str]]:
    """Every mistake in a value: its location, which begins with `at`, and what is wrong.

    A field that the schema does not have is a mistake, as it is for kubectl, which asks the API server for
    that check. A field that is null, or an entry of a map, counts as left out, as the API server drops it (or
    puts the default there); an item of a list does not.
    """
    if schema.get("x-kubernetes-int-or-string"):
        if not isinstance(value, str) and not _is("integer", value):
            yield at, f"must be a whole number or a string (it is {_shown(value)}){_advice('string', value)}"
        elif isinstance(value, str):
            yield from _text(value, schema, at)
        return
    kind = schema["type"]
    if not _is(kind, value):
        yield at, f"must be {_MUST_BE[kind]} (it is {_shown(value)}){_advice(kind, value)}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield at, f"must be one of {', '.join(map(str, schema['enum']))} (it is {value!r})"
    match kind:
        case "object":
            yield from _object(value, schema, at)
        case "array":
            yield from _list(value, schema, at)
        case "string":
            yield from _text(value, schema, at)
        case "integer" | "number":
            yield from _number(value, schema, at)


def _is(kind: str, value: Any) -> bool:
    match kind:
        case "array":
            return isinstance(value, list)
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            # Beyond these the API server trusts no fraction to be whole.
            exact = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
            whole = isinstance(value, int) or exact
            return whole and not isinstance(value, bool)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "object":
            return isinstance(value, dict)
        case _:
            return isinstance(value, str)


def _object(value: dict[Any, Any], schema: dict[str, Any], at: Location) -> Iterator[tuple[Location, str]]:
    known: dict[str, Any] = schema.get("properties", {})
    for name in schema.get("required", ()):
        if value.get(name) is None and "default" not in known[name]:
            yield (*at, name), "is required" + (_without_value(known[name]) if name in value else "")
    for name, item in value.items():
        inner = known.get(name) or schema.get("additionalProperties")
        if inner is not None:
            if item is not None:
                yield from schema_problems(item, inner, (*at, str(name)))
        elif known:  # an object without properties is one that is not described here: metadata
            near = difflib.get_close_matches(str(name), known, n=1)
            yield (*at, str(name)), "is not a field" + (f"; did you mean {near[0]}?" if near else "")


def _list(value: list[Any], schema: dict[str, Any], at: Location) -> Iterator[tuple[Location, str]]:
    if len(value) < schema.get("minItems", 0):
        yield at, f"must have at least {schema['minItems']} items (it has {len(value)})"
    if "maxItems" in schema and len(value) > schema["maxItems"]:
        yield at, f"must have at most {schema['maxItems']} items (it has {len(value)})"
    seen: set[Any] = set()
    for i, item in enumerate(value):
        yield from schema_problems(item, schema["items"], (*at, i))
        key = _key(item, schema)
        if key is None:
            continue
        if key in seen:
            yield (*at, i), f"is given twice ({', '.join(map(str, key))})"
        seen.add(key)


def _key(item: Any, schema: dict[str, Any]) -> tuple[Any, ...] | None:
    """What must be unique in a list that is a set or a map; None in other lists, and of another shape."""
    match schema.get("x-kubernetes-list-type"):
        case "set" if not isinstance(item, dict | list):
            return (item,)
        case "map" if isinstance(item, dict):
            properties = schema["items"]["properties"]
            names = schema["x-kubernetes-list-map-keys"]
            given = {name: value for name, value in item.items() if value is not None}
            key = tuple(given.get(name, properties[name].get("default")) for name in names)
            return None if any(isinstance(part, dict | list) for part in key) else key
    return None


def without_nulls(value: Any) -> Any:
    """A copy less every field that is null: for the API server those are left out."""
    match value:
        case Mapping():
            return {k: without_nulls(v) for k, v in value.items() if v is not None}
        case list() | tuple():
            return [without_nulls(v) for v in value]
    return value


def with_whole_numbers(value: Any) -> Any:
    """A copy in which whole numbers are written as such: where 2.0 is sent, the API server stores 2."""
    match value:
        case float() if value.is_integer() and abs(value) < 2**53:
            return int(value)
        case dict():
            return {k: with_whole_numbers(v) for k, v in value.items()}
        case list():
            return [with_whole_numbers(item) for item in value]
    return value


def without_defaults(value: Any, schema: dict[str, Any]) -> Any:
    """A copy of a value less what is there by default: of an object that the API server has stored, nobody
    can tell who wrote it."""
    match value:
        case dict():
            properties, other = schema.get("properties", {}), schema.get("additionalProperties", {})
            return {
                k: without_defaults(v, properties.get(k, other))
                for k, v in value.items()
                if not ("default" in properties.get(k, {}) and v == properties[k]["default"])
            }
        case list():
            return [without_defaults(item, schema.get("items", {})) for item in value]
    return value


def _text(value: str, schema: dict[str, Any], at: Location) -> Iterator[tuple[Location, str]]:
    if len(value) < schema.get("minLength", 0):
        yield at, "must not be empty" if not value else f"must have at least {schema['minLength']} characters"
    if "maxLength" in schema and len(value) > schema["maxLength"]:
        yield at, f"must have at most {schema['maxLength']} characters (it has {len(value)})"
    if "pattern" in schema and not _pattern(schema["pattern"]).search(value):
        yield at, f"must match {schema['pattern']} (it is {_shown(value)})"


@cache
def _pattern(pattern: str) -> re.Pattern[str]:
    """Go's `$` is the end of the text; Python's also stands before a last line feed."""
    return re.compile(re.sub(r"(?<!\\)\$", r"\\Z", pattern))


def _number(value: float, schema: dict[str, Any], at: Location) -> Iterator[tuple[Location, str]]:
    low, high = _RANGES.get(schema.get("format", ""), (None, None))
    low, high = schema.get("minimum", low), schema.get("maximum", high)
    if low is not None and value < low:
        yield at, f"must be at least {low} (it is {value})"
    if high is not None and value > high:
        yield at, f"must be at most {high} (it is {value})"


def _without_value(schema: dict[str, Any]) -> str:
    """Of a required field that is there and null."""
    written = "; write {} if nothing is to be said in it" if schema.get("type") == "object" else ""
    return f", and has no value here{written}"


def _advice(kind: str, value: Any) -> str:
    """How a value is written as one of the kind that it should be, where its writer probably meant that."""
    match kind, value:
        case "string", bool():
            return "; put it in quotes (y, n, yes, no, on and off are booleans too)"
        case "string", int() | float():
            return "; put it in quotes"
        case "integer" | "number", str() if re.fullmatch(r"-?[0-9]+", value, re.ASCII):
            return "; take the quotes away"
        case "boolean", "true" | "false":
            return "; take the quotes away"
        case "array", str() | dict():
            return "; a list is [a, b], or items that begin with '- '"
    return ""


def _shown(value: Any) -> str:
    """A value for a message, cut where it is long."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
