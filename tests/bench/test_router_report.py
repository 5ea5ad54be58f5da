"""The report of `make bench-router`: medians of runs, what is added to no router, tables, and goals."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from .scripts import scripts


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    with scripts("router", "report", "plot", "cost", "spy", "streams") as found:
        yield found


@pytest.fixture(scope="module")
def report(modules: dict[str, ModuleType]) -> ModuleType:
    return modules["report"]


def a_run(router: str, cpu_ms: float, run: int = 0, **more: Any) -> dict[str, Any]:
    figures = {"cpu_ms": cpu_ms, "per_s": 100.0, "busy": 0.5, "load_busy": 0.25, "errors": 0}
    return {"router": router, "run": run, "others": 0.02, **figures, **more}


def a_part(*runs: dict[str, Any], **more: Any) -> dict[str, Any]:
    load = {"interval": 0.02, "users": 300, "tokens": 64, "low": 1000, "high": 8000}
    return {**load, "machine": "2 cores (X)", "runs": list(runs), **more}


def verdicts(report: ModuleType, **parts: Any) -> dict[str, bool]:
    results = {name.replace("_", "-"): part for name, part in parts.items()}
    return {goal.what: goal.met for goal in report.goals(results)}


PACED = "paced: CPU of a request at most 0.75 times vllm-router's"
BURST = "burst: CPU of a request at most 0.45 times vllm-router's"


@pytest.mark.parametrize(("ours", "met"), [(1.5, True), (1.52, False)])
def test_cpu_is_compared_with_vllm_routers(report: ModuleType, ours: float, met: bool) -> None:
    part = a_part(a_run("Tandem", ours), a_run("vllm-router", 2.0), a_run("smg", 0.1))
    assert verdicts(report, paced=part) == {PACED: met}


def test_medians_are_compared(report: ModuleType) -> None:
    ours = [a_run("Tandem", cpu, n) for n, cpu in enumerate((0.1, 0.4, 5.0))]
    theirs = [a_run("vllm-router", cpu, n) for n, cpu in enumerate((0.5, 1.0, 9.0))]
    assert verdicts(report, burst=a_part(*ours, *theirs)) == {BURST: True}
    table = report.cost_table({"burst": a_part(*ours, *theirs)})
    assert "| Tandem | 0.400 (0.100-5.000) | 0.40 × | 100 | 0 |" in table


def test_a_cheap_answer_that_is_none_meets_no_goal(report: ModuleType) -> None:
    part = a_part(a_run("Tandem", 0.1, errors=1), a_run("vllm-router", 2.0))
    assert verdicts(report, paced=part) == {PACED: False}
    first = first_byte(("direct", 0, 0.5, 2.0), ("Tandem", 0, 0.6, 2.1), ("vllm-router", 0, 1.0, 3.0))
    first["runs"][1]["errors"] = 1
    assert set(verdicts(report, first_byte=first).values()) == {False}
    engines = a_part(*(a_run("Tandem", 1.0, engines=n, idle=0.0, errors=n // 256) for n in (2, 256)))
    assert set(verdicts(report, engines=engines).values()) == {False}


def test_without_the_peer_there_is_nothing_to_compare_with(report: ModuleType) -> None:
    part = a_part(a_run("Tandem", 0.1))
    assert verdicts(report, paced=part, burst=part) == {}
    assert "| Tandem | 0.100 | – |" in report.cost_table({"paced": part})


def first_byte(*routers: tuple[str, int, float, float]) -> dict[str, Any]:
    """(router, run, p50, p99) of each run."""
    return a_part(*(a_run(name, 1.0, run, first_p50=p50, first_p99=p99) for name, run, p50, p99 in routers))


def test_what_is_added_is_told_within_a_run(report: ModuleType) -> None:
    part = first_byte(
        *(("direct", 0, 0.5, 2.0), ("direct", 1, 10.0, 30.0)),
        *(("Tandem", 0, 1.5, 4.0), ("Tandem", 1, 11.5, 31.0)),
        *(("vllm-router", 0, 1.7, 5.0), ("vllm-router", 1, 11.9, 31.0)),
    )
    p50, p99 = (
        f"first byte: not more added at {quantile} than by vllm-router" for quantile in ("p50", "p99")
    )
    assert verdicts(report, first_byte=part) == {p50: True, p99: True}
    rows = report.first_byte_table(part).splitlines()
    assert rows[2].startswith(
        "| (none: a decoder is asked) | 5.25 (0.50-10.00) | 16.00 (2.00-30.00) | – | – |"
    )
    assert "| 1.25 (1.00-1.50) | 1.50 (1.00-2.00) |" in rows[3]
    slower = first_byte(("direct", 0, 0.5, 2.0), ("Tandem", 0, 0.9, 4.0), ("vllm-router", 0, 1.0, 3.9))
    assert verdicts(report, first_byte=slower) == {p50: True, p99: False}


def test_counting_is_compared_with_the_tokenizer(report: ModuleType) -> None:
    def run(counted: float, number: int) -> dict[str, Any]:
        figures = {"uncounted_ms": 1.0, "counted_ms": counted, "adds_ms": counted - 1.0, "tokenizer_ms": 2.0}
        return {"run": number, "others": 0.0, "ratio": (counted - 1.0) / 2.0, **figures}

    part = a_part(run(3.6, 0), run(3.4, 1), run(9.0, 2), low=16_000, high=32_000)
    what = "counting adds at most 1.3 times what the tokenizer takes"
    assert verdicts(report, counting=part) == {what: True}
    table = report.counting_table(part)
    assert "| prompts of 16 to 32 KB | Tandem |" in table
    assert "| what counting adds, times the tokenizer | 1.30 (1.20-4.00) |" in table


def crowd(streams: int, *, run: int = 0, router: str = "Tandem", **more: Any) -> dict[str, Any]:
    usual = {"streams": streams, "per_second": 1.0, "open": streams, "errors": 0, "first_error": ""}
    return {"router": router, "run": run, "others": 0.0, **usual, "router_mb": 90.0, "all_mb": 150.0, **more}


@pytest.mark.parametrize(
    ("one", "failed"),
    [
        ({}, None),
        ({"errors": 1}, "5,000 streams at once without an error"),
        ({"open": 4_999}, "5,000 streams at once without an error"),
        ({"all_mb": 251.0}, "meanwhile at most 250 MB of memory, helper processes included"),
    ],
)
def test_no_run_of_many_streams_may_fail(report: ModuleType, one: dict[str, Any], failed: str | None) -> None:
    usual = [crowd(5_000), crowd(1_000), crowd(5_000, router="smg", errors=99, all_mb=900.0)]
    part = a_part(*usual, crowd(5_000, run=1, **one), crowd(1_000, run=1))
    met = verdicts(report, many=part)
    assert [what for what, is_met in met.items() if not is_met] == ([failed] if failed else [])
    assert len(met) == 3
    assert "| 5,000 of 1 tokens/s | smg | 5,000 | 900 | 99 |" in report.many_table(part)


def test_engines_are_compared_within_a_run(report: ModuleType) -> None:
    runs = [
        a_run("Tandem", cpu, run, engines=engines, idle=0.01)
        for run, costs in enumerate([(1.0, 1.1), (4.0, 4.0), (1.0, 3.0)])
        for engines, cpu in zip((2, 256), costs, strict=True)
    ]
    part = a_part(*runs, a_run("vllm-router", 1.0, engines=2, idle=0.0))
    assert report.engine_ratios(part, "Tandem") == [1.1, 1.0, 3.0]
    what = "CPU of a request with 256 engines at most 1.2 times that with 2"
    assert verdicts(report, engines=part) == {what: True}


def test_delays_are_compared_within_a_run(report: ModuleType) -> None:
    def run(alone: float, prompts: float) -> dict[str, Any]:
        rest = {"p50": 0.1, "p99": 0.2, "max": 9.0}
        return {"others": 0.0, "alone": {**rest, "p999": alone}, "prompts": {**rest, "p999": prompts}}

    part = a_part(run(1.0, 1.4), run(10.0, 30.0), run(2.0, 2.2), prompt_tokens=100_000)
    assert report.delay_ratio(part) == pytest.approx(1.4)
    what = "chunk delay p99.9 at most 1.5 times that without, while long prompts arrive"
    assert verdicts(report, delay=part) == {what: True}
    assert "| alone | 0.10 (0.10-0.10) | 0.20 (0.20-0.20) | 2.00 (1.00-10.00) |" in report.delay_table(part)


def test_every_part_that_was_measured_has_its_table(report: ModuleType) -> None:
    part = a_part(a_run("Tandem", 1.0), a_run("vllm-router", 2.0, others=0.07, load_busy=0.6))
    assert report.tables({}) == {}
    assert report.tables({"burst": part}).keys() == {"about", "cost"}
    about = report.tables({"paced": part, "burst": part})["about"]
    assert about == (
        "2 cores (X); medians (lowest-highest run). Other processes used 7% of the CPU at most, engines and "
        "clients 60% of their core."
    )


def test_the_picture_has_a_bar_for_each_router_and_figure(modules: dict[str, ModuleType]) -> None:
    cost = a_part(*(a_run(name, 1.0) for name in ("Tandem", "vllm-router", "smg", "nginx")))
    first = first_byte(("direct", 0, 0.5, 2.0), ("Tandem", 0, 0.4, 4.0), ("vllm-router", 0, 1.0, 3.0))
    drawn = ET.fromstring(modules["plot"].svg({"paced": cost, "first-byte": first}))
    bars = drawn.findall(".//{*}rect[@class='bar']")
    assert len(bars) == 4 + 2 * 2
    assert all(float(bar.attrib["width"]) >= 0 for bar in bars)  # less than nothing is drawn as nothing
    texts = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert "CPU of a request, ms: paced" in texts
    assert "added to the first byte at p99, ms" in texts


def test_routers_take_turns_and_the_order_turns_round(modules: dict[str, ModuleType]) -> None:
    orders = modules["cost"].orders(("a", "b"), 3)
    assert orders == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]


def test_quantiles_are_of_answers_that_came(modules: dict[str, ModuleType]) -> None:
    cost, answer = modules["cost"], modules["streams"].Answer
    answers = [answer(sent=10.0, first=10.0 + ms / 1000) for ms in range(1, 101)]
    times = cost.first_bytes([*answers, answer(sent=10.0)])
    assert times == pytest.approx({"first_p50": 50.0, "first_p99": 99.0})
    assert cost.first_bytes([answer(sent=10.0)]) == {}


def test_a_profile_gives_c_code_to_the_python_function_that_called_it(modules: dict[str, ModuleType]) -> None:
    spy = modules["spy"]
    run = "Runner.run (asyncio/runners.py:86)"
    profile = spy.read(
        [
            f"{run};write (tandem/http/_responder.py:128);writev (libc.so.6) 6",
            f"{run};write (tandem/http/_responder.py:128);gc_collect_main (libpython3.11.so.1.0) 2",
            f"{run};pair (tandem/router/strategies/load.py:7) 1",
            f"{run};serve (tandem/router/flow.py:76);emit (logging/__init__.py:1098);write (libc.so.6) 3",
            f"{run};__uv_read (uvloop/loop.so) 4",
            "start_thread (libc.so.6) 4",
            "",
        ]
    )
    assert profile.looks == 20
    assert profile.python["write (tandem/http/_responder.py:128)"] == 8
    assert profile.python["(no Python)"] == 4
    assert profile.inner["writev (libc.so.6)"] == 6
    assert profile.groups == {
        "system calls": 6,
        "garbage collection": 2,
        "tandem/router": 1,
        "log": 3,
        "event loop, parser in C": 4,
        "Python's library and others": 4,
    }
    assert spy.top(profile.inner, 20, 1.5).splitlines()[0] == " 30.0%   450.0 µs  writev (libc.so.6)"


def test_a_profile_is_told_in_microseconds_of_a_request(report: ModuleType) -> None:
    loads = [
        {"load": "paced", "cpu_ms": 2.0, "shares": {"log": 0.1, "system calls": 0.9}},
        {"load": "burst", "cpu_ms": 0.5, "shares": {"log": 1.0}},
    ]
    results = {"profile": {"loads": loads}}
    assert report.tables(results).keys() == {"profile"}  # which says nothing of how quiet the machine was
    lines = report.profile_table(results["profile"]).splitlines()
    assert lines[0] == "| kind of work | paced, µs of a request | burst, µs of a request |"
    assert lines[2:] == ["| log | 200 (10%) | 500 (100%) |", "| system calls | 1,800 (90%) | 0 (0%) |"]
