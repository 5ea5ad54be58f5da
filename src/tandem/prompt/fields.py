"""Reading a request's fields without coercion.

vLLM's request models coerce ("5" becomes 5, "false" becomes False) and refuse by rules of their own. Here a
field has exactly the expected JSON type, or it is absent or null, or the engine is left to judge it.
"""

from collections.abc import Mapping

from tandem.prompt.errors import NotExact

FIELD_TYPE = "field type"


def boolean(body: Mapping[str, object], name: str, default: bool) -> bool:
    value = body.get(name, default)
    if not isinstance(value, bool):
        raise NotExact(FIELD_TYPE, f"{name} is not true or false")
    return value


def integer(body: Mapping[str, object], name: str) -> int | None:
    value = body.get(name)
    if value is not None and type(value) is not int:
        raise NotExact(FIELD_TYPE, f"{name} is not an integer")
    return value


def text(body: Mapping[str, object], name: str, where: str = "") -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise NotExact(FIELD_TYPE, f"{where}{name} is not a string")
    return value


def choice(body: Mapping[str, object], name: str, allowed: frozenset[str]) -> str | None:
    value = text(body, name)
    if value is not None and value not in allowed:
        raise NotExact(FIELD_TYPE, f"{name} is none of {', '.join(sorted(allowed))}")
    return value


def objects(value: object, name: str) -> list[dict[str, object]] | None:
    """A list of JSON objects, or None."""
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise NotExact(FIELD_TYPE, f"{name} is not a list of objects")
    return value
