"""The histogram of gaps within streams. It is observed for every token: with prometheus_client's own, whose
every count is behind a lock, that is a fifth of what the router itself does for a token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)


class Gaps:
    """Of the streams that took one path; in seconds."""

    __slots__ = ("_counts", "_sum")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        self._sum += seconds

    def add_to(self, family: HistogramMetricFamily, path: str) -> None:
        names = (*map(str, BOUNDS), "+Inf")
        family.add_metric((path,), list(zip(names, accumulate(self._counts), strict=True)), self._sum)


class GapHistogram(Collector):
    def __init__(self) -> None:
        self._paths: dict[str, Gaps] = {}

    def of(self, path: str) -> Gaps:
        """Those of a path; from then on it is told of, too."""
        return self._paths.setdefault(path, Gaps())

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(
            "tandem_itl_seconds",
            "Streamed answers: gap between two arrivals from the decoder.",
            labels=("path",),
        )
        for path, gaps in self._paths.items():
            gaps.add_to(family, path)
        yield family
