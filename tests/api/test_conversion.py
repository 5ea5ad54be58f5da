"""v1 and v1alpha1 of one object: nothing is lost either way, and what a client changes in between holds."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tandem.api.conventions import MOST_ANNOTATION_BYTES, annotation_bytes
from tandem.api.conversion import (
    ANNOTATION_V1_FIELDS,
    LABEL_TOO_LARGE,
    ConversionError,
    convert,
    convert_review,
)
from tandem.api.crd import absent_fields, schema_problems, spec_and_status
from tandem.api.models import GROUP, KIND

from .manifests import COLOCATED, MANIFESTS, NVME, S3

V1, OLDER = spec_and_status("v1"), spec_and_status("v1alpha1")
QUANTITIES = ["1", "500m", "16Gi", 8]
NAMES = st.text("abcxyz-ä", min_size=1, max_size=5)


def values(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that a schema allows. Of an object's optional fields a few are given."""
    if schema.get("x-kubernetes-int-or-string"):
        return st.sampled_from(QUANTITIES)
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema["type"]:
        case "object" if "properties" in schema:
            return _objects(schema)
        case "object":
            return st.dictionaries(
                NAMES, values(schema.get("additionalProperties", {"type": "string"})), max_size=2
            )
        case "array":
            lists = st.lists(values(schema["items"]), min_size=schema.get("minItems", 0), max_size=2)
            return lists.filter(lambda v: not [*schema_problems(v, schema)])
        case "boolean":
            return st.booleans()
        case "integer":
            return st.integers(schema.get("minimum", -9), schema.get("maximum", 10**6))
        case "number":
            return st.floats(allow_nan=False, allow_infinity=False)
    if "pattern" in schema:
        texts = st.from_regex(re.sub(r"(?<!\\)\$", r"\\Z", schema["pattern"]))
        return texts.filter(lambda v: len(v) <= schema.get("maxLength", len(v)))
    return st.text(min_size=schema.get("minLength", 0), max_size=8)


@st.composite
def _objects(draw: st.DrawFn, schema: dict[str, Any]) -> dict[str, Any]:
    required = schema.get("required", [])
    optional = sorted(schema["properties"].keys() - required)
    chosen = draw(st.lists(st.sampled_from(optional), max_size=4, unique=True)) if optional else []
    return {name: draw(values(schema["properties"][name])) for name in (*required, *chosen)}


@st.composite
def resources(draw: st.DrawFn, version: str) -> dict[str, Any]:
    schema = V1 if version == "v1" else OLDER
    resource = {
        "apiVersion": f"{GROUP}/{version}",
        "kind": KIND,
        "metadata": {"name": "a", "namespace": "b", "uid": "c"},
        "spec": draw(values(schema["properties"]["spec"])),
    }
    if draw(st.booleans()):
        resource["status"] = draw(values(schema["properties"]["status"]))
    annotations = draw(st.dictionaries(st.sampled_from(["x", "tandem.dev/paused"]), st.text(max_size=5)))
    if version == "v1" and draw(st.integers(0, 9)) == 0:
        annotations[ANNOTATION_V1_FIELDS] = draw(st.text(max_size=5))
    if annotations:
        resource["metadata"] |= {"annotations": annotations}
    return resource


PROPERTY = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


@PROPERTY
@given(resources("v1"))
def test_nothing_is_lost_from_v1_through_v1alpha1_and_back(resource: dict[str, Any]) -> None:
    before = copy.deepcopy(resource)
    older = convert(resource, "v1alpha1")
    assert resource == before, "the object given is left alone"
    unknown = [p for p in schema_problems(older, OLDER) if "is not a field" in p[1]]
    assert unknown == [], "v1alpha1 has every field that it carries"
    assert convert(json.loads(json.dumps(older)), "v1") == resource


@PROPERTY
@given(resources("v1alpha1"), resources("v1"))
def test_nothing_is_lost_from_v1alpha1_through_v1_and_back(
    resource: dict[str, Any], other: dict[str, Any]
) -> None:
    assert convert(convert(resource, "v1"), "v1alpha1") == resource
    carried = convert(other, "v1alpha1")
    assume(ANNOTATION_V1_FIELDS in carried["metadata"].get("annotations", {}))
    assert convert(convert(carried, "v1"), "v1alpha1") == carried, "with fields of v1 aboard too"


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_come_back_as_they_were(name: str) -> None:
    resource = yaml.safe_load(MANIFESTS[name])
    assert convert(convert(resource, "v1alpha1"), "v1") == resource


