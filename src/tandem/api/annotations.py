"""What an endpoint's annotations ask for: Tandem's extensions of the resource.

The resource itself is HyperPod's, field by field; what Tandem adds is said in annotations below
`tandem.dev/`. Their schemas are data (`crd/schema/annotations.yaml`): some are for the endpoint, the others
come once for each role, as `tandem.dev/prefill-env` and `tandem.dev/decode-env`. There are none for a
colocated endpoint's workers, which have `spec.worker` and `spec.kubernetes` to themselves, and none for the
router's pod, whose image and namespace are the operator's settings.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import yaml

from tandem.api.conventions import RESERVED_VOLUMES
from tandem.api.conversion import ANNOTATION_V1_FIELDS
from tandem.api.crd import annotation_schemas, schema_problems, with_whole_numbers, without_nulls
from tandem.api.models import Role
from tandem.api.problem import Problem, field_path
from tandem.api.strict_yaml import read_value

PREFIX = "tandem.dev/"


@dataclass(frozen=True)
class RoleExtensions:
    """What one role's pods get besides, or in place of, what the spec says. Objects are Kubernetes' own."""

    image: str | None = None
    env: tuple[dict[str, Any], ...] = ()
    """EnvVars."""
    tolerations: tuple[dict[str, Any], ...] = ()
    affinity: dict[str, Any] | None = None
    volumes: tuple[dict[str, Any], ...] = ()
    volume_mounts: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Extensions:
    """What the annotations of one endpoint ask for."""

    connector: str = "auto"
    managed: bool = True
    """False: Tandem leaves the endpoint alone."""
    paused: bool = False
    """True: what belongs to the endpoint is not changed for now."""
    roles: Mapping[Role, RoleExtensions] = field(default_factory=lambda: {r: RoleExtensions() for r in Role})
    api_keys_secret: str | None = None
    """The Secret with the router's API keys, in the router's namespace."""


def parse_annotations(annotations: Mapping[str, str]) -> tuple[Extensions, list[Problem]]:
    """Read Tandem's annotations among an object's.

    Returns what they ask for and every mistake in them, located as
    `metadata.annotations[tandem.dev/prefill-env][0].name`. An annotation with a mistake is left out of the
    first. Below the prefix an unknown name is a mistake; annotations of others are not looked at.
    """
    problems: list[Problem] = []
    values: dict[str, Any] = {}
    for key, text in annotations.items():
        if not key.startswith(PREFIX) or key == ANNOTATION_V1_FIELDS:
            continue
        name, where = key.removeprefix(PREFIX), f"metadata.annotations[{key}]"
        if name not in known_annotations():
            problems.append(Problem(where, f"is not an annotation that Tandem knows{_hint(name)}"))
            continue
        value, found = _value(text, known_annotations()[name])
        if name.endswith("-volumes") and not found:
            found = [((i, "name"), _taken(v)) for i, v in enumerate(value) if v["name"] in RESERVED_VOLUMES]
        problems += [Problem(_within(where, at), what) for at, what in found]
        if not found:
            values[name] = value
    return _extensions(values), problems


@cache
def _schemas() -> Mapping[str, dict[str, Any]]:
    """Copied once: a copy takes longer than reading an endpoint's annotations."""
    return annotation_schemas()


@cache
def known_annotations() -> Mapping[str, dict[str, Any]]:
    """Every annotation's name below the prefix, and the schema of its value."""
    schemas = _schemas()
    per_role = {f"{role}-{name}": schema for role in Role for name, schema in schemas["role"].items()}
    return schemas["endpoint"] | per_role


_ELSEWHERE = {
    "router": "those for a role are for prefill and decode; routers have the operator's own settings",
    "worker": "those for a role are for prefill and decode; what is for all engines is below spec.worker",
}
"""What else can be said of annotations for what is no role."""


def _hint(name: str) -> str:
    role = name.partition("-")[0]
    if role in _ELSEWHERE:
        return f": {_ELSEWHERE[role]}"
    near = difflib.get_close_matches(name, known_annotations(), n=1)
    return f"; did you mean {PREFIX}{near[0]}?" if near else ""


def _value(text: str, schema: dict[str, Any]) -> tuple[Any, list[tuple[tuple[str | int, ...], str]]]:
    """An annotation's value, and the mistakes in it."""
    value: Any = text
    if schema["type"] == "boolean":
        value = {"true": True, "false": False}.get(text, text)
    elif schema["type"] != "string":
        try:
            value = read_value(text)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            at = f" (line {mark.line + 1}, column {mark.column + 1} of the value)" if mark else ""
            return None, [((), f"is not YAML: {error.problem or error.context}{at}")]
        except yaml.YAMLError as error:
            return None, [((), f"is not YAML: {error}")]
        except RecursionError:
            return None, [((), "is not YAML: it is nested too deeply")]
    problems = list(schema_problems(value, schema))
    return with_whole_numbers(without_nulls(value)), problems


def _taken(volume: dict[str, Any]) -> str:
    return f"is {volume['name']!r}, which Tandem uses itself; choose another name"


def _within(where: str, at: tuple[str | int, ...]) -> str:
    """`metadata.annotations[a]` and (0, 'name') → `metadata.annotations[a][0].name`."""
    if not at:
        return where
    inner = field_path(at)
    return where + (inner if inner.startswith("[") else f".{inner}")


def _extensions(values: Mapping[str, Any]) -> Extensions:
    of_endpoint = {name.replace("-", "_"): values[name] for name in _schemas()["endpoint"] if name in values}
    roles = {}
    for role in Role:
        given: dict[str, Any] = {}
        for name in _schemas()["role"]:
            value = values.get(f"{role}-{name}")
            if value is not None:
                given[name.replace("-", "_")] = tuple(value) if isinstance(value, list) else value
        roles[role] = RoleExtensions(**given)
    return Extensions(**of_endpoint, roles=roles)
