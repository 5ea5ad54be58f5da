"""Conversion between the versions v1 and v1alpha1, lossless both ways.

v1alpha1 lacks fields of v1 (`crd.absent_fields`). An object that is read as v1alpha1 carries them in an
annotation, and gets them back when it is written. What a client of v1alpha1 changes in between wins: a
section that it removed does not come back with what v1alpha1 could not show of it. An object with more than
an annotation can hold is shown without; so it can be read in v1alpha1, as a list with it can be, and is
written in v1 alone.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from tandem.api.conventions import MOST_ANNOTATION_BYTES, annotation_bytes
from tandem.api.crd import absent_fields, schema_problems, spec_and_status
from tandem.api.models import GROUP, VERSIONS
from tandem.api.problem import field_path

ANNOTATION_V1_FIELDS = "tandem.dev/v1-fields"
"""On objects in v1alpha1: the fields of v1 that v1alpha1 does not have, as JSON."""

LABEL_TOO_LARGE = "tandem.dev/v1-fields-too-large"
"""On objects in v1alpha1 whose fields of v1 no annotation holds. A label, as there may be no room even for
another annotation."""


class ConversionError(ValueError):
    """The object cannot be converted; the message says why, with field paths."""


def convert(resource: Mapping[str, Any], version: str) -> dict[str, Any]:
    """The same object in another version (`v1` or `v1alpha1`), a copy.

    The object must be valid in its own version; an empty map of annotations counts as none. Raises
    ConversionError for an unknown version, and where the annotation holds what does not belong there.
    """
    group, _, current = str(resource.get("apiVersion")).partition("/")
    for name in (current, version):
        if group != GROUP or name not in VERSIONS:
            raise ConversionError(f"apiVersion: cannot convert {resource.get('apiVersion')} to {version}")
    converted: dict[str, Any] = copy.deepcopy(dict(resource))
    converted["apiVersion"] = f"{GROUP}/{version}"
    if (current, version) == ("v1", "v1alpha1"):
        _set_aside(converted)
    elif (current, version) == ("v1alpha1", "v1"):
        _bring_back(converted)
    return converted


def convert_review(review: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a ConversionReview (`apiextensions.k8s.io/v1`): all its objects converted, or why not."""
    request = review["request"]
    version = request["desiredAPIVersion"].rpartition("/")[2]
    response: dict[str, Any] = {"uid": request["uid"]}
    try:
        response["convertedObjects"] = [convert(item, version) for item in request["objects"]]
        response["result"] = {"status": "Success"}
    except ConversionError as error:
        response.pop("convertedObjects", None)
        response["result"] = {"status": "Failure", "message": str(error)}
    return {"apiVersion": review["apiVersion"], "kind": review["kind"], "response": response}


def _set_aside(resource: dict[str, Any]) -> None:
    """Move what v1alpha1 does not have into the annotation."""
    fields = {}
    for path in absent_fields("v1alpha1"):
        section = _section(resource, path[:-1])
        if section is not None and path[-1] in section:
            fields[".".join(path)] = section.pop(path[-1])
    record: dict[str, Any] = {"fields": fields} if fields else {}
    metadata = resource.setdefault("metadata", {})
    annotations = metadata.get("annotations") or {}
    if ANNOTATION_V1_FIELDS in annotations:  # somebody's own, on an object in v1: it must survive too
        record["annotation"] = annotations[ANNOTATION_V1_FIELDS]
    if not record:
        return
    text = json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    carrying = annotations | {ANNOTATION_V1_FIELDS: text}
    if annotation_bytes(carrying) <= MOST_ANNOTATION_BYTES:
        metadata["annotations"] = carrying
    else:
        metadata["labels"] = (metadata.get("labels") or {}) | {LABEL_TOO_LARGE: "true"}


def _bring_back(resource: dict[str, Any]) -> None:
    """Put the annotation's fields where they belong, and take the annotation away."""
    metadata = resource.get("metadata") or {}
    if LABEL_TOO_LARGE in (metadata.get("labels") or {}):
        raise ConversionError(
            f"metadata.labels[{LABEL_TOO_LARGE}]: the object has more fields of v1 than v1alpha1 can carry, "
            "and would lose them; change it in v1"
        )
    annotations = metadata.get("annotations") or {}
    if ANNOTATION_V1_FIELDS not in annotations:
        return
    record = _record(annotations.pop(ANNOTATION_V1_FIELDS))
    for path in absent_fields("v1alpha1"):
        section = _section(resource, path[:-1])
        key = ".".join(path)
        if section is not None and key in record["fields"]:
            section.setdefault(path[-1], record["fields"][key])
    if "annotation" in record:
        annotations[ANNOTATION_V1_FIELDS] = record["annotation"]
    if not annotations:
        del metadata["annotations"]


def _section(resource: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any] | None:
    section: Any = resource
    for name in path:
        section = section.get(name) if isinstance(section, dict) else None
    return section if isinstance(section, dict) else None


def _record(text: Any) -> dict[str, Any]:
    """What the annotation holds, judged: whoever writes v1alpha1 could have put anything there, and the API
    server does not judge what conversion returns."""
    where = f"metadata.annotations[{ANNOTATION_V1_FIELDS}]"
    try:
        record = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        raise ConversionError(f"{where}: is not JSON. Tandem writes it; take it away") from None
    fields = record.get("fields", {}) if isinstance(record, dict) else None
    if not isinstance(fields, dict) or not isinstance(record.get("annotation", ""), str):
        raise ConversionError(f"{where}: is not what Tandem writes there; take it away")
    known = {".".join(path): path for path in absent_fields("v1alpha1")}
    problems: list[str] = []
    whole = spec_and_status()
    for key, value in fields.items():
        if key not in known:
            problems.append(f"{key}: is not a field that v1alpha1 lacks")
            continue
        schema = whole
        for name in known[key]:
            schema = schema["properties"][name]
        problems += [f"{field_path(at)}: {what}" for at, what in schema_problems(value, schema, known[key])]
    if problems:
        raise ConversionError(f"{where}: " + "; ".join(problems))
    return {**record, "fields": fields}
