"""Ids that nobody may guess."""

from __future__ import annotations

import pytest

from tandem.router import random_ids
from tandem.router.random_ids import random_hex


def test_no_bytes_are_given_twice() -> None:
    sizes = [8, 16, 8, 5, 4096, 16] * 300
    found = [random_hex(size) for size in sizes]
    assert [len(text) for text in found] == [2 * size for size in sizes]
    assert len(set(found)) == len(found)


def test_they_are_the_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def urandom(size: int) -> bytes:
        asked.append(size)
        return bytes(range(256)) * (size // 256)

    monkeypatch.setattr(random_ids.os, "urandom", urandom)
    monkeypatch.setattr(random_ids, "_pool", b"")
    monkeypatch.setattr(random_ids, "_at", 0)
    assert [random_hex(2), random_hex(3)] == ["0001", "020304"]
    for _ in range(1000):
        random_hex(8)
    assert asked == [4096, 4096]
