"""What a router tells Prometheus. Times are seconds on the router's own clock."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from tandem.router.engines import Fleet, State

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)


class Metrics:
    """One router's metrics, in a registry of their own."""

    def __init__(self, fleet: Fleet) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "tandem_requests",
            "Requests by the path they took, why, and how they ended.",
            ["path", "reason", "outcome"],
            registry=self.registry,
        )
        self.ttft = Histogram(
            "tandem_ttft_seconds",
            "Streamed answers: from the request's arrival to the first byte sent to the client.",
            ["path"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.itl = Histogram(
            "tandem_itl_seconds",
            "Streamed answers: gap between two arrivals from the decoder.",
            ["path"],
            buckets=_GAPS,
            registry=self.registry,
        )
        self.prefill = Histogram(
            "tandem_prefill_seconds",
            "Prefill leg: from sending it to its whole answer.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.handoff = Histogram(
            "tandem_handoff_seconds",
            "Disaggregated answers: from the prefill leg's answer to the decode leg's first bytes "
            "(KV transfer and the first decode step).",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.leg_failures = Counter(
            "tandem_leg_failures",
            "Legs that gave no usable answer, by role and cause.",
            ["role", "cause"],
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "tandem_prompt_tokens",
            "Tokens of the prompts routed, as counted by the router.",
            ["path"],
            registry=self.registry,
        )
        self.registry.register(_Engines(fleet))

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)


class _Engines(Collector):
    """Each engine's state and load, read from the fleet at each scrape."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[GaugeMetricFamily]:
        labels = ("role", "engine")
        ready = GaugeMetricFamily("tandem_engine_ready", "1 for an engine in use, else 0.", labels=labels)
        load = GaugeMetricFamily(
            "tandem_requests_in_flight", "Requests an engine has in hand from this router.", labels=labels
        )
        for engine in self._fleet.engines:
            ready.add_metric((engine.role.value, engine.url), engine.state is State.READY)
            load.add_metric((engine.role.value, engine.url), engine.in_flight)
        yield ready
        yield load
