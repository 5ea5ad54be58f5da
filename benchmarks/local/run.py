"""What disaggregation buys on one machine: the built-in endpoint against two engines that each do both.

Writes docs/performance.md.

    python benchmarks/local/run.py [--runs N] [--quick] [--again]        (or `make bench-local`)

First the settings of two colocated engines are swept once, under the heavier load; then the pair and the best
of them are measured in turn, `--runs` times. Results go to results.json beside this file, a picture to
docs/images, tables into docs/performance.md. Forty minutes on two cores; while other processes use them it
waits, and what they disturbed is measured again. So is, once, what a failed request or engine spoiled. Until
all is measured, results.so-far.json has what there is.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent / "common"), str(HERE.parent / "timing")]  # which has the loads

import layouts
import machine
import mixed
import plot
import tables
from layouts import BY_LOAD, IN_TURN, Place, Tuning
from mixed import APART, HEAVY, LIGHT, WITHOUT, Load
from pages import goals_table, insert
from quiet import undisturbed

from tandem.bench.load import LoadError
from tandem.local.errors import LocalError

DOCS = HERE.parents[1] / "docs"
PAGE, PICTURE = DOCS / "performance.md", DOCS / "images" / "performance.svg"
RESULTS, SO_FAR = HERE / "results.json", HERE / "results.so-far.json"
SECONDS = 40.0
QUICK_SECONDS = 8.0
BUDGETS = (Tuning(128), Tuning(256), Tuning(512), Tuning(2048))
HELD = (Tuning(128, 64), Tuning(256, 128))
STRATEGIES = {IN_TURN: "in turn", BY_LOAD: "by load"}
PAIR_SHOWN = "1 prefill + 1 decode"
_PICTURE_SHOWS = "Gaps between the tokens of short streams over time, long prompts every 3.5 s, first run"
WARM_UP = Load("warm-up", 3.5)
WARM_UP_SECONDS = 5.0


def say(what: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  load {os.getloadavg()[0]:.1f}  {what}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Colocated:
    """Two engines that are alike, and how the router chooses between them."""

    tuning: Tuning
    strategy: str

    @property
    def name(self) -> str:
        return f"{self.tuning.budget}/{self.tuning.held}/{self.strategy}"

    @property
    def shown(self) -> str:
        held = f", {self.tuning.held} of one prompt" if self.tuning.held else ""
        return f"2 colocated, {self.tuning.budget} tokens a step{held}, {STRATEGIES[self.strategy]}"

    @staticmethod
    def named(name: str) -> Colocated:
        budget, held, strategy = name.split("/")
        return Colocated(Tuning(int(budget), int(held)), strategy)


Case = tuple[str, str | None, Load]
"""A layout's name, the strategy of its router (None: its own), and a load."""


@dataclass
class Bench:
    """Measures, and keeps what was measured."""

    seconds: float
    attempts: int
    logs: Path
    found: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    async def part(
        self, start: Callable[[], AbstractAsyncContextManager[Place]], cases: Sequence[Case], run: int
    ) -> list[dict[str, Any]]:
        """Start a layout, and put one load after another on it. Where a request fails or the layout breaks
        down, start it anew and go on with that load; the second time failed requests are counted, and what
        cannot be measured is left out."""
        before, left = len(self.found), list(cases)
        for last in (False, True):
            try:
                async with start() as place:
                    await mixed.put(place, place.router, WARM_UP, WARM_UP_SECONDS)
                    while left:
                        self.found.append(await self._load(place, *left[0], run, may_fail=last))
                        SO_FAR.write_text(json.dumps(self.found, indent=1) + "\n", "utf-8")
                        del left[0]
                    break
            except (LoadError, LocalError) as error:
                say(f"run {run + 1}: {error}; {'it is left out' if last else 'once more'}")
        self.left_out += [f"{layout}, {load.name}, run {run + 1}" for layout, _, load in left]
        return self.found[before:]

    async def _load(
        self, place: Place, layout: str, strategy: str | None, load: Load, run: int, *, may_fail: bool
    ) -> dict[str, Any]:
        """Raises LoadError when a request failed, or, if it may, when all short ones did."""
        router = place.routers[strategy] if strategy else place.router
        one = functools.partial(mixed.put, place, router, load, self.seconds)
        seen, others = await undisturbed(one, attempts=self.attempts, say=say)
        if failed := [*seen.short_failed, *seen.long_failed]:
            told = f"{layout}, {load.name}: {len(failed)} requests failed: {failed[0]}"
            if not (may_fail and seen.short):
                raise LoadError(told)
            say(told)
        found = tables.figures(
            seen.short,
            seen.long,
            seen.begun,
            seen.seconds,
            short_failed=len(seen.short_failed),
            long_failed=len(seen.long_failed),
        )
        say(
            f"run {run + 1}, {layout}, {load.name}: ITL {_ms(found, 'itl_p50', 'itl_p99', 'itl_max')}, TTFT "
            f"{_ms(found, 'ttft_p50', 'ttft_p99')}, long {found['long_ttft_p50']:.2f} s, "
            f"{found['tokens_per_s']:.1f} tokens/s, {found['slo']:.0%} in the SLO"
        )
        course = tables.course(seen.short, seen.long, seen.begun, seen.seconds)
        return {"layout": layout, "load": load.name, "run": run, "others": others, **found, "course": course}

    async def pair(self, loads: Sequence[Load], run: int) -> list[dict[str, Any]]:
        cases: list[Case] = [(tables.PAIR, None, load) for load in loads]
        return await self.part(lambda: layouts.up(layouts.pair(self.logs)), cases, run)

    async def colocated(
        self, tuning: Tuning, strategies: Sequence[str], loads: Sequence[Load], run: int
    ) -> list[dict[str, Any]]:
        more = [strategy for strategy in strategies if strategy != IN_TURN]
        cases: list[Case] = [(Colocated(tuning, s).name, s, load) for s in strategies for load in loads]
        return await self.part(lambda: layouts.up(layouts.colocated(tuning, self.logs), more), cases, run)

    async def sweep(self, tunings: Sequence[Tuning]) -> list[dict[str, Any]]:
        """Every setting once, under the heavier load."""
        return [run for each in tunings for run in await self.colocated(each, list(STRATEGIES), [HEAVY], 0)]

    async def rounds(self, runs: int, best: Colocated, held: Colocated) -> list[dict[str, Any]]:
        """The pair and the best colocated settings, every second time the other way round."""
        found: list[dict[str, Any]] = []
        for run in range(runs):
            parts = [
                functools.partial(self.pair, (WITHOUT, APART, LIGHT, HEAVY), run),
                functools.partial(self.colocated, best.tuning, [best.strategy], (WITHOUT, LIGHT, HEAVY), run),
                functools.partial(self.colocated, held.tuning, [held.strategy], (LIGHT, HEAVY), run),
            ]
            for part in parts[:: -1 if run % 2 else 1]:
                found += await part()
        return found


