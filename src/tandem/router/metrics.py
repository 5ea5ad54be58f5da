"""What a router tells Prometheus. Times are seconds on the router's own clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from tandem.router.budgets import Budgets
from tandem.router.discovery import Source
from tandem.router.engines import State
from tandem.router.fleet import Fleet
from tandem.router.gaps import GapHistogram
from tandem.router.gate import Gate
from tandem.router.handover import Handovers
from tandem.router.waiting import Line

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """One router's metrics, in a registry of their own."""

    def __init__(
        self,
        fleet: Fleet,
        gate: Gate,
        budgets: Budgets,
        line: Line,
        handovers: Handovers,
        knowledge: Collector | None = None,
        sources: Callable[[], list[Source]] = list,
        keys: Collector | None = None,
    ) -> None:
        """`knowledge`: what is to be told of the KV index. `sources`: how it stands with the sources of
        engines. `keys`: what is to be told of API keys."""
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
        self.itl = GapHistogram()
        self.registry.register(self.itl)
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
        self.refused = Counter(
            "tandem_refused",
            "Requests, and connections, of clients that were refused as they came, by status.",
            ["status"],
            registry=self.registry,
        )
        self.registry.register(_Engines(fleet, budgets))
        if knowledge is not None:
            self.registry.register(knowledge)
        if keys is not None:
            self.registry.register(keys)
        self.registry.register(_Waiting(gate, line, handovers))
        self.registry.register(_Sources(sources))

    def count_refused(self, status: int) -> None:
        """A client was refused before there was a request to route."""
        self.refused.labels(str(int(status))).inc()

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)


class _Engines(Collector):
    """Each engine's state and load, read from the fleet at each scrape."""

    def __init__(self, fleet: Fleet, budgets: Budgets) -> None:
        self._fleet = fleet
        self._budgets = budgets

    def collect(self) -> Iterator[GaugeMetricFamily]:
        labels = ("role", "engine")
        ready = GaugeMetricFamily("tandem_engine_ready", "1 for an engine in use, else 0.", labels=labels)
        load = GaugeMetricFamily(
            "tandem_requests_in_flight", "Requests an engine has in hand from this router.", labels=labels
        )
        pending = GaugeMetricFamily(
            "tandem_pending_prompt_tokens",
            "Prompt tokens that an engine has to compute for requests without a first answer yet.",
            labels=labels,
        )
        held = GaugeMetricFamily(
            "tandem_tokens_in_flight",
            "Prompts and expected outputs of the requests that an engine was chosen to answer, in tokens.",
            labels=labels,
        )
        kv_use = GaugeMetricFamily(
            "tandem_engine_kv_use",
            "The part of an engine's KV cache that is in use, as it last said.",
            labels=labels,
        )
        reserved = GaugeMetricFamily(
            "tandem_reserved", "What hand-offs hold on an engine, by resource.", labels=(*labels, "resource")
        )
        for engine in self._fleet.engines:
            named = (engine.role.value, engine.url)
            ready.add_metric(named, engine.state is State.READY)
            load.add_metric(named, engine.in_flight)
            pending.add_metric(named, engine.pending_tokens)
            kv_use.add_metric(named, engine.kv_use)
            if engine.answers:
                held.add_metric(named, engine.held_tokens)
        for (engine, resource), amount in self._budgets.used.items():
            reserved.add_metric((engine.role.value, engine.url, resource), amount)
        yield ready
        yield load
        yield pending
        yield held
        yield kv_use
        yield reserved


class _Waiting(Collector):
    """Requests that are being served or wait, and hand-offs that still have to be cleaned up."""

    def __init__(self, gate: Gate, line: Line, handovers: Handovers) -> None:
        self._gate = gate
        self._line = line
        self._handovers = handovers

    def collect(self) -> Iterator[GaugeMetricFamily]:
        running = GaugeMetricFamily("tandem_requests_running", "Requests being served.")
        running.add_metric((), self._gate.running)
        waiting = GaugeMetricFamily(
            "tandem_requests_waiting",
            "Requests in a queue: for their turn (admission) or for room in a receive buffer (reservation).",
            labels=("queue",),
        )
        waiting.add_metric(("admission",), self._gate.waiting)
        waiting.add_metric(("reservation",), len(self._line))
        cleaning = GaugeMetricFamily(
            "tandem_handoffs_cleaning_up", "Hand-offs that nobody uses and that still hold something."
        )
        cleaning.add_metric((), self._handovers.cleaning_up)
        yield running
        yield waiting
        yield cleaning


class _Sources(Collector):
    """How old the news of engines are that come by a watch."""

    def __init__(self, sources: Callable[[], list[Source]]) -> None:
        self._sources = sources

    def collect(self) -> Iterator[GaugeMetricFamily]:
        age = GaugeMetricFamily(
            "tandem_discovery_age_seconds",
            "Time since a watched source of engines was last heard.",
            labels=("source",),
        )
        for source in self._sources():
            if source.age is not None:
                age.add_metric((source.name,), source.age)
        yield age
