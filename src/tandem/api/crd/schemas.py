"""The schemas: read from the YAML files beside this module, assembled, and cut down for the older version.

A file is a structural OpenAPI v3 schema, or several under names of its own. `$ref: FILE` or `$ref: FILE#NAME`
stands for another one; what is written beside it comes on top. The API server knows no references, so the
assembled schema has none.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

Schema = dict[str, Any]
"""A structural OpenAPI v3 schema."""


def spec_and_status(version: str = "v1") -> Schema:
    """The schema of a version's objects (`v1` or `v1alpha1`), a copy that the caller may change."""
    return copy.deepcopy(_object(version))


def absent_fields(version: str) -> tuple[tuple[str, ...], ...]:
    """The fields of v1 that a version does not have, as paths: ('spec', 'pdSpec'). None is in a list."""
    return tuple(tuple(path.split(".")) for path in _version(version).get("absent", ()))


def annotation_schemas() -> dict[str, dict[str, Schema]]:
    """The schemas of the annotations' values: 'endpoint' and 'role' → name below the prefix → schema."""
    return copy.deepcopy(_file("annotations"))


@cache
def _object(version: str) -> Schema:
    schema: Schema = copy.deepcopy(_file("object"))
    changes = _version(version)
    for path in changes.get("absent", ()):
        _remove(schema, path.split("."))
    for path, names in changes.get("required", {}).items():
        _at(schema, path.split("."))["required"] += names
    for path, values in changes.get("enum", {}).items():
        _at(schema, path.split("."))["enum"] = values
    return schema


def _version(version: str) -> dict[str, Any]:
    if version == "v1":
        return {}
    changes: dict[str, Any] = _file("versions")[version]
    return changes


def _at(schema: Schema, path: list[str]) -> Schema:
    for name in path:
        schema = schema["properties"][name]
    return schema


def _remove(schema: Schema, path: list[str]) -> None:
    """Take a field out, and the rules above it that name it: they would not compile."""
    named = re.compile(rf"\.{path[-1]}\b")
    for depth in range(len(path)):
        above = _at(schema, path[:depth])
        rules = [r for r in above.pop("x-kubernetes-validations", []) if not named.search(r["rule"])]
        if rules:
            above["x-kubernetes-validations"] = rules
    del _at(schema, path[:-1])["properties"][path[-1]]


@cache
def _file(name: str) -> Any:
    """A schema file, with every reference in it resolved."""
    return _resolved(_raw(name))


@cache
def _raw(name: str) -> Any:
    return yaml.safe_load(files(__package__).joinpath("schema", f"{name}.yaml").read_text(encoding="utf-8"))


def _resolved(node: Any) -> Any:
    if isinstance(node, list):
        return [_resolved(item) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" not in node:
        return {key: _resolved(value) for key, value in node.items()}
    file, _, name = node["$ref"].partition("#")
    target = _raw(file)[name] if name else _raw(file)
    beside = {key: value for key, value in node.items() if key != "$ref"}
    return _resolved(beside | {key: value for key, value in target.items() if key not in beside})


def fields(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema, bool]]:
    """Every field of a schema: its path (`spec.tags[].name`), its schema, whether it is required."""
    for name, field in schema.get("properties", {}).items():
        at = f"{path}.{name}" if path else name
        yield at, field, name in schema.get("required", ())
        inner = field
        while inner.get("type") == "array":
            at, inner = at + "[]", inner["items"]
        yield from fields(inner, at)
