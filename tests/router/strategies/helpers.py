"""Engines and prompts for strategies: nothing here does I/O."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.http import Origin
from tandem.router.engines import Engine, EngineRole
from tandem.router.strategies import Prompt, Space


def engine(url: str) -> Engine:
    return Engine(url, EngineRole.PREFILL, Origin.parse(url))


def fleet(count: int) -> list[Engine]:
    """So many engines, by URL."""
    return [engine(f"http://e{i:03}:1") for i in range(count)]


def prompt(ids: Sequence[int], *, lora: str | None = None, salt: str | None = None) -> Prompt:
    return Prompt(len(ids), list(ids), Space(lora, salt))
