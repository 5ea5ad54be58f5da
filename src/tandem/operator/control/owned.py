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
from tandem.kube import resources as kinds
from tandem.operator.control.desired import UID_ANNOTATION
from tandem.operator.control.likeness import covers
from tandem.operator.control.replicas import autoscaled, numbered, unnumbered

MANAGER = "tandem-operator"
"""The field manager of all that the operator writes."""

log = logging.getLogger(__name__)

SHOWN_SECONDS = 30.0
"""After so long without a sight of an object that was made, it is taken to be gone."""

APPLIED_ANNOTATION = "tandem.dev/applied"
"""On each object: a digest of what was last applied, by which a new operator knows its predecessor's work."""

REPLACED = (kinds.CONFIG_MAP, kinds.SERVICE, kinds.ROLE_BINDING)
"""Kinds whose objects may be deleted and made anew where a field cannot be changed: no pod ends by it."""

_UNCHANGEABLE = ("immutable", "may not change once set", "cannot change")

_ATTEMPTS = 5
"""To apply a Deployment between two changes by others."""

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

    def __init__(self, desired: Object, message: str, *, terminating: bool = False) -> None:
        """`terminating`: its namespace is being deleted."""
        self.kind: str = desired["kind"]
        self.name: str = desired["metadata"]["name"]
        self.message = message
        self.terminating = terminating
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
    pass over an unchanged endpoint sends nothing. Nor does a new operator's first one: an object that says
    that the same was applied to it, and still has all of that, is as it should be.
    """

    def __init__(
        self,
        client: Writer,
        seen: Mapping[Resource, Mapping[Key, Object]],
        clock: Callable[[], float] = time.monotonic,
        *,
        scales: Callable[[], bool] = lambda: False,
    ) -> None:
        """`seen`: the objects of each resource as watches show them. `scales`: whether the cluster has an
        autoscaler for those that want one."""
        self._client = client
        self._seen = seen
        self._scales = scales
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
        there = live
        if there is None:  # watches show only objects with our labels
            there = await self._client.get(resource, key[1], key[0] or None)
        if there is not None and not _owns(desired, ours, there):
            raise Refused(desired, "an object of this name is there and belongs to another owner")
        desired = _signed(desired, wanted)
        if last is None and live is not None and covers(live, desired):
            self._left(resource, key, wanted, live, live)
            return False
        made = await self._apply(desired, resource, there)
        self._left(resource, key, wanted, made, live)
        if there is None or made["metadata"]["resourceVersion"] != there["metadata"]["resourceVersion"]:
            log.info("applied %s %s", desired["kind"], "/".join(filter(None, key)))
        return True

    async def _apply(self, desired: Object, resource: Resource, there: Object | None) -> Object:
        try:
            return await self._offer(desired, resource, there)
        except Refused as error:
            if there is None or not any(said in error.message for said in _UNCHANGEABLE):
                raise
            if resource not in REPLACED:
                raise Refused(desired, f"{error.message}; delete it, and it is made anew") from error
        metadata = there["metadata"]
        log.info("%s %s cannot be changed: it is made anew", desired["kind"], metadata["name"])
        await self._client.delete(resource, metadata["name"], metadata.get("namespace"), uid=metadata["uid"])
        return await self._offer(desired, resource, None)

    async def _offer(self, desired: Object, resource: Resource, there: Object | None) -> Object:
        attempts = _ATTEMPTS if autoscaled(desired) else 1
        while True:
            attempts -= 1
            try:
                made = numbered(desired, there, scales=self._scales())
                return await self._client.apply(made, resource, manager=MANAGER)
            except ApiError as error:
                if error.final:
                    raise Refused(desired, error.message, terminating=error.terminating) from error
                if not (attempts and error.conflict):
                    raise
            # An autoscaler, or the controller with its status, was faster.
            namespace, name = key_of(desired)
            there = await self._client.get(resource, name, namespace)

    def _left(self, resource: Resource, key: Key, wanted: bytes, made: Object, shown: Object | None) -> None:
        version = None if shown is None else shown["metadata"]["resourceVersion"]
        generation = made["metadata"].get("generation", 0)
        self._applied[resource, key] = _Applied(
            wanted, _digest(_settled(made)), version, self._clock(), generation
        )

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


def _owns(desired: Object, ours: Mapping[str, str], there: Object) -> bool:
    """By its labels, or where someone has changed those, by the UID of its endpoint."""
    metadata = there["metadata"]
    if ours.items() <= (metadata.get("labels") or {}).items():
        return True
    uid = (desired["metadata"].get("annotations") or {}).get(UID_ANNOTATION)
    return uid is not None and (metadata.get("annotations") or {}).get(UID_ANNOTATION) == uid


def _signed(desired: Object, digest: bytes) -> Object:
    metadata = desired["metadata"]
    annotations = {**metadata.get("annotations", {}), APPLIED_ANNOTATION: digest.hex()[:32]}
    return {**desired, "metadata": {**metadata, "annotations": annotations}}


def _settled(found: Object) -> Object:
    """The object without what changes by itself: its status, what the API server keeps, and what an
    autoscaler decides."""
    metadata = {name: value for name, value in found["metadata"].items() if name not in _SERVERS}
    return {**unnumbered(found), "metadata": metadata, "status": None}


def _digest(found: Object) -> bytes:
    return sha256(msgspec.json.encode(found, order="deterministic")).digest()
