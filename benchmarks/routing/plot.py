"""A picture of the measurement in real time: hit rate over TTFT p99, a panel for each speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

from report import medians
from svg import COLOURS, STYLE, line, ticks

WIDTH, HEIGHT = 460, 330
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 30, 44


def svg(result: dict[str, Any]) -> str:
    """Bars are the lowest and the highest run."""
    speeds = list(dict.fromkeys(run["speed"] for run in result["runs"]))
    products = {r["name"]: r["product"] for r in result["routers"]}
    numbers = {name: number for number, name in enumerate(products, 1)}
    legend = 18 * ((len(products) + 1) // 2) + 12
    total = WIDTH * len(speeds), HEIGHT + legend
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{total[0]}' height='{total[1]}' {STYLE}>",
        "<rect width='100%' height='100%' fill='white'/>",
    ]
    for place, speed in enumerate(speeds):
        rows = medians((r for r in result["runs"] if r["speed"] == speed), ("router",))
        parts.append(f"<g transform='translate({place * WIDTH},0)'>")
        parts += _panel(f"{speed:g} × the trace's speed", rows, result["bound"], products, numbers)
        parts.append("</g>")
    for name, number in numbers.items():
        column, line = (number - 1) % 2, (number - 1) // 2
        x, y = LEFT + column * WIDTH * len(speeds) // 2, HEIGHT + 12 + 18 * line
        parts.append(
            f"<text x='{x}' y='{y}' fill='{COLOURS[products[name]]}'>{number}  {escape(name)}</text>"
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(
    title: str,
    rows: Sequence[dict[str, Any]],
    bound: float,
    products: dict[str, str],
    numbers: dict[str, int],
) -> list[str]:
    most_ms = max(row["ttft_p99_high"] for row in rows) * 1000 * 1.08
    most_hits = max(bound, *(row["hit_rate_high"] for row in rows)) * 1.12

    def x(seconds: float) -> float:
        return LEFT + seconds * 1000 / most_ms * (WIDTH - LEFT - RIGHT)

    def y(hits: float) -> float:
        return HEIGHT - BOTTOM - hits / most_hits * (HEIGHT - TOP - BOTTOM)

    floor = HEIGHT - BOTTOM
    parts = [f"<text x='{WIDTH / 2}' y='18' text-anchor='middle' font-weight='600'>{escape(title)}</text>"]
    parts.append(line(LEFT, floor, WIDTH - RIGHT, floor) + line(LEFT, TOP, LEFT, floor))
    parts += [
        f"<text x='{x(ms / 1000):.1f}' y='{floor + 15}' text-anchor='middle'>{ms:g}</text>"
        for ms in ticks(most_ms)
    ]
    for percent in ticks(most_hits * 100):
        label = f"<text x='{LEFT - 6}' y='{y(percent / 100) + 4:.1f}' text-anchor='end'>{percent:g} %</text>"
        parts.append(label + line(LEFT, y(percent / 100), WIDTH - RIGHT, y(percent / 100), "#e5e5e5"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f"<text x='{middle}' y='{HEIGHT - 8}' text-anchor='middle'>TTFT p99, ms; up: hit rate</text>"
    )
    parts.append(line(LEFT, y(bound), WIDTH - RIGHT, y(bound), "#888", dash=True))
    parts.append(
        f"<text x='{WIDTH - RIGHT}' y='{y(bound) - 4:.1f}' text-anchor='end' fill='#666'>bound</text>"
    )
    for row in rows:
        name = row["router"]
        colour, at_x, at_y = COLOURS[products[name]], x(row["ttft_p99"]), y(row["hit_rate"])
        parts.append(line(x(row["ttft_p99_low"]), at_y, x(row["ttft_p99_high"]), at_y, colour))
        parts.append(line(at_x, y(row["hit_rate_low"]), at_x, y(row["hit_rate_high"]), colour))
        parts.append(f"<circle cx='{at_x:.1f}' cy='{at_y:.1f}' r='4' fill='{colour}'/>")
        above = at_y + (-5 if numbers[name] % 2 else 13)
        parts.append(f"<text x='{at_x + 6:.1f}' y='{above:.1f}' fill='{colour}'>{numbers[name]}</text>")
    return parts
