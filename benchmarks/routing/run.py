"""What the strategies are worth and what they cost, beside the peers; writes docs/routing.md.

    python benchmarks/routing/run.py [--only PART …] [--runs N] [--again]        (or `make bench-routing`)

Parts: "virtual" replays the Mooncake trace in virtual time, every strategy; "realtime" puts it on Tandem
and on the Rust routers from PyPI; "delay" and "scale" tell what running streams notice and what many
engines cost; "index" compares the index of KV events with Dynamo's. Results go to results.json beside
this file, a picture to docs/images, tables into docs/routing.md. An hour on two cores; while other
processes use them it waits, and what they disturbed is measured again.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "common"))

import delay
import index
import machine
import packages
import plot
import realtime
import report
import scale
import virtual
from pages import goals_table, insert
from quiet import Meter, undisturbed

DOCS = HERE.parents[1] / "docs"
PAGE, PICTURE = DOCS / "routing.md", DOCS / "images" / "routing.svg"
RESULTS = HERE / "results.json"
PARTS = ("virtual", "realtime", "delay", "scale", "index")


def say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  load {os.getloadavg()[0]:.1f}  {what}", file=sys.stderr, flush=True)


def measured(part: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One part, with what other processes used of the CPU meanwhile."""
    quietly = functools.partial(undisturbed, attempts=arguments.attempts, say=say)
    runs, requests = arguments.runs, arguments.requests
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "virtual": lambda: virtual.measure_all(runs, os.cpu_count() or 1, requests),
        "realtime": lambda: realtime.run(runs, requests or realtime.REQUESTS, quietly=quietly, say=say),
        "delay": lambda: delay.run(runs, quietly=quietly, say=say),
        "scale": lambda: scale.run(runs, quietly=quietly, say=say),
        "index": lambda: index.measure(str(packages.python())),
    }
    say(f"{part}: begins")
    meter, begun = Meter(), time.monotonic()
    result = parts[part]()
    about = {"machine": machine.name(), "others": meter.others(), "seconds": time.monotonic() - begun}
    say(f"{part}: took {about['seconds']:.0f} s, others used {about['others']:.0%} of the CPU")
    # JSON has no keys but text: a result just measured is the same as one from the file.
    same: dict[str, Any] = json.loads(json.dumps({**result, **about}))
    return same


def write(results: report.Results) -> None:
    """The file, the picture and the page."""
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    tables: dict[str, str] = {}
    if "virtual" in results:
        tables["virtual"] = report.virtual_table(results["virtual"])
    if "realtime" in results:
        about = report.realtime_about(results["realtime"])
        tables["realtime"] = f"{about}\n\n{report.realtime_table(results['realtime'])}"
        PICTURE.parent.mkdir(exist_ok=True)
        PICTURE.write_text(plot.svg(results["realtime"]), "utf-8")
    if results.keys() & {"index", "scale", "delay"}:
        tables["cost"] = report.cost_table(results)
    tables["goals"] = goals_table(report.goals(results))
    print("\n\n".join(tables.values()))
    for name, table in tables.items():
        insert(PAGE, f"routing-{name}", table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure")
    parser.add_argument("--runs", type=int, default=3, help="of each measurement (default: 3)")
    parser.add_argument("--requests", type=int, help="of the trace: only the first so many, for a quick look")
    parser.add_argument(
        "--attempts",
        type=int,
        default=2,
        help="at a measurement that other processes do not disturb (default: 2; 1: take it as it comes)",
    )
    parser.add_argument("--again", action="store_true", help="only write what is on file")
    arguments = parser.parse_args()
    results: report.Results = json.loads(RESULTS.read_bytes()) if RESULTS.exists() else {}
    if not arguments.again:
        for name in arguments.only:
            results[name] = measured(name, arguments)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    write(results)


if __name__ == "__main__":
    main()
