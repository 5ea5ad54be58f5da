"""From what was measured of routers to tables, and to a verdict on each goal."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from pages import Goal, markdown, medians, spread

OURS, PEER = "Tandem", "vllm-router"
DIRECT = "direct"
COUNT_LIMIT, ENGINES_LIMIT, DELAY_LIMIT = 1.3, 1.2, 1.5
CPU_LIMITS = {"paced": 0.75, "burst": 0.45}
"""Times the peer's CPU of a request."""
MEMORY_MB = 250.0
Results = dict[str, Any]
"""By part: "paced", "burst", "counting", "first-byte", "many", "engines", "delay", "profile"; each may be
missing."""
_FIGURES = (
    "cpu_ms",
    "per_s",
    "busy",
    "load_busy",
    "errors",
    "added_p50",
    "added_p99",
    "first_p50",
    "first_p99",
)
_COUNTING = ("uncounted_ms", "counted_ms", "adds_ms", "tokenizer_ms", "ratio")
_MANY = ("open", "errors", "all_mb")
_LOADS = {
    "paced": "paced: {users} streams at once, a token every {ms:g} ms",
    "burst": "burst: {users} streams at once, all tokens at once",
}


# --- figures ---


def cost_rows(part: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each router: medians of the runs."""
    return medians((run for run in part["runs"] if run["router"] != DIRECT), ("router",), _FIGURES)


def added(part: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs of routers, with what each adds to the first byte without a router in the same run."""
    alone = {run["run"]: run for run in part["runs"] if run["router"] == DIRECT}
    return [
        {**run, **{f"added_{q}": run[f"first_{q}"] - alone[run["run"]][f"first_{q}"] for q in ("p50", "p99")}}
        for run in part["runs"]
        if run["router"] != DIRECT and "first_p50" in run and run["run"] in alone
    ]


def first_byte_rows(part: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each router, and first of none: medians of the runs."""
    alone = medians((run for run in part["runs"] if run["router"] == DIRECT), ("router",), _FIGURES)
    return alone + medians(added(part), ("router",), _FIGURES)


def engine_ratios(part: dict[str, Any], router: str) -> list[float]:
    """Of each run: CPU of a request with the most engines, times that with the fewest."""
    costs = {(run["run"], run["engines"]): run["cpu_ms"] for run in part["runs"] if run["router"] == router}
    few, many = min(n for _, n in costs), max(n for _, n in costs)
    return [costs[run, many] / costs[run, few] for run in sorted({run for run, _ in costs})]


def delay_ratio(part: dict[str, Any]) -> float:
    """p99.9 of chunks' delays while long prompts arrive, times that without, each within one run."""
    return statistics.median(run["prompts"]["p999"] / run["alone"]["p999"] for run in part["runs"])


# --- tables ---


def about(results: Results) -> str:
    """What was measured on, and how quiet it was."""
    parts = [part for part in results.values() if "runs" in part]
    machines = dict.fromkeys(part["machine"] for part in parts)
    runs = [run for part in parts for run in part["runs"]]
    others = max(run["others"] for run in runs)
    busy = [run["load_busy"] for run in runs if "load_busy" in run]
    load = f", engines and clients {max(busy):.0%} of their core" if busy else ""
    return (
        f"{', '.join(machines)}; medians (lowest-highest run). Other processes used {others:.0%} of the CPU "
        f"at most{load}."
    )


def cost_table(results: Results) -> str:
    lines = [["load", "router", "CPU of a request, ms", f"of {PEER}'s", "requests/s", "errors"]]
    for name, words in _LOADS.items():
        if (part := results.get(name)) is None:
            continue
        rows = {row["router"]: row for row in cost_rows(part)}
        load = words.format(users=part["users"], ms=part["interval"] * 1000)
        for router, row in rows.items():
            share = f"{row['cpu_ms'] / rows[PEER]['cpu_ms']:.2f} ×" if PEER in rows else "–"
            cells = [spread(row, "cpu_ms", ".3f"), share, f"{row['per_s']:,.0f}", f"{row['errors_high']:.0f}"]
            lines.append([load, router, *cells])
    return markdown(lines)


def counting_table(part: dict[str, Any]) -> str:
    (row,) = medians(({**run, "all": ""} for run in part["runs"]), ("all",), _COUNTING)
    what = {
        "uncounted_ms": "CPU of a request that is not counted, ms",
        "counted_ms": "CPU of a request that is counted, ms",
        "adds_ms": "what counting adds, ms",
        "tokenizer_ms": "the tokenizer alone, ms",
        "ratio": "what counting adds, times the tokenizer",
    }
    lines = [[words, spread(row, name, ".2f" if name == "ratio" else ".3f")] for name, words in what.items()]
    size = f"prompts of {part['low'] / 1000:g} to {part['high'] / 1000:g} KB"
    return markdown([[size, "Tandem"], *lines])


def first_byte_table(part: dict[str, Any]) -> str:
    lines = [["router", "p50, ms", "p99, ms", "added at p50, ms", "added at p99, ms", "errors"]]
    for row in first_byte_rows(part):
        more = [spread(row, n, ".2f") if n in row else "–" for n in ("added_p50", "added_p99")]
        name = "(none: a decoder is asked)" if row["router"] == DIRECT else row["router"]
        times = [spread(row, n, ".2f") for n in ("first_p50", "first_p99")]
        lines.append([name, *times, *more, f"{row['errors_high']:.0f}"])
    return markdown(lines)


def many_table(part: dict[str, Any]) -> str:
    lines = [["streams", "router", "open at once", "memory, MB", "errors"]]
    rows = medians(part["runs"], ("streams", "per_second", "router"), _MANY)
    for row in sorted(rows, key=lambda row: -row["streams"]):
        load = f"{row['streams']:,} of {row['per_second']:g} tokens/s"
        cells = [f"{row['open_low']:,}", spread(row, "all_mb", ".0f"), f"{row['errors_high']:.0f}"]
        lines.append([load, row["router"], *cells])
    return markdown(lines)


def engines_table(part: dict[str, Any]) -> str:
    lines = [["router", "engines", "CPU of a request, ms", "CPU at rest, % of a core"]]
    for row in medians(part["runs"], ("router", "engines"), ("cpu_ms", "idle")):
        cells = [spread(row, "cpu_ms", ".3f"), spread(row, "idle", ".1f", 100)]
        lines.append([row["router"], str(row["engines"]), *cells])
    return markdown(lines)


def delay_table(part: dict[str, Any]) -> str:
    lines = [["delay of a chunk", "p50, ms", "p99, ms", "p99.9, ms", "longest, ms"]]
    kinds = {
        "alone": "alone",
        "prompts": f"while prompts of {part['prompt_tokens']:,} tokens arrive, one a second",
    }
    for kind, words in kinds.items():
        figures = ("p50", "p99", "p999", "max")
        (row,) = medians(({**run[kind], "kind": kind} for run in part["runs"]), ("kind",), figures)
        lines.append([words, *(spread(row, name, ".2f") for name in figures)])
    return markdown(lines)


def profile_table(part: dict[str, Any]) -> str:
    """Microseconds of a request, by kind of work and load."""
    loads = part["loads"]
    kinds = dict.fromkeys(kind for load in loads for kind in load["shares"])
    lines = [["kind of work", *(f"{load['load']}, µs of a request" for load in loads)]]
    for kind in sorted(kinds, key=lambda kind: -sum(load["shares"].get(kind, 0.0) for load in loads)):
        shares = [load["shares"].get(kind, 0.0) for load in loads]
        cells = [f"{s * load['cpu_ms'] * 1000:,.0f} ({s:.0%})" for s, load in zip(shares, loads, strict=True)]
        lines.append([kind, *cells])
    return markdown(lines)


def tables(results: Results) -> dict[str, str]:
    """By the names of their places on the page."""
    measured = any("runs" in part for part in results.values())
    found = {"about": about(results)} if measured else {}
    if results.keys() & _LOADS.keys():
        found["cost"] = cost_table(results)
    makers = {
        "counting": counting_table,
        "first-byte": first_byte_table,
        "many": many_table,
        "engines": engines_table,
        "delay": delay_table,
        "profile": profile_table,
    }
    return found | {name: make(results[name]) for name, make in makers.items() if name in results}


# --- goals ---


def goals(results: Results) -> list[Goal]:
    """Of what was measured."""
    found: list[Goal] = []
    for name, limit in CPU_LIMITS.items():
        if name in results:
            found += _cost_goals(name, limit, {row["router"]: row for row in cost_rows(results[name])})
    if counting := results.get("counting"):
        ratio = statistics.median(run["ratio"] for run in counting["runs"])
        what = f"counting adds at most {COUNT_LIMIT:g} times what the tokenizer takes"
        found.append(Goal(what, f"{ratio:.2f} ×", ratio <= COUNT_LIMIT))
    if first := results.get("first-byte"):
        found += _first_byte_goals({row["router"]: row for row in first_byte_rows(first)})
    if many := results.get("many"):
        found += _many_goals([run for run in many["runs"] if run["router"] == OURS])
    if engines := results.get("engines"):
        ratio = statistics.median(engine_ratios(engines, OURS))
        what = f"CPU of a request with 256 engines at most {ENGINES_LIMIT:g} times that with 2"
        errors = max(run["errors"] for run in engines["runs"] if run["router"] == OURS)
        found.append(_goal(what, f"{ratio:.2f} ×", ratio <= ENGINES_LIMIT, errors))
    if delay := results.get("delay"):
        ratio = delay_ratio(delay)
        what = f"chunk delay p99.9 at most {DELAY_LIMIT:g} times that without, while long prompts arrive"
        found.append(Goal(what, f"{ratio:.2f} ×", ratio <= DELAY_LIMIT))
    return found


def _goal(what: str, measured: str, met: bool, errors: int) -> Goal:
    """With errors it is not met: an answer that is none is cheap and soon there."""
    return Goal(what, measured + (f", {errors} errors" if errors else ""), met and not errors)


def _cost_goals(name: str, limit: float, rows: dict[str, dict[str, Any]]) -> Sequence[Goal]:
    if not {OURS, PEER} <= rows.keys():
        return []
    ratio = rows[OURS]["cpu_ms"] / rows[PEER]["cpu_ms"]
    what = f"{name}: CPU of a request at most {limit:g} times {PEER}'s"
    return [_goal(what, f"{ratio:.2f} ×", ratio <= limit, rows[OURS]["errors_high"])]


def _first_byte_goals(rows: dict[str, dict[str, Any]]) -> Sequence[Goal]:
    if not {OURS, PEER} <= rows.keys():
        return []
    found = []
    for name, words in (("added_p50", "p50"), ("added_p99", "p99")):
        ours, theirs = rows[OURS][name], rows[PEER][name]
        what = f"first byte: not more added at {words} than by {PEER}"
        told = f"{ours:.2f} ms ({PEER}: {theirs:.2f} ms)"
        found.append(_goal(what, told, ours <= theirs, rows[OURS]["errors_high"]))
    return found


def _many_goals(runs: Sequence[dict[str, Any]]) -> list[Goal]:
    found = []
    for streams in sorted({run["streams"] for run in runs}, reverse=True):
        some = [run for run in runs if run["streams"] == streams]
        errors, together = sum(run["errors"] for run in some), min(run["open"] for run in some)
        what = f"{streams:,} streams at once without an error"
        found.append(Goal(what, f"{errors} of {streams * len(some):,}", not errors and together == streams))
    memory = max(run["all_mb"] for run in runs)
    what = f"meanwhile at most {MEMORY_MB:g} MB of memory, helper processes included"
    return [*found, Goal(what, f"{memory:.0f} MB", memory <= MEMORY_MB)]
