"""docs/complaints.md: each complaint of the field is told apart, and the tests that it names exist."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from .complaints import COMPLAINTS, ELSEWHERE, table

TESTS = Path(__file__).resolve().parents[1]
LAST_OF_ROUTERS = 64


def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text("utf-8"))
    return {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("test", sorted({test for c in COMPLAINTS for test in c.tests}))
def test_what_a_complaint_names_is_a_test(test: str) -> None:
    path, _, name = test.partition("::")
    assert name.startswith("test_")
    assert name in functions(TESTS / path)


def test_every_complaint_has_a_test_or_a_reason_and_not_both() -> None:
    for complaint in COMPLAINTS:
        assert bool(complaint.tests) != bool(complaint.later), complaint


def test_none_is_left_out() -> None:
    told = [number for c in COMPLAINTS for number in c.numbers]
    assert not set(told) & set(ELSEWHERE)
    assert sorted({*told, *ELSEWHERE}) == list(range(1, LAST_OF_ROUTERS + 1))


@pytest.mark.table
def test_the_page_shows_them(documented: Callable[[str, str, str], None]) -> None:
    documented("complaints.md", "complaints", table() + "\n")
