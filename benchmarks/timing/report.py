"""From timings to figures, from figures to the table in docs/simulator.md."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.bench.load import Timing

BEGIN, END = "<!-- timing-table -->", "<!-- /timing-table -->"
Figures = dict[str, float]
"""`LOAD KIND METRIC QUANTILE` → seconds, for example "A short TTFT p50"."""


def figures(load: str, timings: dict[str, list[Timing]]) -> Figures:
    """Of one run of a load: medians and 90th percentiles."""
    result = {}
    for kind, answers in sorted(timings.items()):
        ttft = [a.ttft for a in answers]
        gaps = [gap for a in answers for gap in a.gaps]
        for metric, values in (("TTFT", ttft), ("ITL", gaps)):
            for quantile in (50, 90):
                result[f"{load} {kind} {metric} p{quantile}"] = percentile(values, quantile)
    return result


def percentile(values: Sequence[float], percent: int) -> float:
    if len(values) < 2:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def compare(real: Sequence[Figures], simulated: Sequence[Figures]) -> list[dict[str, Any]]:
    """For each figure the runs' medians, the spread of the real ones, and the simulator's relative error."""
    rows = []
    for name in real[0]:
        values = [run[name] for run in real]
        measured = statistics.median(values)
        predicted = statistics.median(run[name] for run in simulated)
        load, kind, metric, quantile = name.split()
        rows.append(
            {
                "load": load,
                "requests": kind,
                "metric": metric,
                "quantile": quantile,
                "real": measured,
                "real_low": min(values),
                "real_high": max(values),
                "simulated": predicted,
                "error": predicted / measured - 1,
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]], loads: dict[str, str], about: str) -> str:
    """Markdown; times in milliseconds."""
    lines = [
        about,
        "",
        "| load | requests | | real pair, ms (lowest-highest run) | simulated, ms | error |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for r in rows:
        real = f"{_ms(r['real'])} ({_ms(r['real_low'])}-{_ms(r['real_high'])})"
        metric = f"{r['metric']} {r['quantile']}"
        error = f"{r['error']:+.0%}"
        lines.append(
            f"| {r['load']} | {r['requests']} | {metric} | {real} | {_ms(r['simulated'])} | {error} |"
        )
    lines += ["", *(f"- {name}: {what}." for name, what in loads.items())]
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    ms = seconds * 1000
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.1f}"


def insert(page: Path, text: str) -> None:
    """Replace what stands between the markers of a page."""
    before, begin, rest = page.read_text("utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{page} has no {BEGIN} … {END}")
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", "utf-8")
