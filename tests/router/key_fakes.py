"""API keys of tests, files that list them, and a clock that tests move."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import yaml

A, B = "sk-tandem-of-a", "sk-tandem-of-b"
KEY_A, KEY_B = {"authorization": f"Bearer {A}"}, {"authorization": f"Bearer {B}"}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def hashed(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def listed(**keys: dict[str, Any]) -> str:
    """A file with the keys `a` and `b`, or those given, with what is said of them."""
    known = {"a": A, "b": B}
    return yaml.safe_dump(
        {"keys": [{"name": name, "sha256": hashed(known[name]), **more} for name, more in keys.items()]}
    )


def replace(path: Path, text: str | bytes) -> None:
    """Write a file in one step."""
    beside = path.with_suffix(".new")
    beside.write_bytes(text.encode() if isinstance(text, str) else text)
    beside.replace(path)
