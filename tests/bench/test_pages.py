"""What the reports of benchmarks/ share: medians of runs, tables on a page, axes of pictures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from .scripts import script


@pytest.fixture(scope="module")
def pages() -> Iterator[ModuleType]:
    with script("common/pages.py", "common_pages") as module:
        yield module


@pytest.fixture(scope="module")
def svg() -> Iterator[ModuleType]:
    with script("common/svg.py", "common_svg") as module:
        yield module


def test_a_row_has_the_median_and_the_spread_of_its_runs(pages: ModuleType) -> None:
    a, b = [{"router": "a", "ms": ms, "note": "-"} for ms in (0.2, 0.1, 0.12)], {"router": "b", "ms": 1.0}
    first, second = pages.medians([*a, b], ("router",), ("ms",))
    assert first == {"router": "a", "ms": 0.12, "ms_low": 0.1, "ms_high": 0.2, "runs": 3}
    assert (second["router"], second["ms"], second["runs"]) == ("b", 1.0, 1)
    assert pages.spread(first, "ms", ".0f", 1000) == "120 (100-200)"
    assert pages.spread(second, "ms", ".1f") == "1.0"  # of one run there is no spread to show


def test_a_table_replaces_what_stands_between_its_markers(pages: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- x -->\nold\n<!-- /x -->\nb\n<!-- y -->\nkept\n<!-- /y -->\n")
    pages.insert(page, "x", "new")
    assert page.read_text() == "a\n<!-- x -->\nnew\n<!-- /x -->\nb\n<!-- y -->\nkept\n<!-- /y -->\n"


def test_a_page_without_the_markers_is_left_alone(pages: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- x -->\nno end\n")
    with pytest.raises(ValueError, match="has no <!-- x --> … <!-- /x -->"):
        pages.insert(page, "x", "new")
    assert page.read_text() == "<!-- x -->\nno end\n"


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (0.95, [0, 0.2, 0.4, 0.6, 0.8]),
        (28.0, [0, 5, 10, 15, 20, 25]),
        (1700.0, [0, 200, 400, 600, 800, 1000, 1200, 1400, 1600]),
    ],
)
def test_an_axis_has_round_numbers(svg: ModuleType, most: float, expected: list[float]) -> None:
    assert svg.ticks(most) == expected
