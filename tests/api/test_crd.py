"""The schema as data: HyperPod's fields, each as it is there, and what code reads agrees with it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
import yaml
from annotated_types import Ge, Le
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tandem.api.annotations import known_annotations
from tandem.api.crd import absent_fields, crd, spec_and_status
from tandem.api.crd.schemas import fields
from tandem.api.models import Endpoint
from tandem.cli import main

LISTED = (Path(__file__).parent / "iec-v1-fields.txt").read_text().splitlines()[1:]
"""Every field of HyperPod's v1 (operator v3.2). What is marked `core` is a Kubernetes object, left closed."""

LATER = (
    # Fields of HyperPod that came after that version.
    "spec.inferenceGateway",
    "spec.loadBalancer.idleTimeoutSeconds",
    "spec.metricsCollectorResources",
    "spec.metricsSidecarResources",
    "spec.modelCacheConfig",
    "spec.s3UploaderResources",
    "status.inferenceGateway",
    # What Tandem says in status beyond HyperPod.
    "status.roles",
    "status.transfer",
)

FACTS = (
    *("format", "default", "enum", "nullable", "pattern"),
    *("minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems"),
    *("x-kubernetes-list-type", "x-kubernetes-preserve-unknown-fields"),
)


def facts(line: str) -> tuple[str, dict[str, Any]]:
    """`path: type key=value …` → the path, and what is said of it."""
    path, rest = line.split(": ", 1)
    kind, _, rest = rest.partition(" ")
    said: dict[str, Any] = {"type": kind}
    while rest:
        key, rest = rest.split("=", 1)
        said[key], end = json.JSONDecoder().raw_decode(rest)
        rest = rest[end:].lstrip()
    return path, said


def under(path: str, roots: Any) -> bool:
    return any(path == r or path.startswith((f"{r}.", f"{r}[]")) for r in roots)


def ours() -> Iterator[tuple[str, dict[str, Any]]]:
    core = [path for path, said in map(facts, LISTED) if "core" in said]
    for path, field, required in fields(spec_and_status()):
        if not path.startswith(("spec", "status")) or any(path != c and under(path, [c]) for c in core):
            continue
        said = {key: field[key] for key in ("type", *FACTS) if key in field}
        if required:
            said["required"] = True
        if "additionalProperties" in field:
            said["map"] = field["additionalProperties"].get("type")
        yield path, said


def test_every_field_of_hyperpod_is_there_as_it_is_there_and_no_other_is() -> None:
    listed = dict(map(facts, LISTED))
    for said in listed.values():
        said.pop("core", None)  # compared with the API server's own, in test_crd_server.py
    assert len(listed) == 433
    assert {p: s for p, s in ours() if not under(p, LATER)} == listed


def test_every_later_field_is_accounted_for() -> None:
    assert {r for r in LATER for path, _ in ours() if path == r} == set(LATER)


@pytest.mark.parametrize("version", ["v1", "v1alpha1"])
def test_every_field_is_described(version: str) -> None:
    lacking = [
        p for p, f, _ in fields(spec_and_status(version)) if not f.get("description") and p != "metadata"
    ]
    assert lacking == []


def test_descriptions_are_whole_sentences() -> None:
    texts = {p: f["description"] for p, f, _ in fields(spec_and_status()) if p != "metadata"}
    texts |= {f"tandem.dev/{name}": schema["description"] for name, schema in known_annotations().items()}
    assert [p for p, t in texts.items() if not re.fullmatch(r"\S.*\.", t) or "  " in t] == []


def test_every_pattern_compiles_and_every_default_is_valid() -> None:
    for path, field, _ in fields(spec_and_status()):
        if "pattern" in field:
            re.compile(field["pattern"])
        if "default" in field and "enum" in field:
            assert field["default"] in field["enum"], path
        if "default" in field and "pattern" in field:
            assert re.search(field["pattern"], field["default"]), path


def test_the_older_version_lacks_what_it_lacks_on_hyperpod() -> None:
    schemas = {path: field for path, field, _ in fields(spec_and_status("v1alpha1"))}
    absent = [".".join(path) for path in absent_fields("v1alpha1")]
    assert not any(under(path, absent) for path in schemas)
    newer = {path for path, _, _ in fields(spec_and_status())}
    assert {p for p in newer if not under(p, absent)} == schemas.keys()
    assert schemas["spec"]["required"] == ["modelName", "modelSourceConfig", "worker", "instanceType"]
    assert schemas["spec.modelSourceConfig.modelSourceType"]["enum"] == ["fsx", "s3"]


