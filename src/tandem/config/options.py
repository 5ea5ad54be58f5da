"""How a field of the configuration is declared: its default, its help, and the parser of its flag's text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, field
from typing import Any


def option(help: str, parse: Callable[[str], Any] = str, default: Any = MISSING) -> Any:
    """A dataclass field that is a flag; `parse` raises ValueError for a text that is none of its values."""
    metadata = {"help": help, "parse": parse}
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)
