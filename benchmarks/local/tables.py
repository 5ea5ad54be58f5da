"""From the timings of requests to figures; from the figures of runs to tables, and a verdict on each goal."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from pages import Goal, markdown, medians

from tandem.bench.load import Timing

TTFT_SLO, GAP_SLO = 1.0, 0.25
"""Seconds: what a short request's first token, and each later one, may take."""
BIN_SECONDS = 0.25
HIGHER_IS_BETTER = ("slo", "tokens_per_s")
PAIR = "pair"
Run = dict[str, Any]
"""Figures of one load on one layout (`figures`), with "layout", "load" and "run"."""
_SHOWN = {
    "itl_p50": "ITL p50, ms",
    "itl_p99": "p99",
    "itl_p999": "p99.9",
    "itl_max": "longest",
    "ttft_p50": "TTFT p50, ms",
    "ttft_p99": "p99",
    "long_ttft_p50": "long TTFT p50, s",
    "tokens_per_s": "tokens/s",
    "slo": "in the SLO",
}
"""Of short requests, where nothing else is said."""
_IN_WORDS = {
    "itl_p50": "short ITL p50",
    "itl_p99": "short ITL p99",
    "itl_p999": "short ITL p99.9",
    "itl_max": "the longest stall of a short stream",
    "ttft_p50": "short TTFT p50",
    "ttft_p99": "short TTFT p99",
    "long_ttft_p50": "long TTFT p50",
    "tokens_per_s": "tokens/s",
    "slo": "short requests that meet the SLO",
}
FIGURES = tuple(_SHOWN)


# --- figures of one run ---


def figures(
    short: Sequence[Timing],
    long: Sequence[Timing],
    begun: float,
    seconds: float,
    *,
    short_failed: int = 0,
    long_failed: int = 0,
) -> dict[str, float]:
    """Of one load that began at `begun` (on the clock of the timings) and sent requests for `seconds`.
    Those that failed do not meet the SLO."""
    gaps = [gap for timing in short for gap in timing.gaps]
    ttft = [timing.ttft for timing in short]
    tokens = sum(begun <= time < begun + seconds for timing in (*short, *long) for time in timing.times)
    return {
        "itl_p50": quantile(gaps, 0.5),
        "itl_p99": quantile(gaps, 0.99),
        "itl_p999": quantile(gaps, 0.999),
        "itl_max": max(gaps),
        "ttft_p50": quantile(ttft, 0.5),
        "ttft_p99": quantile(ttft, 0.99),
        "long_ttft_p50": quantile([timing.ttft for timing in long], 0.5) if long else 0.0,
        "tokens_per_s": tokens / seconds,
        "slo": sum(map(meets_slo, short)) / (len(short) + short_failed),
        "short_requests": len(short),
        "long_requests": len(long),
        "short_failed": short_failed,
        "long_failed": long_failed,
    }


def meets_slo(timing: Timing) -> bool:
    return timing.ttft <= TTFT_SLO and max(timing.gaps, default=0.0) <= GAP_SLO


def quantile(values: Iterable[float], part: float) -> float:
    """The value below which `part` (0 to 1) of them lie, linear between two of them."""
    ordered = sorted(values)
    place = part * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def course(short: Sequence[Timing], long: Sequence[Timing], begun: float, seconds: float) -> dict[str, Any]:
    """How a load went: for each quarter of a second in which a gap of a short stream ended, (its middle, the
    median and the longest of these gaps), and when long prompts were sent. Seconds since `begun`."""
    bins: dict[int, list[float]] = {}
    for timing in short:
        for before, after in pairwise(timing.times):
            bins.setdefault(int((after - begun) / BIN_SECONDS), []).append(after - before)
    points = [
        [round((at + 0.5) * BIN_SECONDS, 3), round(statistics.median(gaps), 4), round(max(gaps), 4)]
        for at, gaps in sorted(bins.items())
        if at * BIN_SECONDS < seconds
    ]
    return {"points": points, "long": [round(timing.sent - begun, 2) for timing in long]}


# --- which setting of two engines that are alike ---


def best(runs: Sequence[Run]) -> str:
    """The layout with most short requests in the SLO, to a hundredth; of equals the one with most tokens."""
    rows = medians(runs, ("layout",), FIGURES)
    return str(max(rows, key=lambda row: (round(row["slo"], 2), row["tokens_per_s"]))["layout"])


# --- tables ---


