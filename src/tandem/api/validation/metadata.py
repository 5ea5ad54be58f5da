"""Mistakes in metadata, which the resource's own schema does not describe."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tandem.api.conventions import MOST_ANNOTATION_BYTES, annotation_bytes
from tandem.api.crd import schema_problems
from tandem.api.validation.report import Found
from tandem.api.validation.schema import Schema, rule_of
from tandem.api.validation.subject import Subject

_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_NAMESPACE = re.compile(_LABEL)
_WORD = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_A_WORD = "at most 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends"
_A_LABEL = "lower-case letters, digits and '-', with a letter or digit at both ends"

_TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
_WORD_OF_OWNER: Schema = {"type": "string", "minLength": 1}
_OWNER: Schema = {
    "type": "object",
    "required": ["apiVersion", "kind", "name", "uid"],
    "properties": {
        **dict.fromkeys(("apiVersion", "kind", "name", "uid"), _WORD_OF_OWNER),
        "blockOwnerDeletion": {"type": "boolean"},
        "controller": {"type": "boolean"},
    },
}
_TYPES: dict[str, Schema] = {
    "annotations": _TEXTS,
    "creationTimestamp": {"type": "string"},
    "deletionGracePeriodSeconds": {"type": "integer"},
    "deletionTimestamp": {"type": "string"},
    "finalizers": {"type": "array", "items": {"type": "string", "minLength": 1}},
    "generateName": {"type": "string"},
    "generation": {"type": "integer"},
    "labels": _TEXTS,
    "managedFields": {"type": "array", "items": {"type": "object"}},
    "name": {"type": "string"},
    "namespace": {"type": "string"},
    "ownerReferences": {"type": "array", "items": _OWNER},
    "resourceVersion": {"type": "string"},
    "selfLink": {"type": "string"},
    "uid": {"type": "string"},
}
_SCHEMA: Schema = {"type": "object", "properties": _TYPES}


def metadata_errors(subject: Subject, original: Mapping[str, Any]) -> Iterator[Found]:
    """`original` still has its nulls."""
    metadata, given = subject.object("metadata"), original.get("metadata")
    if not isinstance(given, dict | None):
        return  # the schema's matter
    for at, message in schema_problems(given or {}, _SCHEMA, ("metadata",)):
        yield Found(rule_of(message), at, message)
    name, namespace = metadata.get("name"), metadata.get("namespace")
    if not name and not metadata.get("generateName"):
        yield Found("IEC102", ("metadata", "name"), "is required: a name of your choice, as chat-70b")
    elif isinstance(name, str) and name and not _fits(_SUBDOMAIN, name, 253):
        yield Found(
            "IEC107", ("metadata", "name"), f"must be {_A_LABEL}; '.' is allowed too (it is {name!r})"
        )
    begun = metadata.get("generateName")
    if isinstance(begun, str) and begun and not _begins(begun, alone=not name):
        yield Found(
            "IEC107",
            ("metadata", "generateName"),
            f"must be {_A_LABEL}; '.' is allowed too (it is {begun!r})",
        )
    if isinstance(namespace, str) and namespace and not is_namespace(namespace):
        yield Found("IEC107", ("metadata", "namespace"), f"must be {_A_LABEL} (it is {namespace!r})")
    yield from _keys(metadata, "annotations")
    yield from _keys(metadata, "labels")
    size = annotation_bytes(dict(_pairs(metadata, "annotations")))
    if size > MOST_ANNOTATION_BYTES:
        said = f"are {size} bytes; the limit is {MOST_ANNOTATION_BYTES}"
        yield Found("IEC107", ("metadata", "annotations"), said)


def label_mistake(value: str) -> str | None:
    """What a label's value must be, where a text is none."""
    return None if not value or _fits(_WORD, value, 63) else f"must be {_A_WORD} (it is {value!r})"


def key_mistake(key: str) -> str | None:
    """What the key of a label must be, or the name of a resource, where a text is neither."""
    prefix, slash, name = key.rpartition("/")
    if _fits(_WORD, name, 63) and (not slash or _fits(_SUBDOMAIN, prefix, 253)):
        return None
    return f"must be {_A_WORD}, after an optional domain and '/'"


def is_namespace(name: str) -> bool:
    return _fits(_NAMESPACE, name, 63)


def is_object_name(name: str) -> bool:
    """Whether Secrets and the like can be called so."""
    return _fits(_SUBDOMAIN, name, 253)


def _begins(begun: str, *, alone: bool) -> bool:
    """Whether a name can begin so: a dash at the end is not the end of the name. `alone`: a name is made of
    it, by five letters or digits."""
    masked = f"{begun[:-2]}a" if len(begun) > 1 and begun.endswith("-") else begun
    made = f"{begun[:58]}abcde" if alone else "a"
    return _fits(_SUBDOMAIN, masked, 253) and _fits(_SUBDOMAIN, made, 63)


def _fits(pattern: re.Pattern[str], text: str, most: int) -> bool:
    return len(text) <= most and pattern.fullmatch(text) is not None


def _pairs(metadata: dict[str, Any], section: str) -> list[tuple[str, Any]]:
    given = metadata.get(section)
    return [(str(key), value) for key, value in given.items()] if isinstance(given, dict) else []


def _keys(metadata: dict[str, Any], section: str) -> Iterator[Found]:
    for key, value in _pairs(metadata, section):
        at = ("metadata", section, key)
        prefix, slash, name = key.rpartition("/")
        domain = prefix.lower() if section == "annotations" else prefix
        if mistake := key_mistake(f"{domain}{slash}{name}"):
            yield Found("IEC107", at, mistake)
        if section == "labels" and isinstance(value, str) and (mistake := label_mistake(value)):
            yield Found("IEC107", at, mistake)
