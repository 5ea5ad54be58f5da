"""Tables of docs/ that tests own: what the pages show is what the tests see."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# What an example comes to is judged, not how long a busy machine takes for it.
settings.register_profile("tandem", deadline=None)
settings.load_profile("tandem")

DOCS = Path(__file__).resolve().parents[1] / "docs"

Documented = Callable[[str, str, str], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-docs", action="store_true", help="write the tables of docs/ that tests own")


@pytest.fixture
def documented(request: pytest.FixtureRequest) -> Documented:
    """`documented(page, name, table)`: the page of docs/ shows this Markdown between its marks
    `<!-- NAME: begin … -->` and `<!-- NAME: end -->`; with --write-docs it does so from now on.

    Tests that use it are marked `table`, so that `make tables` runs them.
    """
    assert request.node.get_closest_marker("table"), "`make tables` does not run this test"

    def check(page: str, name: str, table: str) -> None:
        path = DOCS / page
        text = path.read_text("utf-8")
        between = re.compile(rf"(<!-- {name}: begin[^\n]*-->\n)(.*?)(<!-- {name}: end -->)", re.DOTALL)
        found = between.search(text)
        assert found, f"docs/{page} has no marks for {name}"
        if request.config.getoption("--write-docs"):
            path.write_text(text[: found.start(2)] + table + text[found.end(2) :], "utf-8")
        else:
            assert found[2] == table, f"docs/{page} does not show what the tests see: run `make tables`"

    return check
