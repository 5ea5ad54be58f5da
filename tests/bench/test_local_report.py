"""The report of `make bench-local`: figures of a load, which setting is compared with, tables and goals."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from tandem.bench.load import Timing

from .scripts import script

ALIKE = "256/0/roundrobin"
NAMES = {"pair": "1 prefill + 1 decode", ALIKE: "2 colocated"}


@pytest.fixture(scope="module")
def tables() -> Iterator[ModuleType]:
    # By this name tables.py imports the first.
    with script("routing/report.py", "report"), script("local/tables.py", "local_tables") as module:
        yield module


@pytest.fixture(scope="module")
def plot() -> Iterator[ModuleType]:
    with script("local/plot.py", "local_plot") as module:
        yield module


def answer(sent: float, ttft: float, *gaps: float) -> Timing:
    return Timing(30, sent, ttft, gaps)


def a_run(layout: str, load: str = "heavy", **figures: float) -> dict[str, Any]:
    """Of a layout that stalls for 0.2 s at most."""
    times = {"itl_p50": 0.04, "itl_p99": 0.06, "itl_p999": 0.1, "itl_max": 0.2, "ttft_p50": 0.2}
    usual = {**times, "ttft_p99": 0.3, "long_ttft_p50": 3.0, "tokens_per_s": 100.0, "slo": 1.0}
    return {"layout": layout, "load": load, **usual, **figures}


def verdicts(tables: ModuleType, *runs: dict[str, Any]) -> dict[str, bool]:
    return {goal.what: goal.met for goal in tables.goals(runs, {ALIKE: "2 colocated"})}


def test_figures_are_of_every_gap_of_every_short_answer(tables: ModuleType) -> None:
    short = [answer(10, 0.1, 0.03, 0.05), answer(10, 0.3, 0.04)]
    found = tables.figures(short, [answer(10, 3.0, 0.04)], begun=10, seconds=5)
    assert found["itl_p50"] == pytest.approx(0.04)
    assert found["itl_max"] == pytest.approx(0.05)
    assert found["ttft_p50"] == pytest.approx(0.2)
    assert found["long_ttft_p50"] == pytest.approx(3.0)
    assert (found["short_requests"], found["long_requests"]) == (2, 1)


def test_tokens_after_the_end_of_a_load_are_not_counted(tables: ModuleType) -> None:
    late = answer(10, 1.0, 3.5, 1.0)  # tokens after 1, 4.5 and 5.5 seconds
    assert tables.figures([late], [], begun=10, seconds=5)["tokens_per_s"] == pytest.approx(2 / 5)


@pytest.mark.parametrize(
    ("timing", "met"),
    [
        (answer(0, 1.0, 0.25), True),
        (answer(0, 0.9), True),
        (answer(0, 1.01, 0.1), False),
        (answer(0, 0.1, 0.05, 0.26, 0.05), False),
    ],
)
def test_one_gap_or_a_late_first_token_misses_the_slo(tables: ModuleType, timing: Timing, met: bool) -> None:
    assert tables.meets_slo(timing) is met


@pytest.mark.parametrize(("part", "expected"), [(0.5, 3.0), (0.99, 4.96), (1.0, 5.0), (0.0, 1.0)])
def test_quantiles_lie_between_values(tables: ModuleType, part: float, expected: float) -> None:
    assert tables.quantile([5.0, 1.0, 3.0, 2.0, 4.0], part) == pytest.approx(expected)


def test_the_setting_to_compare_with_meets_the_slo_most_often(tables: ModuleType) -> None:
    slow = a_run("128/0/roundrobin", slo=0.801, tokens_per_s=70)
    fast = a_run("256/0/roundrobin", slo=0.799, tokens_per_s=75)
    fastest = a_run("2048/0/roundrobin", slo=0.6, tokens_per_s=99)
    assert tables.best([slow, fast, fastest]) == "256/0/roundrobin"


def test_a_goal_against_colocated_engines_is_of_medians(tables: ModuleType) -> None:
    ours = [a_run("pair", itl_max=longest, tokens_per_s=110) for longest in (0.1, 0.2, 5.0)]
    theirs = a_run(ALIKE, itl_max=0.7, ttft_p99=3.0, tokens_per_s=95, long_ttft_p50=2.9)
    met = verdicts(tables, *ours, theirs)
    every = "2 colocated, long prompts every 3.5 s"
    assert met == {
        f"the longest stall at least 3 × shorter than with {every}": True,
        f"short TTFT p99 at least 5 × shorter than with {every}": True,
        f"tokens/s at least 1.2 × those of {every}": False,
        f"long TTFT p50 at most 1.15 × that of {every}": True,
    }


@pytest.mark.parametrize(("with_long", "met"), [(0.065, True), (0.066, False)])
def test_long_prompts_may_slow_short_streams_by_three_tenths(
    tables: ModuleType, with_long: float, met: bool
) -> None:
    runs = a_run("pair", "without", itl_p99=0.05), a_run("pair", "light", itl_p99=with_long)
    assert list(verdicts(tables, *runs).values()) == [met]


def test_a_table_has_the_loads_in_their_order_and_the_spread_of_runs(tables: ModuleType) -> None:
    runs = [a_run("pair", itl_max=longest) for longest in (0.2, 0.3, 0.25)]
    runs += [a_run(ALIKE), a_run("pair", "without", long_ttft_p50=0.0, slo=0.5)]
    lines = tables.table(runs, NAMES).splitlines()
    assert lines[2].startswith("| none | 1 prefill + 1 decode | 40 | 60 | 100 | 200 |")
    assert lines[2].endswith("| – | 100.0 | 50% |")
    assert lines[3].startswith("| every 3.5 s | 1 prefill + 1 decode | 40 | 60 | 100 | 250 (200-300) |")
    assert lines[4].startswith("| every 3.5 s | 2 colocated | 40 |")


def test_where_colocated_engines_win_is_told(tables: ModuleType) -> None:
    ours = [a_run("pair", ttft_p50=ttft, itl_p50=0.04) for ttft in (0.2, 0.25)]
    theirs = [a_run(ALIKE, ttft_p50=ttft, itl_p50=0.039) for ttft in (0.1, 0.12)]
    theirs[1]["itl_p50"] = 0.041  # not in every run
    told = tables.where_colocated_wins([*ours, *theirs], NAMES).splitlines()
    assert told == [
        "- short TTFT p50, long prompts every 3.5 s: 110 (100-120) with 2 colocated, "
        "225 (200-250) with 1 prefill + 1 decode"
    ]
    assert tables.where_colocated_wins(ours, NAMES) == "Nowhere by more than the runs' spread."


def test_the_course_of_a_load_has_the_longest_gap_of_each_quarter_of_a_second(tables: ModuleType) -> None:
    course = tables.course([answer(100, 0.1, 0.04, 0.06, 0.3, 9.0)], [answer(101, 3.0)], 100, 5)
    assert course == {"points": [[0.125, 0.05, 0.06], [0.625, 0.3, 0.3]], "long": [1]}


def test_the_picture_has_a_panel_for_each_layout(plot: ModuleType) -> None:
    course = {"points": [[0.125, 0.05, 0.06], [0.625, 0.3, 30.0]], "long": [1.0]}
    drawn = ET.fromstring(plot.svg([("a pair", course), ("2 < 3", course)], seconds=5, limit=0.25))
    bars = [r for r in drawn.iter("{http://www.w3.org/2000/svg}rect") if r.get("class") == "gap"]
    assert len(bars) == 4
    assert all(float(bar.get("height", "0")) > 0 for bar in bars)
    assert len(drawn.findall(".//{*}polygon")) == 2
    texts = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a pair", "2 < 3", "1,000 ms"} <= set(texts)
