"""Prometheus' text format for a page that is read all the time.

A router reads the page of each engine every few seconds, and a test has dozens of engines in one process.
prometheus_client makes all 700 lines anew each time, in milliseconds. Here what stands before a value is
written once, and the value when it has changed. The text is the same; for one thread only.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import Generic, Protocol, TypeVar

from prometheus_client.utils import floatToGoString

Labels = Mapping[str, str]


class Value:
    """One sample, of a counter or gauge or as a part of more."""

    __slots__ = ("_head", "_text", "_value")

    def __init__(self, name: str, labels: Labels) -> None:
        self._head = _head(name, labels)
        self.set(0.0)

    def set(self, value: float) -> None:
        self._value = value
        self._text = ""

    def inc(self, amount: float = 1.0) -> None:
        self.set(self._value + amount)

    def text(self) -> str:
        if not self._text:
            self._text = f"{self._head}{_written(self._value)}\n"
        return self._text


class Summary:
    """How many values were observed, and their sum."""

    def __init__(self, name: str, labels: Labels) -> None:
        self._count = Value(f"{name}_count", labels)
        self._sum = Value(f"{name}_sum", labels)

    def observe(self, value: float) -> None:
        self._count.inc()
        self._sum.inc(value)

    def text(self) -> str:
        return self._count.text() + self._sum.text()


class Histogram:
    """How many of the observed values were at most as high as each bucket's bound."""

    def __init__(self, name: str, labels: Labels, buckets: Iterable[float]) -> None:
        """`buckets`: rising bounds; one for all higher values is added."""
        self._all = Summary(name, labels)
        self._bounds = [*map(float, buckets), float("inf")]
        self._counts = [0] * len(self._bounds)  # of values that belong to no lower bucket
        self._heads = [_head(f"{name}_bucket", {**labels, "le": _written(bound)}) for bound in self._bounds]
        self._text = ""

    def observe(self, value: float) -> None:
        self._all.observe(value)
        self._counts[bisect_left(self._bounds, value)] += 1
        self._text = ""

    def text(self) -> str:
        if not self._text:
            lines = zip(self._heads, accumulate(self._counts), strict=True)
            self._text = "".join([f"{head}{_written(n)}\n" for head, n in lines]) + self._all.text()
        return self._text


class _Series(Protocol):
    def text(self) -> str: ...


S = TypeVar("S", bound=_Series)


class Family(Generic[S]):
    """One metric, with a series for each set of labels that it was asked for."""

    def __init__(self, name: str, about: str, kind: str, make: Callable[[str, Labels], S]) -> None:
        """`about`: one line without backslashes."""
        self._name = name
        self._make = make
        self._series: dict[tuple[tuple[str, str], ...], S] = {}
        self._head = _introduction(name + ("_total" if kind == "counter" else ""), about, kind)
        # Since when each series counts is told in a metric of its own.
        self._created = "" if kind == "gauge" else _introduction(f"{name}_created", about, "gauge")
        self._created_at = ""

    def labels(self, **labels: str) -> S:
        """Those of one metric are always given in the same order."""
        key = tuple(labels.items())
        found = self._series.get(key)
        if found is None:
            found = self._series[key] = self._make(self._name, labels)
            if self._created:
                self._created_at += f"{_head(f'{self._name}_created', labels)}{_written(time.time())}\n"
        return found

    def text(self) -> str:
        created = self._created + self._created_at if self._created_at else ""
        return "".join([self._head, *(series.text() for series in self._series.values()), created])


class Page:
    """Metrics, in the order in which they were made."""

    def __init__(self) -> None:
        self._families: list[Family[Value] | Family[Summary] | Family[Histogram]] = []

    def gauge(self, name: str, about: str) -> Family[Value]:
        family = Family(name, about, "gauge", Value)
        self._families.append(family)
        return family

    def counter(self, name: str, about: str) -> Family[Value]:
        family = Family(name, about, "counter", lambda name, labels: Value(f"{name}_total", labels))
        self._families.append(family)
        return family

    def summary(self, name: str, about: str) -> Family[Summary]:
        family = Family(name, about, "summary", Summary)
        self._families.append(family)
        return family

    def histogram(self, name: str, about: str, buckets: Iterable[float]) -> Family[Histogram]:
        bounds = list(buckets)
        family = Family(name, about, "histogram", lambda name, labels: Histogram(name, labels, bounds))
        self._families.append(family)
        return family

    def text(self) -> str:
        return "".join([family.text() for family in self._families])


def _introduction(name: str, about: str, kind: str) -> str:
    return f"# HELP {name} {about}\n# TYPE {name} {kind}\n"


def _head(name: str, labels: Labels) -> str:
    """A sample up to its value."""
    told = ",".join(f'{label}="{_escaped(value)}"' for label, value in sorted(labels.items()))
    return f"{name}{{{told}}} " if told else f"{name} "


def _written(value: float) -> str:
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
