"""Gaps between tokens are told as Prometheus' own client would tell them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from tandem.router.gaps import BOUNDS, GapHistogram

SECONDS = st.one_of(st.sampled_from([0.0, *BOUNDS]), st.floats(0.0, 100.0))


def told(registry: CollectorRegistry) -> list[str]:
    """All but the comments, and but the times at which counting began."""
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if not line.startswith("#") and "_created" not in line]


@given(st.dictionaries(st.sampled_from(["disaggregated", "decode_only"]), st.lists(SECONDS)))
def test_as_the_library_counts(gaps: dict[str, list[float]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = GapHistogram()
    ours.register(histogram)
    library = Histogram("tandem_itl_seconds", "-", ["path"], buckets=BOUNDS, registry=theirs)
    for path, seconds in gaps.items():
        for gap in seconds:
            histogram.of(path).observe(gap)
            library.labels(path).observe(gap)
        histogram.of(path)
        library.labels(path)
    assert told(ours) == told(theirs)