def _ms(found: dict[str, float], *names: str) -> str:
    return " / ".join(f"{found[name] * 1000:.0f}" for name in names) + " ms"


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    begun = time.monotonic()
    seconds = QUICK_SECONDS if arguments.quick else SECONDS
    with tempfile.TemporaryDirectory() as logs:
        bench = Bench(seconds, arguments.attempts, Path(logs))
        sweep = await bench.sweep([BUDGETS[1], HELD[0]] if arguments.quick else [*BUDGETS, *HELD])
        plain = [run for run in sweep if not Colocated.named(run["layout"]).tuning.held]
        with_held = [run for run in sweep if run not in plain]
        if not (plain and with_held):
            raise SystemExit(f"there is nothing to compare with; left out: {'; '.join(bench.left_out)}")
        best, held = tables.best(plain), tables.best(with_held)
        say(f"best: {best}; with long prompts held: {held}")
        runs = await bench.rounds(arguments.runs, Colocated.named(best), Colocated.named(held))
    for run in sweep:
        del run["course"]
    return {
        "machine": machine.name(),
        "seconds": seconds,
        "took": time.monotonic() - begun,
        "best": best,
        "held": held,
        "left_out": bench.left_out,
        "sweep": sweep,
        "runs": [run if _drawn(run) else {k: v for k, v in run.items() if k != "course"} for run in runs],
    }


def _drawn(run: dict[str, Any]) -> bool:
    return bool(run["run"] == 0 and run["load"] == HEAVY.name)


def shown(results: dict[str, Any]) -> dict[str, str]:
    """The tables of the page, by the names of their places."""
    runs, names = results["runs"], layout_names(results)
    swept = {run["layout"]: Colocated.named(run["layout"]).shown for run in results["sweep"]}
    against = {name: names[name] for name in (results["best"], results["held"])}
    return {
        "about": about(results),
        "runs": tables.table(runs, names),
        "sweep": tables.table(results["sweep"], swept),
        "goals": goals_table(tables.goals(runs, against)),
        "colocated": tables.where_colocated_wins(runs, names),
    }


def layout_names(results: dict[str, Any]) -> dict[str, str]:
    """Of the layouts that were measured in turn: as they are shown."""
    best = {name: Colocated.named(name).shown for name in (results["best"], results["held"])}
    return {tables.PAIR: PAIR_SHOWN, **best}


def write(results: dict[str, Any]) -> None:
    """The file, the picture and the page."""
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    SO_FAR.unlink(missing_ok=True)
    courses = {run["layout"]: run["course"] for run in results["runs"] if _drawn(run)}
    panels = [(name, courses[layout]) for layout, name in layout_names(results).items() if layout in courses]
    PICTURE.write_text(plot.svg(panels, results["seconds"], tables.GAP_SLO), "utf-8")
    picture = f"![{_PICTURE_SHOWS}]({PICTURE.relative_to(PAGE.parent)})"
    for name, text in {**shown(results), "picture": picture}.items():
        insert(PAGE, f"performance-{name}", text)


def about(results: dict[str, Any]) -> str:
    every = [*results["runs"], *results["sweep"]]
    others = max(run["others"] for run in every)
    runs = 1 + max(run["run"] for run in results["runs"])
    failed = sum(run.get("short_failed", 0) + run.get("long_failed", 0) for run in every)
    sent = failed + sum(run["short_requests"] + run["long_requests"] for run in every)
    told = "; ".join(results.get("left_out", ()))
    left_out = f" Left out, as they broke down twice: {told}." if told else ""
    return (
        f"{results['machine']}, one core for each engine; loads of {results['seconds']:g} s, medians of "
        f"{runs} runs (lowest-highest). Other processes used {others:.0%} of the CPU at most. Of {sent:,} "
        f"requests {failed or 'none'} failed.{left_out}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0].replace("\n", " "))
    parser.add_argument("--runs", type=int, default=3, help="of each layout, in turn (default: 3)")
    parser.add_argument(
        "--quick", action="store_true", help="short loads and two settings, to try the script"
    )
    parser.add_argument(
        "--attempts",
        type=int,
        default=2,
        help="at a load that other processes do not disturb (default: 2; 1: take it as it comes)",
    )
    parser.add_argument("--again", action="store_true", help="only write what is on file")
    arguments = parser.parse_args()
    results = json.loads(RESULTS.read_bytes()) if arguments.again else asyncio.run(measure(arguments))
    print("\n\n".join(shown(results).values()))
    if not arguments.quick:
        write(results)


if __name__ == "__main__":
    main()
