"""What a person is shown while an endpoint starts."""

from __future__ import annotations

import errno
import io

import pytest
from rich.console import Console

from tandem.cli import console


@pytest.mark.parametrize("terminal", [True, False])
def test_what_an_engine_has_said_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    """Brackets are no markup there."""
    shown = io.StringIO()
    monkeypatch.setattr(console, "err", Console(file=shown, force_terminal=terminal, width=100))
    with console.Progress() as progress:
        progress({"router": "sending canaries: HTTP 500 [/v1] [x]"})
    assert "sending canaries: HTTP 500 [/v1] [x]" in shown.getvalue()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPIPE])
def test_where_remarks_cannot_be_written_the_work_goes_on(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(number, "no")

    monkeypatch.setattr("sys.stderr", Broken())
    console.err.print("a note")
