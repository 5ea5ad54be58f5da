"""A local copy of objects, kept by a list and a watch."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Protocol

from tandem.kube.client import Listing
from tandem.kube.errors import ApiError, KubeError
from tandem.kube.objects import Key, Object, key_of, version_of
from tandem.kube.resources import Resource

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds between attempts at an API server that gives no answer; doubled each time, with jitter."""
WATCH_PAUSE = 1.0
"""The least time between two openings of one watch, in seconds."""

log = logging.getLogger(__name__)

Changed = Callable[[Object | None, Object | None], None]
"""Told of each change: the object before (None: it is new) and after (None: it is gone)."""


class Source(Protocol):
    """What a reflector asks of a client."""

    async def list(
        self,
        resource: Resource,
        namespace: str | None = ...,
        *,
        labels: str = ...,
        fields: str = ...,
        metadata_only: bool = ...,
    ) -> Listing: ...

    def watch(
        self,
        resource: Resource,
        namespace: str | None = ...,
        *,
        version: str,
        labels: str = ...,
        fields: str = ...,
        metadata_only: bool = ...,
    ) -> AsyncIterator[tuple[str, Object]]: ...


class Reflector(Mapping[Key, Object]):
    """The objects of one resource in one namespace or all, by namespace and name.

    `run` lists them once and then watches; it lists again only where the server no longer knows from when
    the watch should go on. What changed while the watch was away is told like any other change. Objects are
    not copied: who reads them does not write into them.
    """

    def __init__(
        self,
        source: Source,
        resource: Resource,
        changed: Changed,
        *,
        namespace: str | None = None,
        labels: str = "",
        fields: str = "",
        metadata_only: bool = False,
        longest_pause: float = LONGEST_PAUSE,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`labels` and `fields` are selectors; `longest_pause`: seconds, see LONGEST_PAUSE."""
        self.resource = resource
        self.synced = asyncio.Event()
        """Set after the first list: from then on the copy is whole."""
        self.trouble: str | None = None
        """Why the last attempt failed; None while it works."""
        self._source = source
        self._changed = changed
        self._namespace = namespace
        self._labels = labels
        self._fields = fields
        self._metadata_only = metadata_only
        self._longest_pause = longest_pause
        self._clock = clock
        self._sleep = sleep
        self._objects: dict[Key, Object] = {}
        self._version: str | None = None
        self._heard = -float("inf")

    def __getitem__(self, key: Key) -> Object:
        return self._objects[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._objects)

    def __len__(self) -> int:
        return len(self._objects)

    @property
    def age(self) -> float:
        """Seconds since the API server was last heard: an answer, a change or a bookmark. Infinite before the
        first time."""
        return self._clock() - self._heard

    async def run(self) -> None:
        """Until it is cancelled."""
        failures = 0
        while True:
            opened = self._clock()
            error: KubeError | None = None
            try:
                if self._version is None:
                    await self._list()
                await self._watch()
            except KubeError as failure:
                error = failure
            if self._heard >= opened:
                failures = 0
            if error is None:
                await self._sleep(max(0.0, WATCH_PAUSE - (self._clock() - opened)))
                continue
            failures += 1
            if isinstance(error, ApiError) and error.gone:
                self._version = None  # the next attempt lists
                log.info("watch of %s: %s; they are listed anew", self.resource.plural, error)
            else:
                self._failed(error)
            pause = min(self._longest_pause, FIRST_PAUSE * 2 ** min(failures - 1, 10))
            await self._sleep(pause * random.uniform(0.5, 1.0))

    def clear(self) -> None:
        """Forget all objects, as if each had been deleted: the API server has the kind no more."""
        self._version = None
        self.synced.clear()
        for key in list(self._objects):
            self._drop(key)

    async def _list(self) -> None:
        listing = await self._source.list(
            self.resource,
            self._namespace,
            labels=self._labels,
            fields=self._fields,
            metadata_only=self._metadata_only,
        )
        self._alive()
        found = {key_of(item): item for item in listing.items}
        gone = [key for key in self._objects if key not in found]
        for key in gone:
            self._drop(key)
        for item in found.values():
            self._keep(item)
        self._version = listing.version
        self.synced.set()

    async def _watch(self) -> None:
        assert self._version is not None
        stream = self._source.watch(
            self.resource,
            self._namespace,
            version=self._version,
            labels=self._labels,
            fields=self._fields,
            metadata_only=self._metadata_only,
        )
        async for kind, found in stream:
            self._alive()
            if kind == "OPEN":
                continue
            if kind == "DELETED":
                self._drop(key_of(found), found)
            elif kind != "BOOKMARK":
                self._keep(found)
            self._version = version_of(found)

    def _alive(self) -> None:
        self._heard = self._clock()
        if self.trouble is not None:
            log.info("watch of %s: works again", self.resource.plural)
        self.trouble = None

    def _failed(self, error: KubeError) -> None:
        if self.trouble is None:
            log.warning("watch of %s: %s; what is known of them stays", self.resource.plural, error)
        self.trouble = str(error)

    def _keep(self, found: Object) -> None:
        key = key_of(found)
        before = self._objects.get(key)
        if before is not None and version_of(before) == version_of(found):
            return
        # Often the greater part of an object, and never asked for.
        found["metadata"].pop("managedFields", None)
        self._objects[key] = found
        if before is not None and before["metadata"].get("uid") != found["metadata"].get("uid"):
            # Another of the same name: for who watches, the first one went.
            self._changed(before, None)
            before = None
        self._changed(before, found)

    def _drop(self, key: Key, last: Object | None = None) -> None:
        before = self._objects.pop(key, None)
        if before is not None:
            self._changed(last or before, None)
