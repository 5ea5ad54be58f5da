"""The control loop: watches fill a queue of endpoints, workers empty it."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable

from tandem.kube import Client, Key, KubeError
from tandem.operator.control.controller import Controller
from tandem.operator.control.queue import WorkQueue
from tandem.operator.control.watches import Watches, oldest
from tandem.operator.process.metrics import Metrics
from tandem.operator.settings import Settings

WORKERS = 8
"""Endpoints that are worked on at the same time; they wait for the API server most of it."""
RESYNC_SECONDS = 600.0
"""Each endpoint is looked at again so often, without a request where nothing is to be done."""

log = logging.getLogger(__name__)


class Loop:
    def __init__(
        self,
        client: Client,
        settings: Settings,
        metrics: Metrics,
        reapplied: Callable[[], None] | None = None,
    ) -> None:
        """`reapplied` is told when API servers may no longer know our webhooks' certificate."""
        self._queue: WorkQueue[Key] = WorkQueue(group=lambda key: key[0])
        self._metrics = metrics
        self._watches = Watches(client, self._queue.add, settings.system_namespace)
        self._controller = Controller(client, self._watches, settings)
        if reapplied is not None:
            self._watches.reapplied.append(reapplied)
        metrics.watch_loop(lambda: len(self._queue), lambda: self.age, lambda: len(self._watches.endpoints))

    @property
    def age(self) -> float:
        """Seconds since the API server was last heard on the oldest watch."""
        return oldest(self._watches.always)

    async def run(self) -> None:
        """Until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watches.run())
            await self._watches.wait()
            log.info("watching %d endpoints", len(self._watches.endpoints))
            for number in range(WORKERS):
                group.create_task(self._work(), name=f"worker {number}")
            group.create_task(self._resync())

    async def _work(self) -> None:
        while True:
            key = await self._queue.get()
            started = time.monotonic()
            again: float | None = None
            try:
                again = await self._controller.reconcile(key)
            except KubeError as error:
                pause = self._queue.failed(key)
                log.warning("%s/%s: %s; tried again in %.1f s", *key, error, pause)
                self._metrics.passed("failed", time.monotonic() - started)
            except Exception:
                # A mistake of ours with one endpoint must not end the others' operator.
                pause = self._queue.failed(key)
                log.exception("%s/%s: the pass failed; tried again in %.1f s", *key, pause)
                self._metrics.passed("error", time.monotonic() - started)
            else:
                self._queue.done(key)
                if again is not None:
                    self._queue.add_after(key, again)
                self._metrics.passed("done", time.monotonic() - started)

    async def _resync(self) -> None:
        while True:
            await asyncio.sleep(RESYNC_SECONDS * random.uniform(0.8, 1.2))
            for key in list(self._watches.all_keys()):
                self._queue.add(key)
