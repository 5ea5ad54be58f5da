"""A picture of how streams went: the gaps between tokens over time, a panel for each layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

from svg import STYLE, line

WIDTH, HEIGHT = 920, 190
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 30, 34
LOWEST_MS, HIGHEST_MS = 10, 10_000
_COLOURS = ("#1f6feb", "#d1690e", "#2da44e")


def svg(panels: Sequence[tuple[str, dict[str, Any]]], seconds: float, limit: float) -> str:
    """`panels`: (title, what `tables.course` tells of it). `limit`: seconds, drawn as a line."""
    total = HEIGHT * len(panels) + 24
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{total}' {STYLE}>",
        "<rect width='100%' height='100%' fill='white'/>",
    ]
    for place, (title, course) in enumerate(panels):
        parts.append(f"<g transform='translate(0,{place * HEIGHT})'>")
        parts += _panel(title, course, seconds, limit, _COLOURS[place % len(_COLOURS)])
        parts.append("</g>")
    parts.append(
        f"<text x='{(LEFT + WIDTH - RIGHT) / 2}' y='{total - 8}' text-anchor='middle'>seconds; bars: from "
        "the median to the longest gap of the short streams in a quarter of a second; triangles: a long "
        "prompt is sent</text>"
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(title: str, course: dict[str, Any], seconds: float, limit: float, colour: str) -> list[str]:
    floor = HEIGHT - BOTTOM

    def x(at: float) -> float:
        return LEFT + at / seconds * (WIDTH - LEFT - RIGHT)

    def y(gap: float) -> float:
        ms = min(max(gap * 1000, LOWEST_MS), HIGHEST_MS)
        part = math.log(ms / LOWEST_MS) / math.log(HIGHEST_MS / LOWEST_MS)
        return floor - part * (floor - TOP)

    parts = [f"<text x='{LEFT}' y='18' font-weight='600'>{escape(title)}</text>"]
    for ms in (10, 100, 1000, 10_000):
        parts.append(line(LEFT, y(ms / 1000), WIDTH - RIGHT, y(ms / 1000), "#e5e5e5"))
        parts.append(f"<text x='{LEFT - 6}' y='{y(ms / 1000) + 4:.1f}' text-anchor='end'>{ms:,} ms</text>")
    parts.append(line(LEFT, y(limit), WIDTH - RIGHT, y(limit), "#888", dash=True))
    parts += [
        f"<text x='{x(at):.1f}' y='{floor + 24}' text-anchor='middle'>{at}</text>"
        for at in range(0, int(seconds) + 1, 5)
    ]
    for at in course["long"]:
        tip = f"{x(at):.1f},{floor + 2} {x(at) - 4:.1f},{floor + 10} {x(at) + 4:.1f},{floor + 10}"
        parts.append(f"<polygon points='{tip}' fill='#333'/>")
    for at, median, longest in course["points"]:
        top, bottom = y(longest), y(median) + 1.5
        parts.append(
            f"<rect class='gap' x='{x(at) - 1.5:.1f}' y='{top:.1f}' width='3' height='{bottom - top:.1f}' "
            f"fill='{colour}'/>"
        )
    return parts
