"""What to say of a field that the schema does not have. Most are in a wrong place, or of another version."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from tandem.api.annotations import PREFIX
from tandem.api.crd import absent_fields, annotation_schemas, spec_and_status
from tandem.api.crd.schemas import Schema, fields
from tandem.api.crd.structural import Location
from tandem.api.models import GROUP, VERSIONS, Role
from tandem.api.problem import field_path
from tandem.api.validation.subject import Subject

_ROLES = {"prefillSpec": Role.PREFILL, "decodingSpec": Role.DECODE}
_CONTAINER = {
    "env": "environmentVariables",
    "ports": "modelInvocationPort",
    "volumeMounts": "modelVolumeMount",
}
"""Names of a Kubernetes container, and of the worker's fields for the same."""

_LITTLE = ("enabled", "name", "namespace", "path", "port")
"""Names that many objects have for things of their own."""

_MOST_PLACES = 4
_MOST_FIELDS = 8


def advice(at: Location, message: str, subject: Subject, schema: Schema) -> str:
    """What `schema_problems` says of an unknown field, and where it belongs, if that is known."""
    if at in absent_fields(subject.version):
        return f"is not a field of {subject.version}; write apiVersion: {GROUP}/{VERSIONS[0]}"
    if at[:-1] == ("spec", "worker") and at[-1] in _CONTAINER:
        return f"is not a field; here it is {_CONTAINER[str(at[-1])]}"
    ways = [*_places(at, subject.version), *(_annotations(at) if subject.disaggregated else ())]
    if ways:
        return f"is not a field; it belongs in {_any_of(ways)}"
    known = _known(at[:-1], schema)
    if message == "is not a field" and 0 < len(known) <= _MOST_FIELDS:
        return f"is not a field; there are {', '.join(known)}"
    return message


def _any_of(ways: list[str]) -> str:
    return " or ".join([", ".join(ways[:-1]), ways[-1]] if ways[1:] else ways)


def _places(at: Location, version: str) -> list[str]:
    """The objects that have a field of that name, those nearest to `at` alone; none where there are many."""
    homes = _homes(version).get(str(at[-1]), ()) if all(isinstance(name, str) for name in at) else ()
    near = max((_shared(home, at) for home in homes), default=0)
    nearest = [field_path(home) for home in homes if _shared(home, at) == near]
    return nearest if len(nearest) <= _MOST_PLACES else []


def _shared(home: Location, at: Location) -> int:
    """How many names two paths have in common at their beginning."""
    return next(
        (i for i, (a, b) in enumerate(zip(home, at, strict=False)) if a != b), min(len(home), len(at))
    )


@cache
def _homes(version: str) -> dict[str, tuple[Location, ...]]:
    """By the name of each field of the resource's own: the objects that have it. Kubernetes' own fields, and
    those of a list's items, are left out: their names say little."""
    found: dict[str, tuple[Location, ...]] = {}
    for path, _, _ in fields(spec_and_status(version)):
        *home, name = path.split(".")
        foreign = "[]" in path or {"nodeAffinity", "probes", "tokenSecretRef"} & {*home}
        if home[:1] == ["spec"] and not foreign and name not in _LITTLE:
            found[name] = (*found.get(name, ()), tuple(home))
    return found


def _annotations(at: Location) -> Iterator[str]:
    """Those that say the same of one role, or of each."""
    name = {"environmentVariables": "env", "volumeMounts": "volume-mounts"}.get(str(at[-1]), str(at[-1]))
    if at[0] != "spec" or name not in _of_roles():
        return
    role = _ROLES.get(str(at[2])) if len(at) == 4 and at[1] == "pdSpec" else None
    if role is not None:
        yield f"the annotation {PREFIX}{role}-{name}, for these pods alone"
    elif len(at) < 4:
        yield f"the annotations {PREFIX}{Role.PREFILL}-{name} and {PREFIX}{Role.DECODE}-{name}"


@cache
def _of_roles() -> frozenset[str]:
    return frozenset(annotation_schemas()["role"])


def _known(at: Location, schema: Schema) -> list[str]:
    """The names of an object's fields; none where it is no object of the schema."""
    for name in at:
        schema = schema.get("items" if isinstance(name, int) else "properties", {})
        schema = schema if isinstance(name, int) else schema.get(name, {})
    return sorted(schema.get("properties", {}))
