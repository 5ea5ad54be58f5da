"""Manifests as people write them: what is read, and what is said of mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.api import Endpoint, InvalidResource, Role, parse_endpoint
from tandem.api.conversion import ANNOTATION_V1_FIELDS, convert
from tandem.api.load import manifest_text

from .manifests import COLOCATED, HUGGING_FACE, MANIFESTS, NVME, S3


def parse(text: str) -> Endpoint:
    return parse_endpoint(text, source="endpoint.yaml")[0]


def problems(text: str) -> list[str]:
    with pytest.raises(InvalidResource) as error:
        parse(text)
    return [str(p) for p in error.value.problems]


def changed(*path: str | int, to: Any) -> str:
    """The NVMe manifest with one field set."""
    document = yaml.safe_load(NVME)
    place = document
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = to
    return yaml.safe_dump(document)


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_of_hyperpod_load_unchanged(name: str) -> None:
    endpoint, raw = parse_endpoint(MANIFESTS[name], source=name)
    assert raw == yaml.safe_load(MANIFESTS[name])
    assert endpoint.metadata.name == raw["metadata"]["name"]


def test_what_a_manifest_says_is_read() -> None:
    endpoint = parse(S3)
    pd = endpoint.spec.pd_spec
    assert pd is not None
    assert (pd.routing_threshold, pd.prefill_spec.replicas, pd.decoding_spec.replicas) == (4096, 2, 1)
    assert pd.role(Role.PREFILL).args == ("--max-num-seqs", "16", "--enforce-eager")
    assert pd.role(Role.DECODE).args == ("--max-num-seqs", "32")
    assert endpoint.spec.worker.environment_variables[0].name == "PD_BUFFER_SIZE"


def test_what_a_manifest_leaves_out_has_the_defaults_of_the_resource() -> None:
    endpoint = parse(HUGGING_FACE.replace("  namespace: team-a\n", ""))
    pd = endpoint.spec.pd_spec
    assert pd is not None
    assert (pd.routing_threshold, pd.prefill_spec.replicas, pd.decoding_spec.replicas) == (4096, 1, 1)
    assert endpoint.metadata.namespace == "default"
    assert endpoint.spec.worker.model_volume_mount.mount_path == "/opt/ml/model"
    assert parse(COLOCATED).spec.pd_spec is None


def test_request_limits_are_read_with_their_defaults() -> None:
    def limits(text: str) -> tuple[int | None, int | None, int] | None:
        read = parse(text).spec.worker.request_limits
        return read and (read.max_concurrent_requests, read.max_queue_size, read.overflow_status_code)

    assert limits(NVME) is None
    assert limits(changed("spec", "worker", "requestLimits", to=None)) is None
    assert limits(changed("spec", "worker", "requestLimits", to={})) == (None, None, 429)
    assert limits(COLOCATED) == (64, 16, 503)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("maxConcurrentRequests", 0, "must be at least 1 (it is 0)"),
        ("maxConcurrentRequests", "64", "must be a whole number (it is '64')"),
        ("maxConcurrentRequests", 2**31, "must be at most 2147483647"),
        ("maxQueueSize", -1, "must be at least 0 (it is -1)"),
        ("maxQueueSize", 1.5, "must be a whole number (it is 1.5)"),
        ("overflowStatusCode", 399, "must be at least 400 (it is 399)"),
        ("overflowStatusCode", 600, "must be at most 599 (it is 600)"),
        ("maxConcurrentRequest", 5, "is not a field; did you mean maxConcurrentRequests?"),
    ],
)
def test_a_limit_that_cannot_be_is_told_with_its_path(name: str, value: Any, said: str) -> None:
    (problem,) = problems(changed("spec", "worker", "requestLimits", to={name: value}))
    assert problem.startswith(f"spec.worker.requestLimits.{name}: ")
    assert said in problem


def test_the_older_version_of_the_resource_is_read_too() -> None:
    """With what it carries of v1, as after the API server's own conversion."""
    older = convert(yaml.safe_load(S3), "v1alpha1")
    assert "pdSpec" not in older["spec"]
    assert parse(yaml.safe_dump(older)) == parse(S3)


