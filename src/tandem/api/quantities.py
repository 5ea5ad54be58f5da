"""Kubernetes' quantities: amounts of resources, as 500m, 2 or 16Gi."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

GPU = "nvidia.com/gpu"
EFA = "vpc.amazonaws.com/efa"
HUGE_PAGES = "hugepages-2Mi"

MOST_DEVICES = 1024
"""Of one kind in one pod; no node has so many."""

_AMOUNT = re.compile(r"([+-]?[0-9.]+)(?:([eE][+-]?[0-9]+)|([KMGTPE]i|[numkMGTPE]))?")
_UNITS = {
    **{suffix: Decimal(1024) ** (i + 1) for i, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"))},
    **{
        suffix: Decimal(1000) ** (i - 3)
        for i, suffix in enumerate(("n", "u", "m", "", "k", "M", "G", "T", "P", "E"))
    },
}


def quantity(value: Any) -> Decimal | None:
    """A quantity as a number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    match = _AMOUNT.fullmatch(str(value))
    if match is None or len(match[2] or "") > 4:  # e+99: beyond it nothing is meant
        return None
    try:
        return Decimal(match[1] + (match[2] or "")) * _UNITS[match[3] or ""]
    except InvalidOperation:
        return None


def devices(resources: Mapping[str, Any], name: str) -> int | None:
    """How many devices of a kind (GPU, EFA) a container asks for, by its limits, else its requests; None when
    it names none. Raises ValueError where that is no number of devices."""
    for part in ("limits", "requests"):
        amounts = resources.get(part)
        given = amounts.get(name) if isinstance(amounts, Mapping) else None
        if given is not None:
            amount = quantity(given)
            if amount is None or amount < 0 or amount != amount.to_integral_value() or amount > MOST_DEVICES:
                raise ValueError(f"{part}.{name}: must be a whole number of devices (it is {given})")
            return int(amount)
    return None