def test_every_field_that_v1alpha1_lacks_is_set_aside_and_brought_back() -> None:
    resource = yaml.safe_load(COLOCATED)
    for path in absent_fields("v1alpha1"):
        section = resource
        for name in path[:-1]:
            section = section.setdefault(name, {})
        section.setdefault(path[-1], EXAMPLES.get(".".join(path)))
    assert [*schema_problems(resource, V1)] == []
    older = convert(resource, "v1alpha1")
    kept = json.loads(older["metadata"]["annotations"][ANNOTATION_V1_FIELDS])["fields"]
    assert kept.keys() == {".".join(path) for path in absent_fields("v1alpha1")}
    assert convert(older, "v1") == resource


EXAMPLES = {
    "spec.autoScalingSpec.cloudWatchTriggerList": [{"metricName": "m"}],
    "spec.autoScalingSpec.prometheusTriggerList": [{"query": "up"}],
    "spec.dataCapture": {"s3Uri": "s3://b"},
    "spec.dnsConfig": {"hostedZoneId": "Z1"},
    "spec.inferenceGateway": {"enabled": False},
    "spec.kubernetes": {"volumes": [{"name": "v", "emptyDir": {}}]},
    "spec.loadBalancer.idleTimeoutSeconds": 600,
    "spec.maxDeployTimeInSeconds": 60,
    "spec.metricsCollectorResources": {"limits": {"cpu": 1}},
    "spec.metricsSidecarResources": {},
    "spec.modelCacheConfig": {"imageCache": {"enabled": True}},
    "spec.modelSourceConfig.huggingFaceModel": {"modelId": "a/b"},
    "spec.nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}},
    "spec.pdSpec": {"prefillSpec": {}, "decodingSpec": {"replicas": 2}},
    "spec.s3UploaderResources": {},
    "spec.tlsConfig.customCertificateConfig": {
        "acmArn": "arn:aws:acm:us-east-2:123456789012:certificate/ab-12",
        "domainName": "a.example.com",
    },
    "spec.worker.command": ["vllm"],
    "spec.worker.probes": {"livenessProbe": {"tcpSocket": {"port": "http"}}},
    "spec.worker.workingDir": "/",
}
"""A value for each field that v1alpha1 lacks and the manifest does not give."""


def test_what_v1alpha1_can_show_stays_where_it_is() -> None:
    older = convert(yaml.safe_load(S3), "v1alpha1")
    assert older["apiVersion"] == f"{GROUP}/v1alpha1"
    assert older["spec"].keys() >= {"modelName", "instanceType", "worker", "modelSourceConfig", "metrics"}
    assert older["spec"].keys().isdisjoint({"pdSpec", "kvCacheSpec", "intelligentRoutingSpec"})
    assert older["spec"]["worker"].keys() == S3_WORKER - {"args"}


S3_WORKER = yaml.safe_load(S3)["spec"]["worker"].keys()


def test_what_a_client_of_v1alpha1_changes_is_changed() -> None:
    older = convert(yaml.safe_load(S3), "v1alpha1")
    older["spec"]["instanceType"] = "ml.p5e.48xlarge"
    older["metadata"]["labels"] = {"team": "a"}
    newer = convert(older, "v1")
    assert newer["spec"]["instanceType"] == "ml.p5e.48xlarge"
    assert newer["metadata"] == {"name": "pd-s3", "namespace": "team-a", "labels": {"team": "a"}}
    assert newer["spec"]["pdSpec"] == yaml.safe_load(S3)["spec"]["pdSpec"]


def test_a_section_that_a_client_removed_does_not_come_back() -> None:
    resource = yaml.safe_load(COLOCATED)
    trigger = resource["spec"]["autoScalingSpec"].pop("cloudWatchTrigger")
    resource["spec"]["autoScalingSpec"]["cloudWatchTriggerList"] = [trigger]
    older = convert(resource, "v1alpha1")
    assert "cloudWatchTriggerList" not in older["spec"]["autoScalingSpec"]
    del older["spec"]["autoScalingSpec"]
    assert "autoScalingSpec" not in convert(older, "v1")["spec"]


def test_a_client_that_leaves_the_annotation_out_leaves_the_fields_out() -> None:
    older = convert(yaml.safe_load(S3), "v1alpha1")
    del older["metadata"]["annotations"]
    assert "pdSpec" not in convert(older, "v1")["spec"]


