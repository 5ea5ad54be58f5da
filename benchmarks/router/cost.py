"""CPU of a request, and what is added to the time until its first byte: every router under the same load.

The order of the routers is turned round from run to run; each run has fresh engines and a fresh router.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import routers
import uvloop
from machine import Quietly
from measure import Load, under_load
from streams import Answer

PACED = Load("paced", interval=0.02, users=300)
BURST = Load("burst", users=32)
FIRST_BYTE = Load("first-byte", interval=0.02, rate=100.0, seconds=25.0)
MANY_ENGINES = Load("engines", rate=200.0, warm_up=8.0)
PAIRS = 1, 128
"""Of engines: 2 and 256 of them."""
REST_SECONDS = 3.0


def orders(names: Sequence[str], runs: int) -> list[tuple[int, str]]:
    """(number of the run, router), in the order in which they are measured."""
    return [(run, name) for run in range(runs) for name in names[:: -1 if run % 2 else 1]]


def quantile(values: Sequence[float], part: float) -> float:
    """The nearest rank."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


def first_bytes(answers: Sequence[Answer]) -> dict[str, float]:
    """Milliseconds from sending a request to the first byte of its answer."""
    times = [(answer.first - answer.sent) * 1000 for answer in answers if answer.first]
    if not times:
        return {}
    return {"first_p50": quantile(times, 0.5), "first_p99": quantile(times, 0.99)}


def run(
    load: Load,
    runs: int,
    names: Sequence[str],
    *,
    seconds: float | None,
    quietly: Quietly,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Every router under a load, `runs` times."""
    load = replace(load, seconds=seconds or load.seconds)
    found = []
    for number, name in orders(names, runs):
        one = functools.partial(under_load, name, load, number)
        (figures, answers), others = uvloop.run(quietly(one))
        found.append({"router": name, "run": number, "others": others, **figures, **first_bytes(answers)})
        say(f"{load.name}, {summary(found[-1])}")
    return {**described(load), "runs": found}


def run_engines(
    runs: int, *, seconds: float | None, quietly: Quietly, say: Callable[[str], None]
) -> dict[str, Any]:
    """Tandem and vllm-router with 2 engines and with 256."""
    load = replace(MANY_ENGINES, seconds=seconds or MANY_ENGINES.seconds)
    found = []
    for number, name in orders((routers.TANDEM, routers.VLLM_ROUTER), runs):
        for pairs in PAIRS[:: -1 if number % 2 else 1]:
            more = ("--ramp-up", "0") if name == routers.TANDEM else ()
            one = functools.partial(under_load, name, load, number, more=more, pairs=pairs, rest=REST_SECONDS)
            (figures, _), others = uvloop.run(quietly(one))
            found.append({"router": name, "engines": 2 * pairs, "run": number, "others": others, **figures})
            say(f"{2 * pairs} engines, {summary(found[-1])}")
    return {**described(load), "runs": found}


def described(load: Load) -> dict[str, Any]:
    fields = ("interval", "users", "rate", "low", "high", "tokens", "seconds")
    return {name: getattr(load, name) for name in fields}


def summary(found: dict[str, Any]) -> str:
    first = ""
    if "first_p50" in found:
        first = f", first byte {found['first_p50']:.2f} / {found['first_p99']:.2f} ms"
    errors = f", {found['errors']} ERRORS: {found['first_error']}" if found["errors"] else ""
    return (
        f"run {found['run'] + 1}, {found['router']}: {found['cpu_ms']:.3f} ms of CPU a request, "
        f"{found['per_s']:.0f} requests/s, router's core {found['busy']:.0%} busy, engines and clients "
        f"{found['load_busy']:.0%}{first}{errors}"
    )
