"""Reading a resource that may be wrong anywhere: what is not of the expected shape counts as left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tandem.api.crd.structural import Location, without_nulls
from tandem.api.models import GROUP, VERSIONS


def location(path: str, *more: str | int) -> Location:
    """`location("spec.tags", 0, "name")` → ('spec', 'tags', 0, 'name')."""
    return (*path.split("."), *more)


class Subject:
    """A resource for checks to read. `path` is dotted, as `spec.worker.args`; null counts as left out."""

    def __init__(self, resource: Mapping[str, Any]) -> None:
        self.resource = without_nulls(_with_texts(resource))

    @property
    def version(self) -> str:
        """The version that the resource is written in; v1 when it says none that is served."""
        group, _, version = str(self.resource.get("apiVersion")).partition("/")
        return version if group == GROUP and version in VERSIONS else VERSIONS[0]

    @property
    def disaggregated(self) -> bool:
        return self.has("spec.pdSpec")

    @property
    def routed(self) -> bool:
        """Whether a router stands before the engines."""
        return self.disaggregated or self.flag("spec.intelligentRoutingSpec.enabled", default=False)

    def get(self, path: str) -> Any:
        value: Any = self.resource
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def has(self, path: str) -> bool:
        return self.get(path) is not None

    def object(self, path: str) -> dict[Any, Any]:
        value = self.get(path)
        return value if isinstance(value, dict) else {}

    def text(self, path: str, default: str = "") -> str:
        value = self.get(path)
        return value if isinstance(value, str) else default

    def flag(self, path: str, *, default: bool) -> bool:
        value = self.get(path)
        return value if isinstance(value, bool) else default

    def number(self, path: str) -> int | None:
        return whole(self.get(path))

    def texts(self, path: str) -> tuple[str, ...]:
        value = self.get(path)
        return tuple(v for v in value if isinstance(v, str)) if isinstance(value, list) else ()

    def objects(self, path: str) -> Iterator[tuple[Location, dict[str, Any]]]:
        """The objects of a list, each with its location."""
        return objects_in(self.get(path), location(path))

    @property
    def annotations(self) -> dict[str, str]:
        """Those that are text."""
        given = self.object("metadata.annotations")
        return {k: v for k, v in given.items() if isinstance(k, str) and isinstance(v, str)}


def _with_texts(resource: Mapping[str, Any]) -> dict[str, Any]:
    """Annotations and labels without a value have an empty one: there alone null is no field left out."""
    metadata = resource.get("metadata")
    if not isinstance(metadata, dict):
        return dict(resource)
    maps = {
        name: metadata[name] for name in ("annotations", "labels") if isinstance(metadata.get(name), dict)
    }
    texts = {
        name: {key: "" if text is None else text for key, text in given.items()}
        for name, given in maps.items()
    }
    return {**resource, "metadata": {**metadata, **texts}}


def objects_in(value: Any, at: Location) -> Iterator[tuple[Location, dict[str, Any]]]:
    """The objects of a list that lies at `at`."""
    for i, item in enumerate(value if isinstance(value, list) else ()):
        if isinstance(item, dict):
            yield (*at, i), item


def whole(value: Any) -> int | None:
    """A whole number, however it is written; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        return None
    return int(value)