@pytest.mark.parametrize("own", [0, 200 << 10, 256 << 10])
def test_what_no_annotation_holds_can_be_read_and_is_not_lost(own: int) -> None:
    """API servers take 256 KiB of annotations: with one object beyond that no list could be read any more."""
    resource = yaml.safe_load(S3)
    resource["metadata"]["labels"] = {"team": "a"}
    if own:
        resource["metadata"]["annotations"] = {"a": "x" * (own - 1)}
    words = ["é" * 1000] * 30 + ["x" * (256 << 10)] * (own == 0)
    resource["spec"]["pdSpec"]["decodingSpec"]["args"] = words
    older = convert(resource, "v1alpha1")
    assert annotation_bytes(older["metadata"].get("annotations", {})) <= MOST_ANNOTATION_BYTES
    assert older["metadata"]["labels"] == {"team": "a", LABEL_TOO_LARGE: "true"}
    assert "pdSpec" not in older["spec"]
    with pytest.raises(
        ConversionError, match=r"^metadata\.labels\[tandem.dev/v1-fields-too-large\]: .*in v1$"
    ):
        convert(older, "v1")


def test_an_annotation_is_filled_up_to_the_last_byte() -> None:
    resource = yaml.safe_load(S3)
    carried = annotation_bytes(convert(resource, "v1alpha1")["metadata"]["annotations"])
    for room, fits in ((0, True), (1, False)):
        resource["metadata"]["annotations"] = {"a": "x" * (MOST_ANNOTATION_BYTES - carried - 1 + room)}
        older = convert(resource, "v1alpha1")
        assert (ANNOTATION_V1_FIELDS in older["metadata"]["annotations"]) is fits
        assert LABEL_TOO_LARGE in older["metadata"].get("labels", {}) or convert(older, "v1") == resource


def test_the_same_version_is_a_copy() -> None:
    resource = yaml.safe_load(NVME)
    same = convert(resource, "v1")
    assert same == resource
    assert same["spec"] is not resource["spec"]


@pytest.mark.parametrize(
    ("annotation", "said"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "is not what Tandem writes there"),
        ('{"fields": 1}', "is not what Tandem writes there"),
        ('{"annotation": 1}', "is not what Tandem writes there"),
        ('{"fields": {"spec.modelName": "x"}}', "spec.modelName: is not a field that v1alpha1 lacks"),
        ('{"fields": {"spec.pdSpec": {"prefillSpec": {}}}}', "spec.pdSpec.decodingSpec: is required"),
        (
            '{"fields": {"spec.worker.args": ["a", 1], "spec.kubernetes": {"volume": []}}}',
            "spec.worker.args[1]: must be a string (it is 1); "
            "spec.kubernetes.volume: is not a field; did you mean volumes?",
        ),
    ],
)
def test_an_annotation_that_holds_something_else_is_refused(annotation: str, said: str) -> None:
    resource = convert(yaml.safe_load(COLOCATED), "v1alpha1")
    resource["metadata"]["annotations"] = {ANNOTATION_V1_FIELDS: annotation}
    with pytest.raises(ConversionError) as error:
        convert(resource, "v1")
    assert str(error.value).startswith(f"metadata.annotations[{ANNOTATION_V1_FIELDS}]: ")
    for part in said.split("; ", 1):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("written", "wanted"), [(f"{GROUP}/v2", "v1"), (f"{GROUP}/v1", "v2"), ("apps/v1", "v1"), (None, "v1")]
)
def test_other_versions_and_groups_are_refused(written: str | None, wanted: str) -> None:
    with pytest.raises(ConversionError, match="apiVersion: cannot convert"):
        convert({"apiVersion": written}, wanted)


def review(*objects: dict[str, Any]) -> dict[str, Any]:
    request = {"uid": "u1", "desiredAPIVersion": f"{GROUP}/v1alpha1", "objects": list(objects)}
    return {"apiVersion": "apiextensions.k8s.io/v1", "kind": "ConversionReview", "request": request}


def test_a_review_is_answered_with_all_its_objects() -> None:
    objects = [yaml.safe_load(text) for text in MANIFESTS.values()]
    answer = convert_review(review(*objects))
    assert answer.keys() == {"apiVersion", "kind", "response"}
    assert answer["response"] == {
        "uid": "u1",
        "result": {"status": "Success"},
        "convertedObjects": [convert(item, "v1alpha1") for item in objects],
    }


def test_a_review_with_an_object_that_cannot_be_converted_fails_with_the_reason() -> None:
    response = convert_review(review(yaml.safe_load(S3), {"apiVersion": "apps/v1"}))["response"]
    assert response == {
        "uid": "u1",
        "result": {"status": "Failure", "message": "apiVersion: cannot convert apps/v1 to v1alpha1"},
    }
