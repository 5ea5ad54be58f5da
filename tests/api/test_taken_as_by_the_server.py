"""Validation, the models and a real API server take the same, field by field: null, fractions, metadata."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.api import InvalidResource, read_endpoint
from tandem.api.crd import spec_and_status, with_whole_numbers, without_defaults, without_nulls
from tandem.api.crd.schemas import Schema, fields
from tandem.api.validation import RULES, Report, read_manifest
from tandem.engine.validation import validate

from .asking import asked
from .conftest import ApiServer, with_fields
from .manifests import COLOCATED, HUGGING_FACE, S3

SCHEMA = spec_and_status()
FIELDS = {path: schema for path, schema, _ in fields(SCHEMA) if path.startswith("spec.")}


def refused(report: Report) -> list[str]:
    return [str(finding) for finding in report.errors if RULES[finding.rule].api_server]


def is_read(resource: dict[str, Any]) -> bool:
    try:
        read_endpoint(resource)
    except InvalidResource:
        return False
    return True


def assert_agreed(server: ApiServer, resources: list[dict[str, Any]], least: int) -> None:
    """All three take or refuse each, at least so many are taken, and what is stored is what is read."""
    taken = asked(server, resources)
    for i, resource in enumerate(resources):
        wrong = refused(validate(resource))
        assert (i not in taken) == bool(wrong), (i, wrong)
        assert (i in taken) == is_read(resource)
    for i, stored in taken.items():
        read = with_whole_numbers(without_nulls(resources[i]))["spec"]
        schema = SCHEMA["properties"]["spec"]
        assert without_defaults(stored["spec"], schema) == without_defaults(read, schema)
        assert [type(n) for n in numbers(stored["spec"], read)] == [type(n) for n in numbers(read, read)]
    assert len(taken) >= least


def numbers(value: Any, like: Any) -> Iterator[Any]:
    """The numbers of a value in the places in which another has some."""
    if isinstance(like, dict):
        for name, inner in like.items():
            yield from numbers(value[name], inner)
    elif isinstance(like, list):
        for part, inner in zip(value, like, strict=True):
            yield from numbers(part, inner)
    elif isinstance(like, int | float) and not isinstance(like, bool):
        yield value


def test_null_at_any_field_is_the_same_to_all(api_server: ApiServer) -> None:
    resources = [with_field(path, None) for path in FIELDS]
    assert_agreed(api_server, resources, least=len(FIELDS) * 3 // 4)


def test_null_in_maps_and_lists_is_the_same_to_all(api_server: ApiServer) -> None:
    role = "spec.pdSpec.prefillSpec"
    resources = [
        with_fields(S3, {f"{role}.nodeSelector": {"a": None, "b": "c"}}),
        with_fields(S3, {f"{role}.resources": {"limits": {"cpu": None, "nvidia.com/gpu": 8}}}),
        with_fields(S3, {f"{role}.args": ["--seed", None]}),
        with_fields(S3, {"spec.instanceType": ..., "spec.instanceTypes": [None]}),
        with_fields(S3, {"spec.kubernetes": {"volumes": [None]}}),
        with_fields(S3, {"spec.tags": [{"name": None, "value": "a"}]}),
    ]
    assert_agreed(api_server, resources, least=2)


@pytest.mark.parametrize("value", [2.0, 2.5, "2", True, 1e300, -1.0])
def test_numbers_however_written_are_the_same_to_all(api_server: ApiServer, value: Any) -> None:
    kinds = ("integer", "number")
    paths = [p for p, s in FIELDS.items() if s.get("type") in kinds or s.get("x-kubernetes-int-or-string")]
    least = len(paths) // 2 if value == 2.0 else 0
    assert_agreed(api_server, [with_field(path, value) for path in paths], least)


@pytest.mark.parametrize("amount", [8, 8.0, 8.5, "8", "8Gi", "eight", None, True])
def test_amounts_are_the_same_to_all(api_server: ApiServer, amount: Any) -> None:
    changes = {"spec.pdSpec.decodingSpec.resources": {"limits": {"nvidia.com/gpu": 8, "memory": amount}}}
    assert_agreed(api_server, [with_fields(S3, changes)], least=0)


GENERATED = ("pd-", "a--", "ab.-", "a" * 253, "Foo-", "-", "a.", "a..", "a" * 300, "a_-", "")


@pytest.mark.parametrize("begun", GENERATED)
def test_names_that_are_to_be_made_are_the_same_to_all(api_server: ApiServer, begun: str) -> None:
    for changes in ({"metadata.name": ...}, {"metadata.name": None}, {"metadata.name": ""}, {}):
        resource = with_fields(S3, {**changes, "metadata.generateName": begun})
        taken = not api_server.refusals(resource)
        assert taken == (not refused(validate(resource)))
        assert taken == is_read(resource)


def test_a_name_that_is_to_be_made_is_known_by_its_beginning() -> None:
    resource = with_fields(S3, {"metadata.name": ..., "metadata.generateName": "chat-"})
    assert read_endpoint(resource).metadata.name == "chat"
    assert read_endpoint(with_fields(S3, {"metadata.generateName": "chat-"})).metadata.name == "pd-s3"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("annotations", None),
        ("annotations", {"a": None}),
        ("annotations", {"tandem.dev/connector": None}),
        ("annotations", {"a": 1}),
        ("labels", {"a": None}),
        ("labels", {"a": True}),
        ("namespace", None),
        ("namespace", ""),
        ("finalizers", [""]),
        ("finalizers", [None]),
        ("ownerReferences", [{}]),
        ("ownerReferences", [{"apiVersion": "v1", "kind": "Pod", "name": "a", "uid": "b"}]),
        ("ownerReferences", [{"apiVersion": "v1", "kind": "Pod", "name": "a", "uid": ""}]),
        ("creationTimestamp", None),
        ("owner", None),
        ("owner", "x"),
    ],
)  # fmt: skip
def test_metadata_is_the_same_to_all(api_server: ApiServer, field: str, value: Any) -> None:
    resource = with_fields(S3, {f"metadata.{field}": value})
    taken = not api_server.refusals(resource)
    assert taken == (not refused(validate(resource)))
    assert taken == is_read(resource)


@pytest.mark.parametrize("status", [None, 5, {}, {"state": "x"}, {"stat": "x"}])
def test_status_is_the_same_to_all(api_server: ApiServer, status: Any) -> None:
    resource = with_fields(S3, {"status": status})
    taken = not api_server.refusals(resource)
    assert taken == (not refused(validate(resource)))
    assert taken == is_read(resource)


CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.yaml"))


def test_what_is_said_of_a_stored_object_is_what_is_said_of_its_manifest(api_server: ApiServer) -> None:
    """Less what is said of a default: nobody can tell who wrote it."""
    resources = [
        document.resource
        for file in CORPUS
        if not file.stem.startswith("bad-")
        for document in read_manifest(file.read_text("utf-8"), file.name).documents
        if document.resource["apiVersion"].endswith("/v1")
    ]
    taken = asked(api_server, resources)
    assert len(taken) == len(resources) > 80
    for i, stored in taken.items():
        written = validate(resources[i], stored=True).findings
        said = [(f.rule, f.path) for f in written if f.path != "status"]  # which is dropped
        found = [(f.rule, f.path) for f in validate(stored, stored=True).findings]
        assert sorted(found) == sorted(said)


def with_field(path: str, value: Any) -> dict[str, Any]:
    """A manifest with a field set, and what else the sections require in which it lies."""
    text = HUGGING_FACE if "huggingFace" in path else COLOCATED if "fsx" in path else S3
    resource = with_fields(text, {})
    place: Any = resource
    schema = SCHEMA
    *sections, last = path.split(".")
    for section in sections:
        name = section.removesuffix("[]")
        schema = schema["properties"][name]
        if place.get(name) in (None, []):
            place[name] = required(schema)
        place = place[name]
        if section.endswith("[]"):
            schema = schema["items"]
            if not place:
                place.append(required(schema))
            place = place[0]
    if last.endswith("[]"):
        place[last.removesuffix("[]")] = [value]
    else:
        place[last] = value
    return resource


def required(schema: Schema) -> Any:
    """The least that a schema takes."""
    match schema:
        case {"type": "object"}:
            return {name: required(schema["properties"][name]) for name in schema.get("required", ())}
        case {"type": "array"}:
            return [required(schema["items"])] if schema.get("minItems") else []
        case {"enum": values}:
            return values[0]
        case {"default": value}:
            return value
        case {"type": "boolean"}:
            return False
        case {"type": "integer" | "number"}:
            return schema.get("minimum", 1)
    return TEXTS.get(schema.get("pattern", ""), "a")


TEXTS = {
    field["pattern"]: text
    for path, text in {
        "spec.tlsConfig.customCertificateConfig.acmArn": "arn:aws:acm:a-b-2:123456789012:certificate/0a1b",
        "spec.dnsConfig.hostedZoneId": "Z1",
        "spec.modelSourceConfig.huggingFaceModel.modelId": "a/b",
    }.items()
    if (field := FIELDS[path])
}
"""What some patterns match."""
