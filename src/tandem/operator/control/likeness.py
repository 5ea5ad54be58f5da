"""Whether an object in the cluster has all that is desired of it."""

from __future__ import annotations

from typing import Any

from lightkube.utils.quantity import parse_quantity

_QUANTITIES = ("requests", "limits", "capacity", "sizeLimit")
"""Fields whose values, or whose fields' values, are quantities."""


def covers(live: Any, desired: Any, *, quantity: bool = False) -> bool:
    """Whether each field of `desired` is in `live` with its value; what others have added does not count.

    API servers leave out what is empty and write quantities in another way: both are alike. Where this says
    no of what is alike, an object is applied once too often, which writes nothing.
    """
    if live is None:
        return not desired
    if isinstance(desired, dict):
        return isinstance(live, dict) and all(
            covers(live.get(name), value, quantity=quantity or name in _QUANTITIES)
            for name, value in desired.items()
        )
    if isinstance(desired, list):
        return (
            isinstance(live, list)
            and len(live) == len(desired)
            and all(covers(a, b, quantity=quantity) for a, b in zip(live, desired, strict=True))
        )
    return bool(live == desired) or (quantity and _same_quantity(live, desired))


def _same_quantity(one: Any, other: Any) -> bool:
    try:
        return bool(parse_quantity(str(one)) == parse_quantity(str(other)))
    except (ValueError, ArithmeticError):
        return False
