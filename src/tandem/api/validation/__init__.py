"""Judging an `InferenceEndpointConfig`: every mistake at once, with its field path and its place in a file.

`validate` here judges the resource by itself. `tandem.engine.validation.validate` judges the engines' flags
and environment too; that is what the command and admission use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tandem.api.crd import without_defaults
from tandem.api.validation.checks import CHECKS
from tandem.api.validation.manifest import Document, Manifest, read_manifest
from tandem.api.validation.report import Finding, Found, Lines, Position, Report, Severity, report
from tandem.api.validation.rules import RULES, Rule
from tandem.api.validation.schema import schema_of
from tandem.api.validation.server import server_errors
from tandem.api.validation.subject import Subject

__all__ = [
    "RULES",
    "Check",
    "Document",
    "Finding",
    "Found",
    "Lines",
    "Manifest",
    "Position",
    "Report",
    "Rule",
    "Severity",
    "Subject",
    "read_manifest",
    "validate",
]

Check = Callable[[Subject], Iterator[Found]]
"""A pure function that finds mistakes of its kind; it must bear resources of any shape."""


def validate(
    resource: Mapping[str, Any],
    *,
    lines: Lines | None = None,
    checks: Iterable[Check] = (),
    stored: bool = False,
) -> Report:
    """Judge one resource, as it is written: schema, rules in CEL, rules across fields, annotations.

    `lines` (of `read_manifest`) says where each part stands in a file. `checks` are judged besides. `stored`:
    the resource comes from the API server, which has filled defaults in; nothing is said of those. A
    resource of any shape is judged; nothing is raised, and nothing but what it says is looked at.
    """
    if stored:
        resource = without_defaults(dict(resource), schema_of(Subject(resource).version))
    subject = Subject(resource)

    def found() -> Iterator[Found]:
        yield from server_errors(subject, resource)
        for check in (*CHECKS, *checks):
            yield from check(subject)

    return report(found(), lines)
