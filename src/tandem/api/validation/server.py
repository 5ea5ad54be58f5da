"""All that the API server refuses, and nothing else: what `kubectl apply` says without an operator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tandem.api.validation.metadata import metadata_errors
from tandem.api.validation.report import Found
from tandem.api.validation.schema import rule_errors, schema_errors
from tandem.api.validation.subject import Subject, location


def server_errors(subject: Subject, original: Mapping[str, Any]) -> Iterator[Found]:
    """The schema, the rules in CEL beside it, and what holds for all objects. `original` is the resource as
    it was written."""
    yield from schema_errors(subject, original)
    yield from metadata_errors(subject, original)
    yield from rule_errors(subject)
    replicas = subject.number("spec.replicas")
    if replicas is not None and replicas < 0:
        # Not in the schema: the API server sees it by the scale subresource.
        yield Found("IEC104", location("spec.replicas"), f"must be at least 0 (it is {replicas})")
