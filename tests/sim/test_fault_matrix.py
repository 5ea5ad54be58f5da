"""Every fault in every phase: what the client gets, what is counted, and that nothing is left behind.

`matrix` says what must come of each cell, `troubles` what of each larger trouble; docs/faults.md shows what
does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from . import matrix_bench, matrix_page, troubles
from .matrix import CONNECTORS, SEVERAL, SLACK, Cell, Connector, Outcome, cells, expected
from .troubles import TROUBLES, Told, Trouble

Documented = Callable[[str, str, str], None]

GROUPS = [(connector, engines) for connector in CONNECTORS for engines in (1, SEVERAL)]
"""Cells that share a router."""
PLAYED = [
    (trouble, connector)
    for trouble in TROUBLES
    for connector in CONNECTORS
    if trouble.only in (None, connector)
]


@cache
def seen(connector: Connector, engines: int) -> dict[Cell, Outcome]:
    return matrix_bench.run(list(cells(connector, engines)))


@cache
def played(trouble: Trouble, connector: Connector) -> Told:
    return troubles.play(trouble, connector)


ROUNDING = 1e-6  # of virtual seconds that were added up


def _marks(group: tuple[Connector, int]) -> list[pytest.MarkDecorator]:
    """The group that takes longest by far is for `make test-all`."""
    return [pytest.mark.slow] if group == ("lmcache", SEVERAL) else []


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=_marks(group)) for group in GROUPS for cell in cells(*group)],
    ids=str,
)
def test_a_fault_comes_to_what_the_policy_says(cell: Cell) -> None:
    what, due = seen(cell.connector, cell.engines)[cell], expected(cell)
    assert what.answer == due.answer
    assert what.legs == due.legs
    assert what.failures == due.failures
    assert what.counted == due.counted
    assert due.waits - ROUNDING <= what.waits < due.waits + SLACK
    assert what.left == []


@pytest.mark.parametrize(
    "group",
    [pytest.param(group, marks=_marks(group)) for group in GROUPS],
    ids=lambda group: f"{group[0]}-{group[1]}",
)
def test_hardly_any_answer_is_wrong_without_being_seen_to_be(group: tuple[Connector, int]) -> None:
    """KV that was overwritten is for no router to see. Nothing else may look right and not be."""
    wrong = {cell.fault for cell, outcome in seen(*group).items() if outcome.answer == "wrong text"}
    assert wrong == {"the KV was overwritten"}


@pytest.mark.parametrize(("trouble", "connector"), PLAYED, ids=str)
def test_a_trouble_comes_to_what_the_policy_says(trouble: Trouble, connector: Connector) -> None:
    assert played(trouble, connector) == trouble.expected(connector)


@pytest.mark.slow
@pytest.mark.table
def test_the_page_shows_what_was_seen(documented: Documented) -> None:
    everything = {cell: outcome for group in GROUPS for cell, outcome in seen(*group).items()}
    for leg, phases in matrix_page.LEGS.items():
        for engines, many in ((SEVERAL, "several"), (1, "one")):
            table = matrix_page.leg_table(everything, "nixl", engines, phases)
            documented("faults.md", f"{leg} leg, {many}", table)
    for connector in CONNECTORS:
        documented("faults.md", f"hand-off, {connector}", matrix_page.handoff_table(everything, connector))
    documented("faults.md", "lmcache", matrix_page.differing_table(everything))
    documented("faults.md", "troubles", matrix_page.troubles_table({case: played(*case) for case in PLAYED}))
