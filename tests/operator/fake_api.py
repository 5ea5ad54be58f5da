"""An API server in memory: as much of its rules as the operator's parts rely on."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

from tandem.kube import ApiError, Key, Object, Resource, key_of
from tandem.kube.client import Listing


class FakeApi:
    """Objects by resource and key. Applying the same again changes nothing, not even the version."""

    def __init__(self) -> None:
        self.objects: dict[tuple[Resource, Key], Object] = {}
        self.calls: list[tuple[str, str, str]] = []
        self.refusal: ApiError | None = None
        """Given instead of an answer while it is set."""
        self.unchangeable: str | None = None
        """While it is set, what the server says to each change of an object that is there."""
        self._versions = itertools.count(1)
        self._watches: dict[Resource, list[asyncio.Queue[Object]]] = defaultdict(list)

    def seen(self, resource: Resource) -> dict[Key, Object]:
        """As a watch that is up to date shows them."""
        return {key: found for (kind, key), found in self.objects.items() if kind == resource}

    def edit(self, resource: Resource, key: Key, **fields: Any) -> None:
        """By someone else."""
        found = self.objects[resource, key]
        self._store(resource, key, self._kept({**found, **fields}, found))

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Object | None:
        self._called("get", resource, name)
        return copy.deepcopy(self.objects.get((resource, (namespace or "", name))))

    async def apply(self, desired: Object, resource: Resource, *, manager: str, force: bool = True) -> Object:
        self._called("apply", resource, desired["metadata"]["name"])
        key = key_of(desired)
        before = self.objects.get((resource, key))
        version = desired["metadata"].get("resourceVersion")
        if version is not None and (before is None or before["metadata"]["resourceVersion"] != version):
            raise ApiError(409, "Conflict", "the object has been modified")
        made = self._kept({**(before or {}), **copy.deepcopy(desired)}, before)
        if self.unchangeable is not None and before is not None and made is not before:
            raise ApiError(422, "Invalid", self.unchangeable)
        self._store(resource, key, made)
        return copy.deepcopy(made)

    async def create(self, made: Object, resource: Resource, *, manager: str) -> Object:
        self._called("create", resource, made["metadata"].get("name", ""))
        key = key_of(made)
        if (resource, key) in self.objects:
            raise ApiError(409, "AlreadyExists", f"{made['metadata']['name']} already exists")
        self._store(resource, key, self._kept(copy.deepcopy(made), None))
        return copy.deepcopy(self.objects[resource, key])

    async def replace(self, made: Object, resource: Resource, *, manager: str) -> Object:
        self._called("replace", resource, made["metadata"]["name"])
        before = self.objects.get((resource, key_of(made)))
        if before is None:
            raise ApiError(404, "NotFound", "not found")
        if before["metadata"]["resourceVersion"] != made["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", "the object has been modified")
        self._store(resource, key_of(made), self._kept(copy.deepcopy(made), before))
        return copy.deepcopy(self.objects[resource, key_of(made)])

    async def delete(
        self, resource: Resource, name: str, namespace: str | None = None, *, uid: str | None = None
    ) -> None:
        self._called("delete", resource, name)
        found = self.objects.get((resource, (namespace or "", name)))
        if found is not None and uid in (None, found["metadata"]["uid"]):
            del self.objects[resource, (namespace or "", name)]

    async def list(
        self, resource: Resource, namespace: str | None = None, **_: Any
    ) -> Listing:  # whatever the selectors say
        self._called("list", resource, "")
        return Listing(copy.deepcopy(list(self.seen(resource).values())), "0")

    async def watch(
        self, resource: Resource, namespace: str | None = None, **_: Any
    ) -> AsyncIterator[tuple[str, Object]]:
        """Changes from now on; that an object is deleted is not told."""
        self._called("watch", resource, "")
        changes: asyncio.Queue[Object] = asyncio.Queue()
        self._watches[resource].append(changes)
        yield "OPEN", {}
        while True:
            yield "MODIFIED", await changes.get()

    def _store(self, resource: Resource, key: Key, made: Object) -> None:
        self.objects[resource, key] = made
        for changes in self._watches[resource]:
            changes.put_nowait(copy.deepcopy(made))

    def _called(self, verb: str, resource: Resource, name: str) -> None:
        self.calls.append((verb, resource.kind, name))
        if self.refusal is not None:
            raise self.refusal

    def _kept(self, made: Object, before: Object | None) -> Object:
        def bare(found: Object) -> Object:
            metadata = {k: v for k, v in found["metadata"].items() if k not in ("resourceVersion", "uid")}
            return {**found, "metadata": metadata}

        if before is not None and bare(made) == bare(before):
            return before
        version = str(next(self._versions))
        uid = before["metadata"]["uid"] if before else f"uid-{version}"
        return {**made, "metadata": {**made["metadata"], "resourceVersion": version, "uid": uid}}
