"""Mistakes in a resource, and how the place of one is written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One mistake: where (field path, or a position in the file) and what."""

    where: str
    what: str

    def __str__(self) -> str:
        return one_line(f"{self.where}: {self.what}")


class InvalidResource(ValueError):
    """The resource cannot be used. `problems` holds all of them, not only the first."""

    def __init__(self, source: str, problems: Iterable[Problem]) -> None:
        self.source = source
        self.problems = list(problems)
        super().__init__(f"{source}: " + "; ".join(str(p) for p in self.problems))


def one_line(text: str) -> str:
    """A text for one line of a log, a terminal or a comment: what would begin another line or steer a
    terminal is written as in Python (`\\n`), as are halves of characters, which nothing can print."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def field_path(location: tuple[int | str, ...]) -> str:
    """('spec', 'volumes', 0, 'name') → `spec.volumes[0].name`."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path or "the object"
