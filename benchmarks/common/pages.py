"""From the figures of several runs to tables on a page."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def insert(page: Path, marker: str, text: str) -> None:
    """Replace what stands on a page between `<!-- MARKER -->` and `<!-- /MARKER -->`. Raises ValueError."""
    begin, end = f"<!-- {marker} -->", f"<!-- /{marker} -->"
    before, found_begin, rest = page.read_text("utf-8").partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"{page} has no {begin} … {end}")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", "utf-8")


def medians(
    runs: Iterable[dict[str, Any]], by: Sequence[str], figures: Sequence[str]
) -> list[dict[str, Any]]:
    """For each value of the fields `by`, the medians of the figures, with the lowest and the highest run."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault(tuple(run[name] for name in by), []).append(run)
    rows = []
    for key, group in groups.items():
        row: dict[str, Any] = dict(zip(by, key, strict=True))
        for name in (name for name in figures if name in group[0]):
            values = [run[name] for run in group]
            row[name] = statistics.median(values)
            row[f"{name}_low"], row[f"{name}_high"] = min(values), max(values)
        rows.append({**row, "runs": len(group)})
    return rows


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table; the first row is its head."""
    head, *rest = rows
    lines = [head, ["---"] * len(head), *rest]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def spread(row: dict[str, Any], name: str, form: str, scale: float = 1.0) -> str:
    """Of a row of `medians`: the median, and the lowest and highest run where there are several."""
    middle, low, high = (format(row[n] * scale, form) for n in (name, f"{name}_low", f"{name}_high"))
    return middle if row["runs"] == 1 else f"{middle} ({low}-{high})"


@dataclass(frozen=True)
class Goal:
    what: str
    measured: str
    met: bool


def goals_table(found: Sequence[Goal]) -> str:
    lines = [[g.what, g.measured, "yes" if g.met else "**no**"] for g in found]
    return markdown([["goal", "measured", "met"], *lines])