def test_what_an_object_in_the_older_version_carries_is_judged_too() -> None:
    older = convert(yaml.safe_load(S3), "v1alpha1")
    older["metadata"]["annotations"][ANNOTATION_V1_FIELDS] = '{"fields": {"spec.pdSpec": 1}}'
    (problem,) = problems(yaml.safe_dump(older))
    assert problem.startswith(f"metadata.annotations[{ANNOTATION_V1_FIELDS}]: spec.pdSpec: must be an object")


def test_a_field_that_is_carried_with_null_is_left_out() -> None:
    older = convert(yaml.safe_load(S3), "v1alpha1")
    carried = json.loads(older["metadata"]["annotations"][ANNOTATION_V1_FIELDS])
    carried["fields"]["spec.pdSpec"]["routingThreshold"] = None
    older["metadata"]["annotations"][ANNOTATION_V1_FIELDS] = json.dumps(carried)
    pd = parse(yaml.safe_dump(older)).spec.pd_spec
    assert pd is not None
    assert pd.routing_threshold == 4096


def test_an_endpoint_is_found_among_other_objects() -> None:
    others = "apiVersion: v1\nkind: Secret\nmetadata: {name: s}\n---\n# nothing\n---\n[1, 2]\n---\n"
    assert parse(others + NVME).metadata.name == "pd-nvme"


def test_every_problem_is_told_at_once_with_its_path() -> None:
    text = """
apiVersion: apps/v1
kind: InferenceEndpointConfig
metadata: {name: Upper}
spec:
  modelSourceConfig: {modelSourceType: gcs}
  pdSpec:
    routingThreshold: -1
    prefillSpec: {replicas: 0}
    decodingSpec: {replica: 1}
  worker:
    image: 3
    args: --model
    modelInvocationPort: {containerPort: 70000}
    modelVolumeMount: {}
    environmentVariables: [{name: A, value: "1"}, {name: B, value: 1}]
"""
    found = dict(p.split(": ", 1) for p in problems(text))
    assert found.keys() == {
        "apiVersion",
        "metadata.name",
        "spec.modelName",
        "spec.modelSourceConfig.modelSourceType",
        "spec.pdSpec.routingThreshold",
        "spec.pdSpec.prefillSpec.replicas",
        "spec.pdSpec.decodingSpec.replica",
        "spec.worker.image",
        "spec.worker.args",
        "spec.worker.modelInvocationPort.containerPort",
        "spec.worker.modelVolumeMount.name",
        "spec.worker.resources",
        "spec.worker.environmentVariables[1].value",
    }
    assert found["apiVersion"] == "is 'apps/v1'; use inference.sagemaker.aws.amazon.com/v1"
    assert found["spec.modelName"] == "is required"
    assert "kubernetesVolume" in found["spec.modelSourceConfig.modelSourceType"]
    assert "(it is 'gcs')" in found["spec.modelSourceConfig.modelSourceType"]
    assert found["spec.worker.args"].startswith("must be a list (it is '--model'); ")
    assert found["spec.worker.environmentVariables[1].value"].startswith("must be a string (it is 1); ")


def test_a_missing_field_is_told_once() -> None:
    assert problems("kind: InferenceEndpointConfig\nmetadata: {name: a}\n") == [
        "apiVersion: is required; use inference.sagemaker.aws.amazon.com/v1",
        "spec: spec is required",
    ]


@pytest.mark.parametrize(
    ("path", "near"),
    [
        (("spec", "modelname"), "modelName"),
        (("spec", "model_name"), "modelName"),
        (("spec", "pdSpec", "routingTreshold"), "routingThreshold"),
        (("spec", "pdSpec", "prefillSpec", "arg"), "args"),
        (("spec", "worker", "environmentVariable"), "environmentVariables"),
        (("spec", "kubernetes", "volumes", 0, "hostPath", "paths"), "path"),
    ],
)
def test_a_mistyped_name_is_answered_with_the_nearest_one(path: tuple[str | int, ...], near: str) -> None:
    (problem,) = problems(changed(*path, to="x"))
    assert problem.endswith(f"{path[-1]}: is not a field; did you mean {near}?")