def test_a_rule_of_the_older_version_names_only_fields_that_it_has() -> None:
    named = [rule["rule"] for _, field, _ in fields(spec_and_status("v1alpha1")) for rule in _rules(field)]
    assert any("s3Storage" in rule for rule in named)
    for path in absent_fields("v1alpha1"):
        assert not any(re.search(rf"\.{path[-1]}\b", rule) for rule in named)


def _rules(field: dict[str, Any]) -> list[dict[str, Any]]:
    rules: list[dict[str, Any]] = field.get("x-kubernetes-validations", [])
    return rules


def test_the_definition_names_both_versions_and_stores_v1() -> None:
    spec = crd()["spec"]
    assert [(v["name"], v["served"], v["storage"]) for v in spec["versions"]] == [
        ("v1", True, True),
        ("v1alpha1", True, False),
    ]
    assert "conversion" not in spec, "or it could not be applied again where an operator converts"
    assert spec["names"]["shortNames"] == ["iec"]


def test_a_conversion_webhook_is_named_in_it() -> None:
    client = {"service": {"name": "tandem", "namespace": "system", "path": "/convert"}, "caBundle": "AA=="}
    assert crd(client)["spec"]["conversion"] == {
        "strategy": "Webhook",
        "webhook": {"clientConfig": client, "conversionReviewVersions": ["v1"]},
    }


def test_kubectl_apply_can_note_the_whole_definition_in_its_annotation() -> None:
    """The API server takes 256 KiB of annotations; half of it is kept for what is to come."""
    assert len(json.dumps(crd(), separators=(",", ":"))) < 200_000


def test_the_command_prints_it_as_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["crd"]) == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed) == crd()
    assert not re.search(r"[&*]id\d", printed), "no YAML references: the schema is for reading"


# The models of what code reads


def described() -> Iterator[tuple[str, type[BaseModel], dict[str, Any], bool]]:
    """Every model with the schema of its place, and whether the model knows all fields of it."""
    yield from _models("", Endpoint, spec_and_status())


def _models(
    path: str, model: type[BaseModel], schema: dict[str, Any]
) -> Iterator[tuple[str, type[BaseModel], dict[str, Any], bool]]:
    yield path, model, schema, model.model_config.get("extra") == "forbid"
    for name, field in model.model_fields.items():
        key = field.alias or name
        inner = _model_in(field.annotation)
        at = schema["properties"].get(key)
        if inner is not None and at is not None and key != "metadata":
            yield from _models(f"{path}.{key}", inner, at.get("items", at))


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((m for a in get_args(annotation) if (m := _model_in(a))), None)


MODELS = {path or "the object": rest for path, *rest in described()}


@pytest.mark.parametrize("path", MODELS)
def test_the_models_agree_with_the_schema(path: str) -> None:
    model, schema, whole = MODELS[path]
    properties: dict[str, Any] = schema["properties"]
    keys = {field.alias or name: field for name, field in model.model_fields.items()}
    assert keys.keys() - properties.keys() == set(), "the schema lacks fields of the model"
    if whole:
        assert properties.keys() - keys.keys() == set(), "the model refuses fields of the schema"
    for key, field in keys.items():
        if path == "the object":
            continue  # kubectl asks for apiVersion, kind and metadata by itself
        at, where = properties[key], f"{path}.{key}"
        assert field.is_required() == (key in schema.get("required", ())), where
        if not field.is_required() and field.annotation is not Any:  # Any: kept as it came, not read
            assert field.default == at.get("default", field.default if field.default == () else None), where
        if get_origin(field.annotation) is not None and (values := _literals(field)):
            assert values == set(at.get("enum") or re.findall(r"\^(\w+)\$", at["pattern"])), where
        for bound in field.metadata:
            if isinstance(bound, Ge) and bound.ge != -(2**31):
                assert at["minimum"] == bound.ge, where
            if isinstance(bound, Le):
                assert at["maximum"] == bound.le, where


def _literals(field: FieldInfo) -> set[str]:
    return {a for a in get_args(field.annotation) if isinstance(a, str)}
