"""`make bench-local` when something breaks: what is counted, measured again, left out, and kept.

The layout is a simulated engine, in virtual time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tandem.http import Origin
from tandem.local.errors import LocalError
from tandem.sim import virtual

from ..sim.helpers import MODEL, engines, flags
from .scripts import scripts


@pytest.fixture(scope="module")
def module() -> Iterator[ModuleType]:
    path = [*sys.path]
    with scripts("local", "run") as found:
        yield found["run"]
    sys.path[:] = path


@pytest.fixture
def run(module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(module, "SO_FAR", tmp_path / "so-far.json")
    return module


class Layout:
    """Starts a layout: an engine that has the next faults; an exception breaks the start."""

    def __init__(self, run: ModuleType, *faults: str | Exception) -> None:
        self._run = run
        self._faults = list(faults)
        self.starts = 0

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[Any]:
        self.starts += 1
        fault = self._faults.pop(0)
        if isinstance(fault, Exception):
            raise fault
        async with engines(flags()) as e:
            origin = Origin.parse(e.fleet.urls[0])
            await e[0].set_faults(fault)
            yield self._run.Place(MODEL, (origin,), {"roundrobin": origin})


def measured(
    run: ModuleType, tmp_path: Path, layout: Layout, loads: Sequence[Any]
) -> tuple[Any, list[dict[str, Any]]]:
    """A bench, and what it has found out about some loads on a layout."""
    bench = run.Bench(seconds=10.0, attempts=1, logs=tmp_path)
    return bench, virtual.run(bench.part(layout, [("pair", None, load) for load in loads], 0))


def test_failed_requests_are_noted_and_the_load_goes_on(run: ModuleType) -> None:
    async def put() -> Any:
        async with Layout(run, "status=503,times=3")() as place:
            return await run.mixed.put(place, place.router, run.HEAVY, 10.0)

    seen = virtual.run(put())
    assert len(seen.short_failed) + len(seen.long_failed) == 3
    assert all("answered HTTP 503" in why for why in seen.short_failed)
    assert len(seen.short) > 10
    assert len(seen.long) > 1


def test_a_load_in_which_a_request_fails_is_measured_again_on_a_new_start(
    run: ModuleType, tmp_path: Path
) -> None:
    layout = Layout(run, "status=503,rate=0.5", "")
    bench, found = measured(run, tmp_path, layout, [run.WITHOUT, run.HEAVY])
    assert layout.starts == 2
    assert [(each["load"], each["short_failed"], each["long_failed"]) for each in found] == [
        ("without", 0, 0),
        ("heavy", 0, 0),
    ]
    assert bench.left_out == []


def test_what_fails_again_is_counted_and_outside_the_slo(run: ModuleType, tmp_path: Path) -> None:
    layout = Layout(run, *["status=503,rate=0.5"] * 2)
    _, (found,) = measured(run, tmp_path, layout, [run.WITHOUT])
    assert layout.starts == 2
    failed, answered = found["short_failed"], found["short_requests"]
    assert failed > 0
    assert found["slo"] == pytest.approx(answered / (answered + failed))


def test_what_was_measured_before_a_breakdown_stays_and_is_not_measured_again(
    run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = run.Bench._load
    measures: list[str] = []

    async def dies_once(self: Any, *case: Any, **options: Any) -> Any:
        measures.append(case[3].name)
        if measures == ["without", "light"]:
            raise LocalError("decode-0 was killed by SIGKILL")
        return await load(self, *case, **options)

    monkeypatch.setattr(run.Bench, "_load", dies_once)
    layout = Layout(run, "", "")
    bench, found = measured(run, tmp_path, layout, [run.WITHOUT, run.LIGHT, run.HEAVY])
    assert measures == ["without", "light", "light", "heavy"]
    assert [each["load"] for each in found] == ["without", "light", "heavy"]
    assert (layout.starts, bench.left_out) == (2, [])
    assert json.loads(run.SO_FAR.read_text()) == found


def test_what_breaks_down_twice_is_left_out_and_the_rest_is_measured(run: ModuleType, tmp_path: Path) -> None:
    layout = Layout(run, LocalError("no memory"), "status=503")
    bench, found = measured(run, tmp_path, layout, [run.LIGHT, run.HEAVY])
    assert (layout.starts, found) == (2, [])
    assert bench.left_out == ["pair, light, run 1", "pair, heavy, run 1"]
    after = virtual.run(bench.part(Layout(run, ""), [("pair", None, run.HEAVY)], 1))
    assert [(each["load"], each["run"]) for each in after] == [("heavy", 1)]


def test_the_page_says_what_failed_and_what_is_left_out(run: ModuleType) -> None:
    one = {"others": 0.01, "run": 0, "short_requests": 90, "long_requests": 8}
    worse = {**one, "short_failed": 3, "long_failed": 1}
    results = {"machine": "A machine", "seconds": 40.0, "sweep": [one]}
    told = run.about({**results, "runs": [worse], "left_out": ["x", "y"]})
    assert told.endswith(" Of 200 requests 4 failed. Left out, as they broke down twice: x; y.")
    assert run.about({**results, "runs": [one], "left_out": []}).endswith(" Of 196 requests none failed.")
