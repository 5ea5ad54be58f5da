"""A picture of what routers cost: a panel of bars for each figure, shorter is better."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

from pages import medians
from report import Results, added, cost_rows
from svg import COLOURS, STYLE, line, ticks

WIDTH, BAR, TOP, BOTTOM, LEFT, RIGHT = 460, 24, 34, 40, 96, 60
Row = dict[str, Any]
"""Of `medians`."""


def panels(results: Results) -> list[tuple[str, str, Sequence[Row]]]:
    """(title, figure, its rows) of each that was measured."""
    found: list[tuple[str, str, Sequence[Row]]] = [
        (f"CPU of a request, ms: {name}", "cpu_ms", cost_rows(results[name]))
        for name in ("paced", "burst")
        if name in results
    ]
    if "first-byte" in results:
        rows = medians(added(results["first-byte"]), ("router",), ("added_p50", "added_p99"))
        found.append(("added to the first byte at p50, ms", "added_p50", rows))
        found.append(("added to the first byte at p99, ms", "added_p99", rows))
    return found


def svg(results: Results) -> str:
    """Lines are from the lowest to the highest run."""
    shown = panels(results)
    heights = [TOP + BAR * len(rows) + BOTTOM for _, _, rows in shown]
    deep = [max(heights[at : at + 2]) for at in range(0, len(heights), 2)]
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{2 * WIDTH}' height='{sum(deep)}' {STYLE}>",
        "<rect width='100%' height='100%' fill='white'/>",
    ]
    for place, (title, figure, rows) in enumerate(shown):
        x, y = WIDTH * (place % 2), sum(deep[: place // 2])
        parts += [f"<g transform='translate({x},{y})'>", *_panel(title, figure, rows), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(title: str, figure: str, rows: Sequence[Row]) -> list[str]:
    most = max(row[f"{figure}_high"] for row in rows) * 1.05 or 1.0
    floor = TOP + BAR * len(rows)

    def x(value: float) -> float:
        return LEFT + max(0.0, value) / most * (WIDTH - LEFT - RIGHT)

    parts = [f"<text x='{LEFT}' y='18' font-weight='600'>{escape(title)}</text>"]
    for value in ticks(most):
        parts.append(line(x(value), TOP, x(value), floor, "#e5e5e5"))
        parts.append(f"<text x='{x(value):.1f}' y='{floor + 16}' text-anchor='middle'>{value:g}</text>")
    for place, row in enumerate(rows):
        name, top = row["router"], TOP + BAR * place
        middle = top + BAR / 2
        parts.append(f"<text x='{LEFT - 8}' y='{middle + 4:.1f}' text-anchor='end'>{escape(name)}</text>")
        parts.append(
            f"<rect class='bar' x='{LEFT}' y='{top + 4}' width='{x(row[figure]) - LEFT:.1f}' "
            f"height='{BAR - 8}' fill='{COLOURS[name]}' fill-opacity='0.75'/>"
        )
        parts.append(line(x(row[f"{figure}_low"]), middle, x(row[f"{figure}_high"]), middle))
        end = x(row[f"{figure}_high"]) + 5
        parts.append(f"<text x='{end:.1f}' y='{middle + 4:.1f}'>{row[figure]:.2f}</text>")
    return [*parts, line(LEFT, TOP, LEFT, floor)]
