"""Whatever a resource looks like it is judged, and its schema by `validate` as by the schema itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.api.annotations import known_annotations, parse_annotations
from tandem.api.crd import schema_problems, spec_and_status
from tandem.api.crd.schemas import fields
from tandem.api.validation import RULES, read_manifest
from tandem.api.validation.schema import schema_errors
from tandem.api.validation.subject import Subject, without_nulls
from tandem.engine.validation import validate

from .conftest import with_fields
from .manifests import MANIFESTS, S3

SCHEMA = spec_and_status()
NAMES = sorted({name for path, _, _ in fields(SCHEMA) for name in path.replace("[]", "").split(".")})
WORDS = [
    "s3",
    "fsx",
    "huggingface",
    "kubernetesVolume",
    "kvaware",
    "redis",
    "",
    "shm",
    "8",
    "8Gi",
    "/a",
    "ml.p5",
]
FLAGS = [
    "--max-model-len",
    "--port=8000",
    "-tp",
    "8",
    "--no-enable-prefix-caching",
    "serve",
    "--model",
    "--",
    "-O3",
]
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.sampled_from([*WORDS, *FLAGS, "$(A)", "{"])
    | st.text(max_size=5)
)
names = (
    st.sampled_from(NAMES) | st.text(max_size=5) | st.sampled_from(["nvidia.com/gpu", "cpu", "hugepages-2Mi"])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=6),
    max_leaves=25,
)
quick = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@st.composite
def plausible(draw: st.DrawFn) -> Any:
    """A good manifest with values of any shape in a few known places."""
    resource = copy.deepcopy(yaml.safe_load(MANIFESTS[draw(st.sampled_from(sorted(MANIFESTS)))]))
    for path in draw(st.lists(st.sampled_from(PATHS), min_size=1, max_size=4)):
        place = resource
        for name in path[:-1]:
            inner = place.get(name)
            if not isinstance(inner, dict):
                inner = place[name] = {}
            place = inner
        place[path[-1]] = draw(values)
    return resource


PATHS = [tuple(path.split(".")) for path, _, _ in fields(SCHEMA) if "[]" not in path]
PATHS += [("metadata",), ("apiVersion",), ("metadata", "annotations"), ("metadata", "name")]
PATHS += [("metadata", "annotations", f"tandem.dev/{name}") for name in known_annotations()]


def assert_sound(resource: Any) -> None:
    before = copy.deepcopy(resource)
    report = validate(resource)
    assert repr(resource) == repr(before)
    for finding in report.findings:
        assert finding.rule in RULES
        assert finding.message
        assert str(finding)


@quick
@given(st.dictionaries(names, values, max_size=6))
def test_any_object_is_judged(resource: dict[str, Any]) -> None:
    assert_sound(resource)


@quick
@given(plausible())
def test_a_manifest_with_anything_in_it_is_judged(resource: dict[str, Any]) -> None:
    assert_sound(resource)


@quick
@given(plausible())
def test_the_schemas_mistakes_are_those_of_the_schema(resource: dict[str, Any]) -> None:
    """Two readings of the schema agree: this one passes over null, and leaves status to its owner."""
    judged = {k: v for k, v in without_nulls(resource).items() if k != "status"}
    straight = {at for at, _ in schema_problems(judged, SCHEMA)}
    told = {f.at for f in schema_errors(Subject(resource), resource)} - {("apiVersion",)}
    assert straight - {("apiVersion",)} <= told
    for at in told - straight:
        assert at[0] == "status" or _at(resource, at) is None, "an unknown name, without a value"


def _at(value: Any, location: tuple[str | int, ...]) -> Any:
    for part in location:
        if isinstance(value, dict):
            value = next((v for k, v in value.items() if str(k) == part), None)
        elif isinstance(value, list) and isinstance(part, int):
            value = value[part]
    return value


PIECES = [
    *(f"!!{tag} " for tag in ("int", "float", "bool", "null", "binary", "timestamp", "str", "merge", "set")),
    *(
        '"\\U00110000"',
        '"\\UFFFFFFFF"',
        '"\\ud800"',
        '"\\x4"',
        "''",
        '"-"',
        "_",
        "0x",
        ".",
        "1e999",
        "\ud800",
    ),
    *("a: ", "- ", "[", "]", "{", "}", ", ", "\n", "\t", "&a ", "*a", "<<: ", "? ", "| ", "%TAG ! a\n--- "),
]


@quick
@given(
    st.text(alphabet="abkind:-{}[]&*!#'\"\n\t ,<?|>~0.1\\\u00e9", max_size=80)
    | st.lists(st.sampled_from(PIECES), max_size=8).map("".join)
)
def test_any_text_can_be_read(text: str) -> None:
    """In a file and in an annotation."""
    manifest = read_manifest(text, "x")
    parse_annotations({"tandem.dev/decode-env": text})
    for finding in manifest.findings:
        assert finding.rule in ("IEC001", "IEC002", "IEC004")
        assert finding.position is not None


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_file_that_is_cut_off_anywhere_is_told_or_judged(name: str) -> None:
    text = MANIFESTS[name]
    for end in range(0, len(text), 13):
        for document in read_manifest(text[:end], "x").documents:
            assert_sound(document.resource)


def large(count: int) -> dict[str, Any]:
    """Resources that an API server would take by their size: name → what is at a path."""
    words = [f"--a{i}" for i in range(count)]
    unknown = "{" + ", ".join(f"a{i}: 1" for i in range(count)) + "}"
    return {
        "metadata.annotations": {"tandem.dev/decode-affinity": unknown},
        "spec.worker.args": words,
        "spec.worker.environmentVariables": [{"name": f"A{i}", "value": "$(A0)"} for i in range(count)],
        "spec.kubernetes": {"volumes": [{"name": f"v{i % 7}", "emptyDir": {}} for i in range(count)]},
        "spec.tags": [{"name": f"a{i}"} for i in range(count)],
    }


@pytest.mark.timeout(60)  # seconds where it is well; what grows with the square takes minutes
@pytest.mark.parametrize("path", large(0))
def test_large_resources_are_judged_in_time_and_in_bounds(path: str) -> None:
    """Who may create an endpoint could else stop the operator for all."""
    report = validate(with_fields(S3, {path: large(20_000)[path]}))
    assert 0 < len(report.findings) <= 1000
    assert all(len(finding.message) <= 1000 for finding in report.findings)


@pytest.mark.timeout(60)
def test_long_lists_of_flags_are_laid_over_each_other_in_time() -> None:
    flags = {
        "spec.worker.args": [f"--a{i}" for i in range(1000)],
        "spec.pdSpec.decodingSpec.args": [f"--b.c{i}" for i in range(1000)],
    }
    assert validate(with_fields(S3, flags)).ok
    (error,) = validate(with_fields(S3, {"spec.worker.args": ["--a"] * 1001})).errors
    assert str(error).startswith("error IEC404 spec.worker.args: has 1001 words")


def test_how_many_more_there_are_is_told() -> None:
    """An error is found however many warnings come before it."""
    report = validate(
        with_fields(
            S3,
            {
                "spec.instanceType": ...,
                "spec.instanceTypes": [f"ml.p4.{i}" for i in range(900)],
                "spec.pdSpec.decodingSpec.args": ["--dtype", "none"],
            },
        )
    )
    assert len(report.warnings) == 500
    assert report.warnings[-1].message.endswith("There are more warnings than these 500; they are not told")
    assert [e.rule for e in report.errors] == ["IEC401", "IEC406"]
