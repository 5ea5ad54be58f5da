"""From what was measured to tables, and to a verdict on each goal."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import pages
from pages import Goal, markdown, spread

FIGURES = (
    "hit_rate",
    "ttft_p50",
    "ttft_p99",
    "imbalance",
    "work_imbalance",
    "errors",
    "cpu_ms",
    "idle_least",
)
OURS = ("tandem kvaware", "tandem prefixaware")
Results = dict[str, Any]
"""By part: "virtual", "realtime", "delay", "scale", "index"; each may be missing."""


def medians(runs: Iterable[dict[str, Any]], by: Sequence[str]) -> list[dict[str, Any]]:
    return pages.medians(runs, by, FIGURES)


def _percent(row: dict[str, Any], name: str) -> str:
    return f"{spread(row, name, '.1f', 100)} %"


# --- tables ---


def virtual_table(result: dict[str, Any]) -> str:
    rows = medians(result["runs"], ("workload", "speed", "strategy"))
    lines = [["load", "strategy", "hit rate", "TTFT p50, s", "TTFT p99, s", "imbalance", "errors"]]
    lines.append(["trace", "(bound: one cache of the same size)", f"{result['bound']:.1%}", "", "", "", ""])
    for row in sorted(rows, key=lambda r: (r["workload"] != "trace", r["speed"])):
        load = f"trace, {row['speed']:g} ×" if row["workload"] == "trace" else "hot prefix"
        lines.append(
            [
                load,
                row["strategy"],
                _percent(row, "hit_rate"),
                spread(row, "ttft_p50", ".2f"),
                spread(row, "ttft_p99", ".1f"),
                spread(row, "imbalance", ".2f"),
                f"{row['errors_high']:.0f}",
            ]
        )
    return markdown(lines)


def realtime_about(result: dict[str, Any]) -> str:
    runs = result["runs"]
    idle, late = min(run["idle_mean"] for run in runs), max(run["late"] for run in runs)
    return (
        f"The first {result['requests']:,} requests of the trace, {result['block_tokens']} tokens a block, "
        f"and answers of at most {result['most_output']} tokens, on {result['engines']} engines that are "
        f"{result['time_scale']:g} times as fast and hold {result['blocks']:,} blocks. Medians of "
        f"{max(run['run'] for run in runs) + 1} runs (lowest-highest); without a spread there was one. "
        f"{result['machine']}; no run left less than {idle:.0%} of the CPU idle on average, other processes "
        f"used {max(run['others'] for run in runs):.0%} of it at most, no request was sent later than "
        f"{late * 1000:.0f} ms."
    )


def realtime_table(result: dict[str, Any]) -> str:
    knows = {r["name"]: r["how"] for r in result["routers"]}
    head = ["speed", "router", "knows", "hit rate", "TTFT p50, ms", "TTFT p99, ms", "imbalance"]
    lines = [[*head, "errors", "CPU of a request, ms"]]
    for speed in dict.fromkeys(run["speed"] for run in result["runs"]):
        lines.append([f"{speed:g} ×", "(bound)", "", f"{result['bound']:.1%}", "", "", "", "", ""])
        rows = medians((r for r in result["runs"] if r["speed"] == speed), ("router",))
        rows.sort(key=lambda row: list(knows).index(row["router"]))
        lines += [[f"{speed:g} ×", row["router"], knows[row["router"]], *_cells(row)] for row in rows]
    return markdown(lines)


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        _percent(row, "hit_rate"),
        spread(row, "ttft_p50", ".0f", 1000),
        spread(row, "ttft_p99", ".0f", 1000),
        spread(row, "imbalance", ".2f"),
        f"{row['errors_high']:.0f}",
        spread(row, "cpu_ms", ".1f"),
    ]


def cost_table(results: Results) -> str:
    lines = [["cost", "Tandem", "Dynamo's RadixTree (Rust)"]]
    if index := results.get("index"):
        ours, theirs = index["ours"], index["peer"] or {}

        def line(what: str, name: str, scale: float, unit: str) -> None:
            there = f"{theirs[name] * scale:,.1f} {unit}" if name in theirs else "–"
            lines.append([what, f"{ours[name] * scale:,.1f} {unit}", there])

        line("look-up of a 64-block match, 8 engines", "lookup_us", 1, "µs")
        line("hash chain of 32,000 tokens", "chain_us", 1e-3, "ms")
        line("event intake, blocks of 16 tokens a second", "intake_blocks_per_s", 1e-3, "thousand")
        for engines, memory in index["memory"].items():
            lines.append([f"index of 2 million blocks, {engines} engines", f"{memory['mb']:,.0f} MB", "–"])
    if scale := results.get("scale"):
        for row in scale["rows"]:
            what = f"CPU of a request, {scale['few']} → {scale['many']} engines, {row['strategy']}"
            cost = f"{row['few_ms']:.2f} → {row['many_ms']:.2f} ms ({row['ratio']:.2f} ×)"
            lines.append([what, cost, "–"])
    if delay := results.get("delay"):
        alone = statistics.median(r["alone"]["p999"] for r in delay["runs"])
        for kind, what in _BESIDE.items():
            beside = statistics.median(r[kind]["p999"] for r in delay["runs"])
            cost = f"{alone:.2f} → {beside:.2f} ms ({delay_ratio(delay, kind):.2f} ×)"
            lines.append([f"chunk delay p99.9, alone → while {what}", cost, "–"])
    return markdown(lines)


_BESIDE = {
    "events": "50,000 blocks a second arrive in events",
    "prompts": "a 100,000-token prompt arrives each second",
}


def delay_ratio(delay: dict[str, Any], kind: str) -> float:
    """The median over the runs of p99.9 beside something over p99.9 alone, each within one run."""
    ratio: float = statistics.median(r[kind]["p999"] / r["alone"]["p999"] for r in delay["runs"])
    return ratio


# --- goals ---


def goals(results: Results) -> list[Goal]:
    """Of what was measured."""
    found: list[Goal] = []
    if virtual := results.get("virtual"):
        found += _virtual_goals(virtual)
    if realtime := results.get("realtime"):
        for speed in dict.fromkeys(run["speed"] for run in realtime["runs"]):
            rows = medians((r for r in realtime["runs"] if r["speed"] == speed), ("router",))
            found += _peer_goals(speed, {row["router"]: row for row in rows})
    if index := results.get("index"):
        found += _index_goals(index)
    for row in results.get("scale", {}).get("rows", ()):
        what = f"CPU of a request with 256 engines at most 1.2 times that with 2, {row['strategy']}"
        found.append(Goal(what, f"{row['ratio']:.2f}", row["ratio"] <= 1.2))
    if delay := results.get("delay"):
        for kind, what in _BESIDE.items():
            ratio = delay_ratio(delay, kind)
            goal = f"chunk delay p99.9 at most 1.5 times that without, while {what}"
            found.append(Goal(goal, f"{ratio:.2f}", ratio <= 1.5))
    return found


def _virtual_goals(result: dict[str, Any]) -> list[Goal]:
    found = []
    for row in medians(result["runs"], ("workload", "speed", "strategy")):
        if row["workload"] == "hot":
            what = f"a hot prefix: imbalance at most 1.3, {row['strategy']}"
            found.append(Goal(what, f"{row['imbalance']:.2f}", row["imbalance"] <= 1.3))
        elif row["strategy"] == "kvaware":
            gap = (result["bound"] - row["hit_rate"]) * 100
            what = f"kvaware within 3 points of the bound's hit rate, {row['speed']:g} ×"
            found.append(Goal(what, f"{gap:.1f}", gap <= 3.0))
            if row["speed"] == max(run["speed"] for run in result["runs"]):
                what = f"kvaware's imbalance at most 1.15, {row['speed']:g} ×"
                found.append(Goal(what, f"{row['imbalance']:.2f}", row["imbalance"] <= 1.15))
    return found


def _peer_goals(speed: float, rows: dict[str, dict[str, Any]]) -> list[Goal]:
    """Ours against the best peer, figure by figure. Hit rates are compared as they are shown."""
    peers = [row for name, row in rows.items() if not name.startswith("tandem")]
    if not peers:
        return []
    found = []
    for ours in (rows[name] for name in OURS if name in rows):
        best = max(peers, key=lambda row: row["hit_rate"])
        mine, theirs = (round(row["hit_rate"] * 100, 1) for row in (ours, best))
        what = f"{ours['router']}, {speed:g} ×: hit rate not below the best peer's"
        found.append(Goal(what, f"{mine} % ({best['router']}: {theirs} %)", mine >= theirs))
        fast = min(peers, key=lambda row: row["ttft_p99"])
        spread = max(row["ttft_p99_high"] - row["ttft_p99_low"] for row in (ours, fast))
        what = (
            f"{ours['router']}, {speed:g} ×: TTFT p99 not above the best peer's by more than the runs' spread"
        )
        told = f"{ours['ttft_p99'] * 1e3:.0f} ms ({fast['router']}: {fast['ttft_p99'] * 1e3:.0f} ms, spread "
        behind = ours["ttft_p99"] - fast["ttft_p99"]
        found.append(Goal(what, f"{told}{spread * 1e3:.0f} ms)", behind <= spread))
    return found


def _index_goals(index: dict[str, Any]) -> list[Goal]:
    found = []
    for engines, memory in index["memory"].items():
        what = f"an index of 2 million blocks in at most 450 MB, {engines} engines"
        found.append(Goal(what, f"{memory['mb']:,.0f} MB", memory["mb"] <= 450))
    if theirs := index["peer"]:
        ours = index["ours"]
        for what, name, limit in (
            ("look-up not slower than Dynamo's RadixTree", "lookup_us", 1.0),
            ("hash chain at most twice Dynamo's", "chain_us", 2.0),
        ):
            ratio = ours[name] / theirs[name]
            found.append(Goal(what, f"{ratio:.2f} ×", ratio <= limit))
    return found
