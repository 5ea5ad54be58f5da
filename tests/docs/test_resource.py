"""docs/resource.md: every field is told once, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tandem.api.validation import RULES

from .fields import EFFECTS, HYPERPOD, LOCAL, Row, page, rows, schemas


def rows_of(paths: set[str]) -> dict[str, list[str]]:
    """The rows of each path, where it has not exactly one."""
    told = {path: [row.field for row in rows() if row.covers(path)] for path in paths}
    return {path: found for path, found in told.items() if len(found) != 1}


def test_every_field_of_hyperpod_has_exactly_one_row() -> None:
    assert len(HYPERPOD) == 433
    assert rows_of(set(HYPERPOD)) == {}


def test_every_other_field_and_annotation_has_exactly_one_row() -> None:
    assert rows_of(set(schemas())) == {}


def test_no_row_names_an_unknown_field() -> None:
    assert [path for row in rows() for path in row.paths if path not in schemas()] == []


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.paths[0])
def test_a_row_says_what_its_kind_needs(row: Row) -> None:
    assert row.effect in EFFECTS
    assert row.local in LOCAL
    assert bool(row.rule) == (row.effect == "warned")
    assert bool(row.here) == (row.local == "acted on")
    assert row.rules <= set(RULES)


@pytest.mark.table
def test_the_page_shows_them(documented: Callable[[str, str, str], None]) -> None:
    documented("resource.md", "fields", page())
