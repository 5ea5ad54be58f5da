"""Making objects in the cluster as they are desired, with as few requests as that takes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

import msgspec

from tandem.kube import ApiError, Key, Object, Resource, key_of, resource_of

MANAGER = "tandem-operator"
"""The field manager of all that the operator writes."""

log = logging.getLogger(__name__)

SHOWN_SECONDS = 30.0
"""After so long without a sight of an object that was made, it is taken to be gone."""

_SERVERS = ("resourceVersion", "generation", "managedFields", "selfLink", "creationTimestamp", "uid")

Place = tuple[Resource, Key]


class Writer(Protocol):
    """What is asked of a client."""

    async def get(self, resource: Resource, name: str, namespace: str | None = ...) -> Object | None: ...
    async def apply(
        self, desired: Object, resource: Resource, *, manager: str, force: bool = ...
    ) -> Object: ...
    async def delete(
        self, resource: Resource, name: str, namespace: str | None = ..., *, uid: str | None = ...
    ) -> None: ...


class Refused(Exception):
    """An object cannot be made as it is desired, whatever is tried."""

    def __init__(self, desired: Object, message: str) -> None:
        self.kind: str = desired["kind"]
        self.name: str = desired["metadata"]["name"]
        self.message = message
        super().__init__(f"{self.kind} {self.name}: {message}")


@dataclass(frozen=True)
class _Applied:
    desired: bytes
    """Digest of what was applied."""
    live: bytes
    """Digest of what the object was then."""
    before: str | None
    """The version that the watch had shown until then; None: nothing."""
    at: float
    """When, by the clock."""
    generation: int
    """Of the object then."""


class Owned:
    """Applies desired objects.

    An object is applied when what is desired of it has changed, or when it is no longer as our last apply
    left it (someone edited it): its status and what the API server keeps in its metadata do not count. So a
    pass over an unchanged endpoint sends nothing; a new operator applies everything once, which writes
    nothing where all is as it should be.
    """

    def __init__(
        self,
        client: Writer,
        seen: Mapping[Resource, Mapping[Key, Object]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`seen`: the objects of each resource as watches show them."""
        self._client = client
        self._seen = seen
        self._clock = clock
        self._applied: dict[Place, _Applied] = {}

    async def make(self, desired: Object, ours: Mapping[str, str]) -> bool:
        """True if the object was applied. `ours`: labels that it must have already if it is there.

        Raises Refused where the API server will not have it or an object of that name is not ours, and
        KubeError.
        """
        resource = resource_of(desired)
        key = key_of(desired)
        wanted = _digest(desired)
        live = self._seen[resource].get(key)
        last = self._applied.get((resource, key))
        if last is not None and last.desired == wanted and self._as_left(live, last):
            return False
        if live is None:
            await self._check_free(desired, resource, ours)
        elif not _carries(live, ours):
            raise Refused(desired, "an object of this name belongs to another owner")
        try:
            made = await self._client.apply(desired, resource, manager=MANAGER)
        except ApiError as error:
            if error.final:
                raise Refused(desired, error.message) from error
            raise
        version = None if live is None else live["metadata"]["resourceVersion"]
        generation = made["metadata"].get("generation", 0)
        self._applied[resource, key] = _Applied(
            wanted, _digest(_settled(made)), version, self._clock(), generation
        )
        if live is None or made["metadata"]["resourceVersion"] != version:
            log.info("applied %s %s", desired["kind"], "/".join(filter(None, key)))
        return True

    def generation(self, resource: Resource, key: Key) -> int:
        """Of an object as it was last applied; the watch may show an older one. 0: it was not."""
        last = self._applied.get((resource, key))
        return last.generation if last is not None else 0

    async def remove(self, found: Object) -> None:
        """This object, not a later one of its name."""
        resource, (namespace, name) = resource_of(found), key_of(found)
        self._applied.pop((resource, (namespace, name)), None)
        if "deletionTimestamp" not in found["metadata"]:
            await self._client.delete(resource, name, namespace or None, uid=found["metadata"]["uid"])
            log.info("deleted %s %s", found["kind"], "/".join(filter(None, (namespace, name))))

    def gone(self, resource: Resource, key: Key) -> None:
        """The watch shows the object no longer."""
        self._applied.pop((resource, key), None)

    def _as_left(self, live: Object | None, last: _Applied) -> bool:
        if live is None:
            # So new that the watch does not show it yet: what it showed and then took away is forgotten.
            return self._clock() - last.at < SHOWN_SECONDS
        if live["metadata"]["resourceVersion"] == last.before:
            return True  # the watch does not show our apply yet
        return _digest(_settled(live)) == last.live

    async def _check_free(self, desired: Object, resource: Resource, ours: Mapping[str, str]) -> None:
        """Watches show only objects with our labels."""
        namespace, name = key_of(desired)
        found = await self._client.get(resource, name, namespace or None)
        if found is not None and not _carries(found, ours):
            raise Refused(desired, "an object of this name is there and belongs to another owner")


def _carries(found: Object, labels: Mapping[str, str]) -> bool:
    return labels.items() <= (found["metadata"].get("labels") or {}).items()


def _settled(found: Object) -> Object:
    """The object without what changes by itself: its status, and what the API server keeps."""
    metadata = {name: value for name, value in found["metadata"].items() if name not in _SERVERS}
    return {**found, "metadata": metadata, "status": None}


def _digest(found: Object) -> bytes:
    return sha256(msgspec.json.encode(found, order="deterministic")).digest()
