"""The text of metrics that are read all the time: what prometheus_client writes, to the byte."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import prometheus_client
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.sim.exposition import Page

BUCKETS = (0.001, 0.5, 1, 2.5, 10, 1e6, 12345678)
LABELS = ({}, {"engine": "0"}, {"name": 'a "quoted"\n\\name', "engine": "é,="}, {"le_": "1", "zone": "{b}"})
FIXED_TIME = 1732900000.25

amounts = st.one_of(
    st.sampled_from([0.0, 0.5, 1, 2, 10, 16384, 999999, 1e6, 1234567, 2.5e9, 1e17]),
    st.floats(min_value=0, allow_infinity=False),
)


class Both:
    """A metric of each kind for each of several sets of labels, of either library."""

    def __init__(self, labels: dict[str, str]) -> None:
        self._registry = prometheus_client.CollectorRegistry()
        self._page = Page()
        self._labels = labels
        p: Any = prometheus_client
        self.changes: list[Callable[[float], None]] = [
            self._made(p.Gauge, self._page.gauge, "set"),
            self._made(p.Counter, self._page.counter, "inc"),
            self._made(p.Summary, self._page.summary, "observe"),
            self._made(p.Histogram, self._page.histogram, "observe", buckets=BUCKETS),
        ]

    def _made(self, theirs: Any, ours: Any, change: str, **more: Any) -> Callable[[float], None]:
        name, about = f"vllm:{theirs.__name__.lower()}_size_bytes", f"What a {theirs.__name__} tells."
        their_family = theirs(name, about, list(self._labels), registry=self._registry, **more)
        family = ours(name, about, *more.values())
        their_series = their_family.labels(**self._labels) if self._labels else their_family

        def both(amount: float) -> None:
            getattr(their_series, change)(amount)
            getattr(family.labels(**self._labels), change)(amount)

        both(0)
        return both

    def texts(self) -> tuple[str, str]:
        return self._page.text(), prometheus_client.generate_latest(self._registry).decode()


@pytest.fixture(autouse=True, scope="module")
def _at_one_time() -> Any:
    """Both tell when a metric was made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: FIXED_TIME)
        yield


@settings(deadline=None)
@given(
    labels=st.sampled_from(LABELS),
    changes=st.lists(st.tuples(st.integers(0, 3), amounts), max_size=8),
)
def test_the_text_is_prometheus_clients_after_every_change(
    labels: dict[str, str], changes: list[tuple[int, float]]
) -> None:
    both = Both(labels)
    for kind, amount in changes:
        ours, theirs = both.texts()
        assert ours == theirs
        both.changes[kind](amount)
    ours, theirs = both.texts()
    assert ours == theirs


def test_series_come_in_the_order_in_which_they_were_asked_for() -> None:
    page, registry = Page(), prometheus_client.CollectorRegistry()
    family = page.counter("requests", "Requests by status.")
    theirs = prometheus_client.Counter("requests", "Requests by status.", ["status"], registry=registry)
    assert page.text() == prometheus_client.generate_latest(registry).decode(), "none is told yet"
    for status in ("5xx", "2xx", "5xx"):
        family.labels(status=status).inc()
        theirs.labels(status=status).inc()
    assert page.text() == prometheus_client.generate_latest(registry).decode()
    assert 'requests_total{status="5xx"} 2.0\n' in page.text()
