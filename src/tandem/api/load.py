"""Reading a manifest: YAML in, an `Endpoint` or every problem found in it out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.api.conversion import ConversionError, convert
from tandem.api.crd import with_whole_numbers, without_nulls
from tandem.api.models import KIND, Endpoint
from tandem.api.problem import InvalidResource, Problem
from tandem.api.validation.manifest import MOST_BYTES, file_text, read_manifest
from tandem.api.validation.report import Finding, shown_path
from tandem.api.validation.server import server_errors
from tandem.api.validation.subject import Subject


def manifest_text(path: Path) -> str:
    """A file's text. Raises InvalidResource where it is none, or OSError."""
    try:
        with path.open("rb") as file:
            return file_text(file.read(MOST_BYTES + 1))
    except ValueError as error:
        raise InvalidResource(str(path), [Problem("the file", str(error))]) from None


def parse_endpoint(text: str, *, source: str) -> tuple[Endpoint, dict[str, Any]]:
    """Read the one InferenceEndpointConfig of a YAML text; `source` names it in errors.

    Returns the endpoint and the mapping as it was written (for listing fields that have no effect).
    Raises InvalidResource with every problem.
    """
    manifest = read_manifest(text, source)
    problems = [Problem(_place(finding), finding.message) for finding in manifest.findings]
    documents = manifest.documents
    if len(documents) == 1:
        resource = documents[0].resource
        try:
            endpoint = read_endpoint(resource, source=source)
        except InvalidResource as error:
            problems += error.problems
        if not problems:
            return endpoint, resource
    elif not problems:
        held = "; ".join([f"it holds {len(documents) or 'none'}", *manifest.notes])
        problems = [Problem("the file", f"must hold exactly one object of kind {KIND}; {held}")]
    raise InvalidResource(source, problems)


def read_endpoint(resource: Mapping[str, Any], *, source: str = "the object") -> Endpoint:
    """The endpoint that an object describes, in any version that is served.

    Taken is what the API server takes, and as it takes it: null is a field left out, 2.0 is 2, and what an
    object in v1alpha1 carries of v1 comes back. Raises InvalidResource with everything that the API server
    refuses.
    """
    subject = Subject(resource)
    problems = [Problem(shown_path(found.at), found.message) for found in server_errors(subject, resource)]
    if problems:
        raise InvalidResource(source, problems)
    try:
        current = convert(subject.resource, "v1")
    except ConversionError as error:
        where, _, what = str(error).partition(": ")
        raise InvalidResource(source, [Problem(where, what)]) from None
    return Endpoint.model_validate(with_whole_numbers(without_nulls(current)))


def _place(finding: Finding) -> str:
    """Of what is found before there is a resource: the line, as there is no field path."""
    assert finding.position is not None
    return f"line {finding.position.line}, column {finding.position.column}"