def table(runs: Sequence[Run], names: dict[str, str]) -> str:
    """A line for each load and layout, in the order of `names` (layout → as it is shown)."""
    lines = [["long prompts", "engines", *_SHOWN.values()]]
    rows = medians(runs, ("load", "layout"), FIGURES)
    loads = list(LOADS)
    rows.sort(key=lambda row: (loads.index(row["load"]), list(names).index(row["layout"])))
    lines += [
        [LOADS[row["load"]], names[row["layout"]], *(_cell(row, figure) for figure in _SHOWN)] for row in rows
    ]
    return markdown(lines)


LOADS = {
    "without": "none",
    "apart": "every 3.5 s, on the other core, not handed over",
    "light": "every 8 s",
    "heavy": "every 3.5 s",
}
"""By name, as they are shown."""


def _cell(row: dict[str, Any], figure: str) -> str:
    """The median, and the lowest and the highest run where there are several."""
    if figure == "long_ttft_p50" and not row[figure]:
        return "–"

    def written(value: float) -> str:
        match figure:
            case "slo":
                return f"{value:.0%}"
            case "tokens_per_s":
                return f"{value:.1f}"
            case "long_ttft_p50":
                return f"{value:.2f}"
            case _:
                return f"{value * 1000:,.0f}"

    middle, low, high = (written(row[name]) for name in (figure, f"{figure}_low", f"{figure}_high"))
    return middle if low == high else f"{middle} ({low}-{high})"


# --- goals ---

_AGAINST = (
    # figure, goal as pair over colocated, loads, in words
    ("itl_max", 1 / 3, ("light", "heavy"), "the longest stall at least 3 × shorter than with"),
    ("ttft_p99", 1 / 5, ("light", "heavy"), "short TTFT p99 at least 5 × shorter than with"),
    ("tokens_per_s", 1.2, ("heavy",), "tokens/s at least 1.2 × those of"),
    ("long_ttft_p50", 1.15, ("light", "heavy"), "long TTFT p50 at most 1.15 × that of"),
)
_INTERFERENCE = 1.3


def goals(runs: Sequence[Run], against: dict[str, str]) -> list[Goal]:
    """What the pair was to reach, alone and against each layout of `against` (layout → as it is shown)."""
    rows = {(row["load"], row["layout"]): row for row in medians(runs, ("load", "layout"), FIGURES)}
    found = []
    alone = rows.get(("without", PAIR))
    for load in ("light", "heavy"):
        if alone and (row := rows.get((load, PAIR))):
            times = row["itl_p99"] / alone["itl_p99"]
            what = f"short ITL p99 with long prompts {LOADS[load]} at most {_INTERFERENCE} × that without"
            found.append(Goal(what, f"{times:.2f} ×", times <= _INTERFERENCE))
    for layout, shown in against.items():
        for figure, limit, loads, words in _AGAINST:
            for load in loads:
                ours, theirs = rows.get((load, PAIR)), rows.get((load, layout))
                if ours and theirs:
                    what = f"{words} {shown}, long prompts {LOADS[load]}"
                    found.append(_goal(what, figure, ours[figure] / theirs[figure], limit))
    return found


def _goal(what: str, figure: str, ratio: float, limit: float) -> Goal:
    """`ratio`: ours over theirs. Where a goal is to be so many times shorter, that is what is shown."""
    shown = f"{1 / ratio:.2f} × shorter" if limit < 1 else f"{ratio:.2f} ×"
    return Goal(what, shown, ratio >= limit if figure in HIGHER_IS_BETTER else ratio <= limit)


def where_colocated_wins(runs: Sequence[Run], names: dict[str, str]) -> str:
    """A line for each figure in which the worst run of a layout beats the pair's best one."""
    rows = {(row["load"], row["layout"]): row for row in medians(runs, ("load", "layout"), FIGURES)}
    lines = []
    for load in ("without", "light", "heavy"):
        ours = rows.get((load, PAIR))
        for layout, shown in names.items():
            theirs = rows.get((load, layout))
            if layout == PAIR or ours is None or theirs is None:
                continue
            lines += [
                f"- {_IN_WORDS[figure]}, long prompts {LOADS[load]}: {_cell(theirs, figure)} with {shown}, "
                f"{_cell(ours, figure)} with {names[PAIR]}"
                for figure in FIGURES
                if _beats(theirs, ours, figure)
            ]
    return "\n".join(lines) or "Nowhere by more than the runs' spread."


def _beats(theirs: dict[str, Any], ours: dict[str, Any], figure: str) -> bool:
    if figure == "long_ttft_p50" and not theirs[figure]:
        return False
    if figure in HIGHER_IS_BETTER:
        return bool(theirs[f"{figure}_low"] > ours[f"{figure}_high"])
    return bool(theirs[f"{figure}_high"] < ours[f"{figure}_low"])
