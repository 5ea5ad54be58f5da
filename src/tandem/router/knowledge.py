"""What a router knows of engines' KV caches, kept up to date: subscriptions follow the fleet."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import zmq
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from tandem.config import Subscription
from tandem.router.engines import Engine
from tandem.router.fleet import Fleet
from tandem.router.kv_events import SharedEndpoint, Subscriber
from tandem.router.strategies import KvAware, KvIndex

logger = logging.getLogger("tandem.router")

_KINDS = ("replayed", "gap", "lost", "restart")  # there from the beginning, so that rates can be taken


class Knowledge(Collector):
    """The index of one router, and its metrics."""

    def __init__(self, fleet: Fleet, index: KvIndex, strategy: KvAware) -> None:
        """To be made on the event loop, before engines join."""
        self._fleet = fleet
        self._index = index
        self._strategy = strategy
        self.subscriber = Subscriber(index)
        self._said = False
        self._left_out: dict[Engine, Subscription] = {}
        """Engines whose endpoint is another's."""
        self._freed = False  # whether one of those endpoints may be free now
        fleet.on_member(self._member)
        fleet.on_change(self._follow_left_out)

    def restarted(self, engine: Engine) -> None:
        self.subscriber.restarted(engine)

    def close(self) -> None:
        self.subscriber.close()

    def _member(self, engine: Engine, here: bool) -> None:
        if not here:
            self.subscriber.remove(engine)
            if self._left_out.pop(engine, None) is None:
                self._freed = True
        elif engine.kv_events is not None:
            self._follow(engine, engine.kv_events)
        elif not self._said:
            self._said = True
            logger.warning(
                "kvaware goes by what was sent to engines without --kv-events, %s first; this is logged once",
                engine.url,
            )

    def _follow_left_out(self) -> None:
        """Once for all that left together: a thousand may."""
        if self._freed:
            self._freed = False
            for engine, subscription in list(self._left_out.items()):
                self._follow(engine, subscription)

    def _follow(self, engine: Engine, subscription: Subscription) -> None:
        try:
            self.subscriber.add(engine, subscription)
        except SharedEndpoint as reason:
            if engine not in self._left_out:
                logger.error("KV events of %s are not followed: %s", engine.url, reason)
            self._left_out[engine] = subscription
        except (ValueError, zmq.ZMQError) as error:
            self._left_out.pop(engine, None)
            logger.error("KV events of %s cannot be followed: %s", engine.url, error)
        else:
            if self._left_out.pop(engine, None) is not None:
                logger.info("KV events of %s are followed now", engine.url)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        blocks = GaugeMetricFamily("tandem_kv_index_blocks", "KV blocks in the index, one for each holder.")
        blocks.add_metric((), self._index.count)
        coverage = GaugeMetricFamily(
            "tandem_kv_index_coverage",
            "The part of an engine's cache that the index knows; -1 where its events were not seen from its "
            "start on.",
            labels=("engine", "rank"),
        )
        for engine in self._fleet.engines:
            for rank in self._index.ranks(engine):
                value = rank.coverage if rank.complete else -1.0
                coverage.add_metric((engine.url, str(rank.number)), value)
        events = CounterMetricFamily(
            "tandem_kv_events",
            "KV event batches read (batch), sent again (replayed), missed (gap), not to be had again (lost), "
            "and publishers that began anew (restart); events that could not be read (unread).",
            labels=("kind",),
        )
        counts = {"batch": self.subscriber.batches, "unread": self.subscriber.unread}
        counts |= dict.fromkeys(_KINDS, 0) | self.subscriber.counts
        for kind, count in counts.items():
            events.add_metric((kind,), count)
        dropped = CounterMetricFamily(
            "tandem_kv_blocks_dropped", "KV blocks that could not be placed, by reason.", labels=("reason",)
        )
        for reason, count in self._index.dropped.items():
            dropped.add_metric((reason,), count)
        fallbacks = CounterMetricFamily(
            "tandem_kvaware_fallbacks",
            "Requests that kvaware did not decide by events alone, by reason.",
            labels=("reason",),
        )
        for reason, count in self._strategy.fallbacks.items():
            fallbacks.add_metric((reason,), count)
        yield blocks
        yield coverage
        yield events
        yield dropped
        yield fallbacks
