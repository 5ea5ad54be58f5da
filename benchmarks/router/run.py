"""What the router costs beside its peers: CPU, first byte, memory, many engines; writes docs/performance.md.

    python benchmarks/router/run.py [--only PART …] [--runs N] [--again] [--profile]
                                                                                (or `make bench-router`)

Parts: "paced" and "burst" tell the CPU of a streamed request that is disaggregated, "counting" what counting
its prompt adds, "first-byte" what is added to the time until the first byte, "many" the memory that thousands
of streams take, "engines" what 256 engines cost, and "delay" what running streams notice of long prompts.
With --profile these are not measured: where Tandem's CPU time goes under the first two loads is printed, and
written in short.

Results go to results.json beside this file, a picture to docs/images, tables into docs/performance.md. An
hour and a half on two cores; while other processes use them it waits, and what they disturbed is measured
again.
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
sys.path += [str(HERE.parent / "common"), str(HERE.parent / "routing")]  # which measures delays

import cost
import counting
import delay
import machine
import many
import packages
import plot
import report
import routers
import spy
from pages import goals_table, insert
from quiet import Meter, undisturbed

DOCS = HERE.parents[1] / "docs"
PAGE, PICTURE = DOCS / "performance.md", DOCS / "images" / "router.svg"
RESULTS = HERE / "results.json"
PARTS = ("paced", "burst", "counting", "first-byte", "many", "engines", "delay")
LOADS = {"paced": cost.PACED, "burst": cost.BURST, "first-byte": cost.FIRST_BYTE}
PROFILED = ("paced", "burst")
_PICTURE_SHOWS = "CPU of a request and what is added to its first byte, each router's median and its runs"


def say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  load {os.getloadavg()[0]:.1f}  {what}", file=sys.stderr, flush=True)


def measured(part: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One part, with what other processes used of the CPU meanwhile."""
    runs, seconds = arguments.runs, arguments.seconds
    quietly = functools.partial(undisturbed, attempts=arguments.attempts, say=say)
    with_all: dict[str, Any] = {"seconds": seconds, "quietly": quietly, "say": say}
    rivals = [name for name in routers.known() if name != routers.DIRECT]

    def under(load: str) -> dict[str, Any]:
        names = routers.known() if load == "first-byte" else rivals
        return cost.run(LOADS[load], runs, names, **with_all)

    parts: dict[str, Callable[[], dict[str, Any]]] = {
        **{load: functools.partial(under, load) for load in LOADS},
        "counting": lambda: counting.run(runs, **with_all),
        "many": lambda: many.run(runs, quietly=quietly, say=say),
        "engines": lambda: cost.run_engines(runs, **with_all),
        "delay": lambda: delay.run(runs, ("alone", "prompts"), quietly=quietly, say=say),
    }
    say(f"{part}: begins")
    meter, begun = Meter(), time.monotonic()
    result = parts[part]()
    about = {"machine": machine.name(), "seconds_taken": time.monotonic() - begun}
    say(f"{part}: took {about['seconds_taken']:.0f} s, others used {meter.others():.0%} of the CPU")
    # JSON has no keys but text: a result just measured is the same as one from the file.
    same: dict[str, Any] = json.loads(json.dumps({**result, **about}))
    return same


def profiled(seconds: float | None) -> dict[str, Any]:
    loads = []
    for name in PROFILED:
        kept, text = spy.run(LOADS[name], seconds)
        loads.append(kept)
        print(text)
    return {"loads": loads}


def write(results: report.Results) -> None:
    """The file, the picture and the page."""
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    tables = shown(results)
    if plot.panels(results):
        PICTURE.parent.mkdir(exist_ok=True)
        PICTURE.write_text(plot.svg(results), "utf-8")
        tables["picture"] = f"![{_PICTURE_SHOWS}]({PICTURE.relative_to(PAGE.parent)})"
    for name, table in tables.items():
        insert(PAGE, f"router-{name}", table)


def shown(results: report.Results) -> dict[str, str]:
    """The tables of the page, by the names of their places."""
    goals = report.goals(results)
    return report.tables(results) | ({"goals": goals_table(goals)} if goals else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure")
    parser.add_argument("--runs", type=int, default=5, help="of each measurement (default: 5)")
    parser.add_argument(
        "--seconds", type=float, help="of loads whose length is free, for a quick look that is not kept"
    )
    parser.add_argument(
        "--attempts",
        type=int,
        default=2,
        help="at a measurement that other processes do not disturb (default: 2; 1: take it as it comes)",
    )
    parser.add_argument("--again", action="store_true", help="only write what is on file")
    parser.add_argument("--profile", action="store_true", help="tell where Tandem's CPU time goes instead")
    arguments = parser.parse_args()
    results: report.Results = json.loads(RESULTS.read_bytes()) if RESULTS.exists() else {}
    if not arguments.again:
        routers.cores()
        machine.open_files(many.FILES)
        packages.python()
        if arguments.seconds is not None:
            results = {}
    if arguments.profile:
        results["profile"] = profiled(arguments.seconds)
    elif not arguments.again:
        for name in arguments.only:
            results[name] = measured(name, arguments)
            if arguments.seconds is None:
                RESULTS.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    print("\n\n".join(shown(results).values()))
    if arguments.seconds is None:
        write(results)


if __name__ == "__main__":
    main()
