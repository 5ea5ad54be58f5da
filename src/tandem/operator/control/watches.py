"""What the operator watches, and which endpoint each object belongs to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping

from tandem.api.crd import NAME, PLURAL
from tandem.api.models import GROUP, KIND
from tandem.kube import Client, Key, Object, Reflector, Resource, key_of
from tandem.kube import resources as kinds
from tandem.operator import names

ENDPOINT = Resource(GROUP, "v1", KIND, PLURAL)

OWNED = (
    kinds.SERVICE_ACCOUNT,
    kinds.ROLE,
    kinds.ROLE_BINDING,
    kinds.VOLUME,
    kinds.CLAIM,
    kinds.CONFIG_MAP,
    kinds.NETWORK_POLICY,
    kinds.SERVICE,
    kinds.BUDGET,
    kinds.DEPLOYMENT,
    kinds.INGRESS,
    kinds.TRIGGER_AUTHENTICATION,
    kinds.SCALED_OBJECT,
)
"""Kinds of the objects that an endpoint becomes."""

OPTIONAL = (kinds.TRIGGER_AUTHENTICATION, kinds.SCALED_OBJECT)
"""Kinds that a cluster may not have: those of other projects."""

MANAGED = "app.kubernetes.io/managed-by=tandem"


class Watches:
    """Copies of endpoints, of what belongs to them and of their pods; `changed` is told the key of each
    endpoint that one of these changes concerns."""

    def __init__(self, client: Client, changed: Callable[[Key], None], system_namespace: str) -> None:
        self._client = client
        self._system = system_namespace
        self._changed = changed
        self._by_labels: dict[Key, Key] = {}
        self._owned: dict[Key, dict[tuple[Resource, Key], Object]] = {}
        self._pods: dict[Key, dict[Key, Object]] = {}
        self._optional: dict[Resource, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None
        self.gone: list[Callable[[Resource, Key], None]] = []
        """Told of each owned object that is no longer there."""
        self.reapplied: list[Callable[[], None]] = []
        """Told when the resource's definition or the webhooks' configuration is new or has changed: who
        applies them takes our certificate out of them."""
        self.endpoints = Reflector(client, ENDPOINT, self._endpoint)
        self.owned = {
            resource: Reflector(client, resource, self._owner_of(resource), labels=MANAGED)
            for resource in OWNED
        }
        self.pods = Reflector(client, kinds.POD, self._pod, labels=names.COMPONENT_LABEL)
        self.drivers = Reflector(client, kinds.CSI_DRIVER, self._driver, metadata_only=True)
        self.definitions = Reflector(client, kinds.DEFINITION, self._definition, metadata_only=True)
        self.webhooks = Reflector(
            client,
            kinds.VALIDATING_WEBHOOK,
            self._webhook,
            fields=f"metadata.name={names.WEBHOOK}",
            metadata_only=True,
        )

    @property
    def always(self) -> list[Reflector]:
        """Those of kinds that every cluster has, and that endpoints cannot be made without."""
        owned = [reflector for resource, reflector in self.owned.items() if resource not in OPTIONAL]
        return [self.definitions, self.drivers, self.endpoints, *owned, self.pods]

    def served(self, resource: Resource) -> bool:
        """Whether the cluster has this kind, if it is an optional one."""
        return resource not in OPTIONAL or ("", resource.definition) in self.definitions

    def has_driver(self, name: str) -> bool:
        """Whether the cluster has a CSI driver."""
        return ("", name) in self.drivers

    def owned_by(self, key: Key) -> list[Object]:
        """Objects of the endpoint, in all namespaces."""
        return list(self._owned.get(labels_of(key), {}).values())

    def pods_of(self, key: Key) -> list[Object]:
        return list(self._pods.get(labels_of(key), {}).values())

    def has_endpoint(self, uid: str) -> bool:
        return any(found["metadata"]["uid"] == uid for found in self.endpoints.values())

    def all_keys(self) -> Iterator[Key]:
        """Of every endpoint, and of those that are gone but have left objects."""
        yield from self.endpoints
        known = {labels_of(key) for key in self.endpoints}
        yield from (labels for labels in self._owned if labels not in known)

    async def run(self) -> None:
        """Until it is cancelled."""
        async with asyncio.TaskGroup() as self._group:
            for reflector in (*self.always, self.webhooks):
                self._start(reflector)

    def _start(self, reflector: Reflector) -> asyncio.Task[None]:
        assert self._group is not None
        return self._group.create_task(reflector.run(), name=f"watch {reflector.resource.plural}")

    async def wait(self) -> None:
        """Until the copies are whole."""
        for reflector in self.always:
            await reflector.synced.wait()
        for resource in list(self._optional):
            await self.owned[resource].synced.wait()

    def _endpoint(self, before: Object | None, after: Object | None) -> None:
        found = after or before
        assert found is not None
        key = key_of(found)
        if after is not None:
            self._by_labels[labels_of(key)] = key
        elif self._by_labels.get(labels_of(key)) == key:
            del self._by_labels[labels_of(key)]
        self._changed(key)

    def _owner_of(self, resource: Resource) -> Callable[[Object | None, Object | None], None]:
        def changed(before: Object | None, after: Object | None) -> None:
            found = after or before
            assert found is not None
            if after is None:
                for told in self.gone:
                    told(resource, key_of(found))
            self._file(self._owned, (resource, key_of(found)), before, after)

        return changed

    def _pod(self, before: Object | None, after: Object | None) -> None:
        found = after or before
        assert found is not None
        self._file(self._pods, key_of(found), before, after)

    def _file(self, index: dict, place: object, before: Object | None, after: Object | None) -> None:  # type: ignore[type-arg]
        """Keep `index` by endpoint, and tell of the endpoints concerned; labels may have changed."""
        for labels in {self._owner(found) for found in (before, after) if found is not None}:
            if labels is None:
                continue
            if after is not None and self._owner(after) == labels:
                index.setdefault(labels, {})[place] = after
            else:
                index.get(labels, {}).pop(place, None)
                if not index.get(labels):
                    index.pop(labels, None)
            self._changed(self._by_labels.get(labels, labels))

    def _owner(self, found: Object) -> Key | None:
        """By its labels, where an endpoint of theirs has objects: in other namespaces everybody may write
        them who may write there at all."""
        labels = endpoint_labels(found)
        namespace = found["metadata"].get("namespace", "")
        return labels if labels is not None and namespace in ("", labels[0], self._system) else None

    def _driver(self, before: Object | None, after: Object | None) -> None:
        if before is None or after is None:
            for key in list(self.endpoints):
                self._changed(key)

    def _webhook(self, before: Object | None, after: Object | None) -> None:
        if after is not None:
            self._tell_of_certificate()

    def _tell_of_certificate(self) -> None:
        for told in self.reapplied:
            told()

    def _definition(self, before: Object | None, after: Object | None) -> None:
        """Kinds of other projects come and go with their definitions."""
        found = after or before
        assert found is not None
        if after is not None and found["metadata"]["name"] == NAME:
            self._tell_of_certificate()
        for resource in OPTIONAL:
            if found["metadata"]["name"] != resource.definition:
                continue
            if after is not None and resource not in self._optional:
                self._optional[resource] = self._start(self.owned[resource])
            elif after is None and resource in self._optional:
                self._optional.pop(resource).cancel()
                self.owned[resource].clear()
            else:
                continue
            for key in list(self.endpoints):
                self._changed(key)


def labels_of(key: Key) -> Key:
    """What of an endpoint's namespace and name its objects carry as labels."""
    return names.label(key[0]), names.label(key[1])


def endpoint_labels(found: Object) -> Key | None:
    """None for an object that belongs to no endpoint."""
    labels: Mapping[str, str] = found["metadata"].get("labels") or {}
    namespace, name = labels.get(names.NAMESPACE_LABEL), labels.get(names.ENDPOINT_LABEL)
    return (namespace, name) if namespace and name else None


def oldest(reflectors: Iterable[Reflector]) -> float:
    """Seconds since the API server was last heard on the watch that is the most out of date."""
    return max((reflector.age for reflector in reflectors), default=0.0)
