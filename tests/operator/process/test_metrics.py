"""What an operator's page of metrics tells."""

from __future__ import annotations

import re

from tandem.operator.process.metrics import Metrics

OF_LOOP = ("tandem_operator_queue", "tandem_operator_watch_age_seconds", "tandem_operator_endpoints")


def told(metrics: Metrics) -> list[float]:
    """Of the loop."""
    found = dict(re.findall(r"^(\w+) (\S+)$", metrics.text().decode(), re.MULTILINE))
    return [float(found[name]) for name in OF_LOOP]


def test_who_stands_by_tells_nothing_of_the_loop_that_was() -> None:
    metrics = Metrics()
    assert told(metrics) == [0, 0, 0]
    for numbers in ([3, 50, 20], [1, 2, 4]):
        queue, age, endpoints = numbers
        metrics.watch_loop(lambda n=queue: n, lambda n=age: n, lambda n=endpoints: n)  # type: ignore[misc]
        assert told(metrics) == numbers
        metrics.loop_ended()
        assert told(metrics) == [0, 0, 0]


def test_requests_are_told_by_verb() -> None:
    metrics, sent = Metrics(), {"get": 2}
    metrics.watch_requests(sent)
    sent["patch"] = 1
    text = metrics.text().decode()
    for verb, count in (("get", 2), ("patch", 1), ("delete", 0)):
        assert f'tandem_operator_requests_total{{verb="{verb}"}} {count}.0\n' in text
