"""Metrics of the operator itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

VERBS = ("get", "list", "watch", "create", "update", "patch", "delete")
_SECONDS = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0)


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._passes = Counter(
            "tandem_operator_passes",
            "Passes over endpoints: done, failed (the API server refused or did not answer), error (ours).",
            ["result"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "tandem_operator_pass_seconds",
            "How long a pass over one endpoint took.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.leads = Gauge(
            "tandem_operator_leads", "1 while this operator holds the lease.", registry=self.registry
        )
        self._queue = Gauge(
            "tandem_operator_queue", "Endpoints that wait for a pass.", registry=self.registry
        )
        self._age = Gauge(
            "tandem_operator_watch_age_seconds",
            "Since the API server was last heard on the watch that is the most out of date.",
            registry=self.registry,
        )
        self._endpoints = Gauge(
            "tandem_operator_endpoints", "Endpoints in the cluster.", registry=self.registry
        )
        self._requests = Gauge(
            "tandem_operator_requests_total",
            "Requests sent to the API server, by verb.",
            ["verb"],
            registry=self.registry,
        )
        for result in ("done", "failed", "error"):
            self._passes.labels(result)

    def passed(self, result: str, seconds: float) -> None:
        self._passes.labels(result).inc()
        self._seconds.observe(seconds)

    def watch_loop(
        self, queue: Callable[[], float], age: Callable[[], float], endpoints: Callable[[], float]
    ) -> None:
        """`age`: seconds since the API server was last heard."""
        self._queue.set_function(queue)
        self._age.set_function(age)
        self._endpoints.set_function(endpoints)

    def loop_ended(self) -> None:
        """Who stands by follows no endpoint, and has nothing that could be out of date."""
        self.watch_loop(_none, _none, _none)

    def watch_requests(self, sent: Mapping[str, int]) -> None:
        """By verb."""
        for verb in VERBS:
            self._requests.labels(verb).set_function(lambda verb=verb: sent.get(verb, 0))  # type: ignore[misc]

    def text(self) -> bytes:
        return generate_latest(self.registry)


def _none() -> float:
    return 0
