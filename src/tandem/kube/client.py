"""Requests to an API server. Connection and authentication are lightkube's."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import msgspec
from lightkube.config.client_adapter import AsyncClient, ConnectionParams
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.core.exceptions import ConfigError
from yaml import YAMLError

from tandem.kube.errors import ApiError, KubeError, NoCluster
from tandem.kube.objects import Object
from tandem.kube.resources import POD, Resource

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 30.0
WATCH_SECONDS = 300
"""How long the server keeps a watch; then it is opened again where it ended."""
SILENCE_SECONDS = 100.0
"""A watch that is silent for longer may be dead. API servers send a bookmark about each minute, but none
for a kind of which nothing has changed since they started."""
PAGE = 500
"""Objects in one answer to a list."""

_METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"
_WATCH_METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"

_METHODS = {
    "get": "GET",
    "list": "GET",
    "create": "POST",
    "update": "PUT",
    "patch": "PATCH",
    "delete": "DELETE",
}


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


@dataclass(frozen=True)
class Listing:
    items: list[Object]
    version: str
    """From where a watch goes on."""


class Client:
    """Every method raises ApiError for an answer other than success, and KubeError where none came."""

    def __init__(self, http: httpx2.AsyncClient) -> None:
        self._http = http
        self._before_write: Callable[[], None] | None = None
        self.sent: Counter[str] = Counter()
        """Requests so far, watches included, by verb as API servers' rights have them; a page of a list is
        one."""

    def guarded(self, before_write: Callable[[], None]) -> Client:
        """The same, but that each write is preceded by a call, which may raise a KubeError to forbid it."""
        guarded = Client(self._http)
        guarded.sent = self.sent
        guarded._before_write = before_write
        return guarded

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Object | None:
        """None where there is no such object."""
        try:
            return await self._object("get", resource.path(namespace, name))
        except ApiError as error:
            if error.missing:
                return None
            raise

    async def list(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        labels: str = "",
        fields: str = "",
        metadata_only: bool = False,
        whole: bool = True,
    ) -> Listing:
        """All objects, fetched by the page; without `whole` no more than one page. `labels` and `fields` are
        selectors."""
        items: list[Object] = []
        path = resource.path(namespace)
        query = {"limit": str(PAGE), **_selectors(labels, fields)}
        headers = {"Accept": _METADATA_ONLY} if metadata_only else {}
        while True:
            page = await self._send("list", path, query, headers=headers)
            metadata = page.get("metadata")
            found = page.get("items")
            if found is None:
                found = []  # so an empty list is written by some
            if not isinstance(metadata, dict) or not isinstance(found, list) or not all(map(_named, found)):
                raise KubeError(f"GET {path}: the answer is no list of objects")
            for item in found:
                # Items of a list come without the words that each has by itself.
                item.setdefault("apiVersion", resource.api_version)
                item.setdefault("kind", resource.kind)
                items.append(item)
            more = metadata.get("continue")
            if not more or not whole:
                return Listing(items, metadata.get("resourceVersion", ""))
            query["continue"] = more

    async def apply(self, desired: Object, resource: Resource, *, manager: str, force: bool = True) -> Object:
        """Server-side apply: create the object or make its fields so; returns it as it is then. Nothing is
        written where it is so already. `force` takes fields over that others manage."""
        metadata = desired["metadata"]
        query = {"fieldManager": manager, "force": "true" if force else "false"}
        path = resource.path(metadata.get("namespace"), metadata["name"])
        return await self._object("patch", path, query, desired, "application/apply-patch+yaml")

    async def create(self, made: Object, resource: Resource, *, manager: str) -> Object:
        path = resource.path(made["metadata"].get("namespace"))
        return await self._object("create", path, {"fieldManager": manager}, made)

    async def replace(self, made: Object, resource: Resource, *, manager: str) -> Object:
        """With the object's resourceVersion: a conflict where another wrote meanwhile."""
        metadata = made["metadata"]
        path = resource.path(metadata.get("namespace"), metadata["name"])
        return await self._object("update", path, {"fieldManager": manager}, made)

    async def patch(
        self,
        resource: Resource,
        name: str,
        namespace: str | None,
        change: Object,
        *,
        manager: str,
        subresource: str | None = None,
    ) -> Object:
        """A JSON merge patch (RFC 7386). With `metadata.resourceVersion` in it, a conflict where another
        wrote meanwhile."""
        path = resource.path(namespace, name, subresource)
        return await self._object(
            "patch", path, {"fieldManager": manager}, change, "application/merge-patch+json"
        )

    async def delete(
        self, resource: Resource, name: str, namespace: str | None = None, *, uid: str | None = None
    ) -> None:
        """What is gone already is no error. With `uid` only that object, not a new one of the same name."""
        options: Object = {"propagationPolicy": "Background"}
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        try:
            await self._send("delete", resource.path(namespace, name), None, options)
        except ApiError as error:
            if not error.missing and not (uid is not None and error.conflict):
                raise

    async def watch(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        version: str,
        labels: str = "",
        fields: str = "",
        metadata_only: bool = False,
    ) -> AsyncIterator[tuple[str, Object]]:
        """OPEN, without an object, when the server has taken the watch; then changes after `version`: ADDED,
        MODIFIED or DELETED with the object, BOOKMARK with its version.

        Ends when the server ends it (after five minutes), or has been silent for so long that one may ask
        whether it is still there. Raises ApiError (`gone`) where the server no longer knows the version.
        """
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_SECONDS),
            **_selectors(labels, fields),
        }
        headers = {"Accept": _WATCH_METADATA_ONLY} if metadata_only else {}
        path = resource.path(namespace)
        timeout = httpx2.Timeout(CONNECT_SECONDS, read=SILENCE_SECONDS)
        self.sent["watch"] += 1
        opened = False
        try:
            async with self._http.stream(
                "GET", path, params=query, headers=headers, timeout=timeout
            ) as answer:
                if answer.status_code != 200:
                    raise _refusal(answer.status_code, await answer.aread())
                opened = True
                yield "OPEN", {}
                async for line in answer.aiter_lines():
                    event = msgspec.json.decode(line, type=_Event)
                    found: Object = msgspec.json.decode(event.object, type=dict)
                    if event.type == "ERROR":
                        raise _error(found.get("code", 500), found)
                    if not (_versioned(found) if event.type == "BOOKMARK" else _named(found)):
                        raise KubeError(f"GET {path}: an event without an object")
                    yield event.type, found
        except httpx2.ReadTimeout as error:
            if not opened:
                raise KubeError(f"GET {path}: {_text(error)}") from error
        except (httpx2.HTTPError, httpx2.StreamError, msgspec.DecodeError) as error:
            raise KubeError(f"GET {path}: {_text(error)}") from error

    async def log(self, pod: str, namespace: str, container: str, *, most_bytes: int) -> str:
        """What a container has logged since it was last started, from the beginning."""
        query = {"container": container, "limitBytes": str(most_bytes)}
        answer = await self._answer("get", POD.path(namespace, pod, "log"), query)
        return answer.content.decode("utf-8", "replace")

    async def _object(
        self,
        verb: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
    ) -> Object:
        """What every answer is but those to lists and deletions."""
        found = await self._send(verb, path, query, body, content_type)
        if not _named(found):
            raise KubeError(f"{_METHODS[verb]} {path}: the answer is no object of the API")
        return found

    async def _send(
        self,
        verb: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
        headers: Mapping[str, str] | None = None,
    ) -> Object:
        content = None if body is None else msgspec.json.encode(body)
        sent = dict(headers or {})
        if content is not None:
            sent["Content-Type"] = content_type
        answer = await self._answer(verb, path, query, content, sent)
        try:
            found: Any = msgspec.json.decode(answer.content)
        except msgspec.DecodeError as error:
            raise KubeError(f"{_METHODS[verb]} {path}: the answer is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise KubeError(f"{_METHODS[verb]} {path}: the answer is no object")
        return found

    async def _answer(
        self,
        verb: str,
        path: str,
        query: Mapping[str, str] | None = None,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx2.Response:
        method = _METHODS[verb]
        if self._before_write is not None and verb not in ("get", "list"):
            self._before_write()
        self.sent[verb] += 1
        try:
            answer = await self._http.request(method, path, params=query, content=content, headers=headers)
        except (httpx2.HTTPError, ConfigError) as error:
            raise KubeError(f"{method} {path}: {_text(error)}") from error
        if answer.status_code >= 300:
            raise _refusal(answer.status_code, answer.content)
        return answer


@asynccontextmanager
async def connect(kubeconfig: Path | None = None, context: str | None = None) -> AsyncIterator[Client]:
    """A client for the cluster of the file; without one, that of the pod's service account, of $KUBECONFIG
    or of ~/.kube/config. A service account's token is read again when it has changed.

    Raises NoCluster.
    """
    try:
        config = _configuration(kubeconfig, context)
        timeout = httpx2.Timeout(CONNECT_SECONDS, read=ANSWER_SECONDS)
        http = AsyncClient(config, ConnectionParams(timeout=timeout, trust_env=False))
    except (ConfigError, OSError, ValueError) as error:
        raise NoCluster(str(error)) from error
    async with http:
        yield Client(http)


def _configuration(kubeconfig: Path | None, context: str | None) -> SingleConfig:
    try:
        found = KubeConfig.from_file(kubeconfig) if kubeconfig else KubeConfig.from_env()
        config = found.get(context_name=context) if context else found.get()
    except (AttributeError, KeyError, TypeError, YAMLError) as error:
        where = f" {kubeconfig}" if kubeconfig else ""
        raise NoCluster(f"the kubeconfig{where} is none: {type(error).__name__}: {error}") from error
    if config is None:
        raise NoCluster("the configuration names no cluster: give a context")
    return config


def _versioned(found: Object) -> bool:
    metadata = found.get("metadata")
    return isinstance(metadata, dict) and isinstance(metadata.get("resourceVersion"), str)


def _named(found: object) -> bool:
    """Whether it is an object as every store here needs it."""
    return isinstance(found, dict) and _versioned(found) and isinstance(found["metadata"].get("name"), str)


def _selectors(labels: str, fields: str) -> dict[str, str]:
    return {name: value for name, value in (("labelSelector", labels), ("fieldSelector", fields)) if value}


def _refusal(status: int, content: bytes) -> ApiError:
    try:
        found = msgspec.json.decode(content)
    except msgspec.DecodeError:
        found = None
    if not isinstance(found, dict):
        found = {"message": content[:500].decode("utf-8", "replace")}
    return _error(status, found)


def _error(status: int, found: Object) -> ApiError:
    return ApiError(
        status, found.get("reason") or "", found.get("message") or f"status {status}", found.get("details")
    )


def _text(error: Exception) -> str:
    """Time-outs of the library have no words of their own."""
    return str(error) or type(error).__name__
