"""What pictures are drawn of."""

from __future__ import annotations

STYLE = "font-family='system-ui,sans-serif' font-size='11'"
COLOURS = {"Tandem": "#1f6feb", "vllm-router": "#d1690e", "smg": "#2da44e", "nginx": "#8250df"}


def line(x1: float, y1: float, x2: float, y2: float, colour: str = "#333", *, dash: bool = False) -> str:
    dashes = " stroke-dasharray='4 3'" if dash else ""
    return f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' stroke='{colour}'{dashes}/>"


def ticks(most: float) -> list[float]:
    """Round numbers from 0 up to `most`, four to ten of them."""
    step = next(
        s for power in range(-3, 7) for s in (10.0**power, 2 * 10.0**power, 5 * 10.0**power) if most / s < 9
    )
    return [round(step * i, 9) for i in range(int(most / step) + 1)]
