"""Judging an `InferenceEndpointConfig`: every mistake at once, with its field path and its place in a file.

`validate` here judges the resource by itself. `tandem.engine.validation.validate` judges the engines' flags
and environment too; that is what the command and admission use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tandem.api.conversion import ANNOTATION_V1_FIELDS, LABEL_TOO_LARGE, ConversionError, convert
from tandem.api.crd import without_defaults
from tandem.api.crd.structural import Location
from tandem.api.validation.checks import CHECKS
from tandem.api.validation.manifest import Document, Manifest, read_manifest
from tandem.api.validation.report import Finding, Found, Lines, Position, Report, Severity, report
from tandem.api.validation.rules import RULES, Rule
from tandem.api.validation.schema import rule_errors, schema_of
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
        whole = subject
        if (place := _carries(subject)) is not None:
            try:
                whole = Subject(convert(subject.resource, "v1"))
                yield from rule_errors(whole)
            except ConversionError as error:
                yield Found("IEC301", place, str(error).partition(": ")[2])
        for check in (*CHECKS, *checks):
            yield from check(whole)

    return report(found(), lines)


def _carries(subject: Subject) -> Location | None:
    """Where an object in v1alpha1 says something of its fields of v1."""
    if subject.version == "v1alpha1":
        for section, name in (("labels", LABEL_TOO_LARGE), ("annotations", ANNOTATION_V1_FIELDS)):
            if isinstance(subject.object(f"metadata.{section}").get(name), str):
                return "metadata", section, name
    return None