def test_a_name_near_nothing_gets_no_hint() -> None:
    assert problems(changed("spec", "zzz", to=1)) == ["spec.zzz: is not a field"]


@pytest.mark.parametrize(("text", "advice"), [("true", "; take the quotes away"), ("yes", "")])
def test_a_boolean_in_quotes_is_refused_as_the_api_server_does(text: str, advice: str) -> None:
    assert problems(changed("spec", "intelligentRoutingSpec", to={"enabled": text})) == [
        f"spec.intelligentRoutingSpec.enabled: must be true or false (it is '{text}'){advice}"
    ]


def test_a_date_is_a_string_as_it_is_for_the_api_server() -> None:
    text = NVME.replace("  name: pd-nvme\n", "  name: pd-nvme\n  annotations: {since: 2024-01-31}\n")
    assert parse(text).metadata.annotations == {"since": "2024-01-31"}


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("spec:\n  a: [1,\n", "line 3, column 1", "found '<stream end>'"),
        ("spec:\n\tworker: 1\n", "line 2, column 1", "cannot start any token"),
        ("a: &x 1\nb: *y\n", "line 2, column 4", "undefined alias 'y'"),
        ("spec:\n  ? [a]\n  : 1\n", "line 2, column 5", "a key must be a name"),
        ("a: \x00", "line 1, column 4", "has the character U+0000"),
    ],
)
def test_what_is_no_yaml_is_told_with_its_place(text: str, where: str, what: str) -> None:
    (problem,) = problems(text)
    assert problem.startswith(where)
    assert what in problem


def test_a_key_given_twice_is_refused_and_not_silently_the_last() -> None:
    text = NVME.replace("    routingThreshold: 0\n", "    routingThreshold: 0\n    routingThreshold: 9\n")
    line = text.splitlines().index("    routingThreshold: 9") + 1
    (problem,) = problems(text)
    assert problem.startswith(f"line {line}, column 5: 'routingThreshold' is given twice")


def test_a_merge_key_may_bring_what_is_given_again() -> None:
    """Also where a merged mapping is merged once more."""
    roles = """\
    prefillSpec: &one {<<: &base {replicas: 1, args: ["--seed", "1"]}, replicas: 2}
    decodingSpec: {<<: *one, replicas: 3}
"""
    lines = [x for x in NVME.splitlines(keepends=True) if "fillSpec" not in x and "decodingSpec" not in x]
    at = lines.index("    routingThreshold: 0\n") + 1
    pd = parse("".join([*lines[:at], roles, *lines[at:]])).spec.pd_spec
    assert pd is not None
    assert (pd.prefill_spec.replicas, pd.decoding_spec.replicas) == (2, 3)
    assert pd.decoding_spec.args == ("--seed", "1")


def test_yaml_that_is_nested_too_deeply_is_refused() -> None:
    with pytest.raises(InvalidResource, match="nested too deeply"):
        parse_endpoint("[" * 5000, source="x.yaml")


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("", "none"),
        ("kind: Pod\n", "none; endpoint.yaml:1:1: a Pod is not looked at"),
        ("just text", "none; endpoint.yaml:1:1: an object without kind is not looked at"),
        (f"{NVME}---\n{S3}", "2"),
    ],
)
def test_a_file_without_one_endpoint_is_refused(text: str, held: str) -> None:
    (problem,) = problems(text)
    assert problem.endswith(f"exactly one object of kind InferenceEndpointConfig; it holds {held}")


def test_a_file_is_read_and_named_in_errors(tmp_path: Path) -> None:
    file = tmp_path / "endpoint.yaml"
    file.write_text(NVME)
    assert manifest_text(file) == NVME
    file.write_bytes(b"a: \xff")
    with pytest.raises(InvalidResource, match=r"endpoint\.yaml: the file: is not UTF-8 text"):
        manifest_text(file)
    with pytest.raises(FileNotFoundError):
        manifest_text(tmp_path / "none.yaml")
