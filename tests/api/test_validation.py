"""What the library call says: all at once, with rule, path and place."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.api.conversion import ANNOTATION_V1_FIELDS, LABEL_TOO_LARGE, convert
from tandem.api.quantities import quantity
from tandem.api.validation import RULES, Found, Position, Severity, Subject, read_manifest
from tandem.api.validation import validate as judge
from tandem.engine.validation import validate

from .conftest import with_fields
from .manifests import COLOCATED, HUGGING_FACE, MANIFESTS, NVME, S3


def said(resource: Any, **options: Any) -> list[tuple[str, str]]:
    return [(f.rule, f.path) for f in validate(resource, **options).findings]


def changed(text: str, changes: dict[str, Any]) -> list[tuple[str, str]]:
    """What a change adds to the findings of a manifest, and what it takes away is not looked at."""
    before = said(with_fields(text, {}))
    return [finding for finding in said(with_fields(text, changes)) if finding not in before]


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_of_hyperpod_are_accepted(name: str) -> None:
    report = validate(with_fields(MANIFESTS[name], {}))
    assert report.ok
    assert report.errors == ()
    assert {f.rule for f in report.warnings} <= {"IEC501", "IEC513", "IEC709", "IEC724"}


def test_every_mistake_is_told_at_once() -> None:
    wrong = with_fields(
        S3,
        {
            "spec.modelName": ...,
            "spec.replica": 2,
            "spec.pdSpec.routingThreshold": -1,
            "spec.modelSourceConfig.s3Storage": ...,
            "spec.worker.args": ["--port", "9000"],
            "spec.instanceTypes": ["ml.p5.48xlarge"],
            "metadata.annotations": {"tandem.dev/managed": "no"},
        },
    )
    report = validate(wrong)
    assert not report.ok
    assert {(f.rule, f.path) for f in report.errors} == {
        ("IEC102", "spec.modelName"),
        ("IEC101", "spec.replica"),
        ("IEC104", "spec.pdSpec.routingThreshold"),
        ("IEC201", "spec.modelSourceConfig.s3Storage"),
        ("IEC207", "spec.instanceTypes"),
        ("IEC407", "spec.worker.args[0]"),
        ("IEC301", "metadata.annotations[tandem.dev/managed]"),
    }


def test_a_finding_says_where_what_and_what_to_do() -> None:
    manifest = read_manifest(S3.replace("routingThreshold: 4096", "routingTreshold: 4096"), "pd.yaml")
    (document,) = manifest.documents
    (finding,) = validate(document.resource, lines=document.lines).errors
    assert finding.position == Position("pd.yaml", 22, 5)
    assert finding.severity is Severity.ERROR
    assert str(finding) == (
        "pd.yaml:22:5: error IEC101 spec.pdSpec.routingTreshold: is not a field; did you mean "
        "routingThreshold?"
    )
    assert finding.as_dict() == {
        "rule": "IEC101",
        "severity": "error",
        "path": "spec.pdSpec.routingTreshold",
        "message": "is not a field; did you mean routingThreshold?",
        "file": "pd.yaml",
        "line": 22,
        "column": 5,
    }


def test_without_a_file_there_is_no_place() -> None:
    (finding,) = validate(with_fields(NVME, {"spec.zzz": 1})).errors
    assert finding.position is None
    assert str(finding) == "error IEC101 spec.zzz: is not a field"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("spec.routingThreshold", "it belongs in spec.pdSpec"),
        ("spec.pdSpec.nodeSelector", "it belongs in spec.pdSpec.prefillSpec or spec.pdSpec.decodingSpec"),
        ("spec.pdSpec.autoScalingSpec.maxReplicaCount",
         "it belongs in spec.pdSpec.autoScalingSpec.prefillAutoScaling or "
         "spec.pdSpec.autoScalingSpec.decodingAutoScaling"),
        ("spec.args", "it belongs in spec.pdSpec.prefillSpec, spec.pdSpec.decodingSpec or spec.worker"),
        ("pdSpec", "it belongs in spec"),
        ("spec.pdSpec.decodingSpec.image",
         "it belongs in spec.worker or the annotation tandem.dev/decode-image, for these pods alone"),
        ("spec.tolerations",
         "it belongs in the annotations tandem.dev/prefill-tolerations and tandem.dev/decode-tolerations"),
        ("spec.worker.env", "here it is environmentVariables"),
        ("spec.worker.modelInvocationPort.port", "there are containerPort, name"),
        ("spec.worker.modelInvocationPort.containerport", "did you mean containerPort?"),
    ],
)  # fmt: skip
def test_of_a_field_in_the_wrong_place_the_right_one_is_told(path: str, said: str) -> None:
    assert [f.message for f in validate(with_fields(S3, {path: "x"})).errors if f.path == path] == [
        f"is not a field; {said}"
    ]


def test_fields_of_v1_in_an_older_resource_are_told_as_such() -> None:
    older = {**with_fields(S3, {}), "apiVersion": "inference.sagemaker.aws.amazon.com/v1alpha1"}
    told = {f.path: f.message for f in validate(older).errors}
    assert told["spec.pdSpec"] == (
        "is not a field of v1alpha1; write apiVersion: inference.sagemaker.aws.amazon.com/v1"
    )


def test_without_pd_spec_no_annotation_of_a_role_is_named() -> None:
    (finding,) = validate(with_fields(COLOCATED, {"spec.worker.affinity": {}})).errors
    assert "tandem.dev" not in finding.message


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("spec.modelName", 4, "must be a string (it is 4); put it in quotes"),
        ("spec.modelName", True, "(it is true); put it in quotes (y, n, yes, no, on and off are booleans"),
        ("spec.pdSpec.routingThreshold", "4096", "a whole number (it is '4096'); take the quotes away"),
        ("spec.pdSpec.routingThreshold", "4k", "must be a whole number (it is '4k')"),
        ("spec.pdSpec.topologySpec.sameAZ", "true", "or false (it is 'true'); take the quotes away"),
        ("spec.worker.environmentVariables", {"A": "b"}, "; a list is [a, b], or items that begin"),
        ("spec.pdSpec.prefillSpec.resources.limits", {"memory": "2GB"}, "as 8, 500m or 200Gi; it must"),
        ("spec.dnsConfig", {"hostedZoneId": "/hostedzone/Z1"}, "the id alone, as Z0123456789ABC; it must"),
    ],
)  # fmt: skip
def test_of_a_value_it_is_told_how_it_is_written(path: str, value: Any, said: str) -> None:
    assert any(
        f.path.startswith(path) and said in f.message for f in validate(with_fields(S3, {path: value})).errors
    )


def test_a_required_section_that_is_empty_is_not_just_called_missing() -> None:
    (finding,) = validate(with_fields(S3, {"spec.pdSpec.prefillSpec": None})).errors
    assert (finding.path, finding.message) == (
        "spec.pdSpec.prefillSpec",
        "is required, and has no value here; write {} if nothing is to be said in it",
    )


def test_a_source_that_is_misspelt_makes_no_section_useless() -> None:
    """To take the section out, as is said where another source is used, would be the wrong advice."""
    report = validate(with_fields(S3, {"spec.modelSourceConfig.modelSourceType": "S3"}))
    assert [f.rule for f in report.errors] == ["IEC104"]
    assert not any(f.rule == "IEC511" for f in report.warnings)


def test_a_volume_without_a_name_is_not_offered_for_mounts() -> None:
    volumes = [{"emptyDir": {}}, {"name": "a", "emptyDir": {}}]
    container = {"name": "c", "image": "i", "volumeMounts": [{"name": "b", "mountPath": "/b"}]}
    given = {"spec.kubernetes": {"volumes": volumes, "initContainers": [container]}}
    (finding,) = [f for f in validate(with_fields(S3, given)).errors if f.rule == "IEC223"]
    assert "None" not in finding.message
    assert "there are a, " in finding.message


def test_a_size_that_is_none_is_told_by_its_variables_name() -> None:
    for value, rule in (("8Gi", "IEC232"), ("1024", "IEC237")):
        given = {"spec.worker.environmentVariables": [{"name": "PD_BUFFER_SIZE", "value": value}]}
        (finding,) = validate(with_fields(S3, given)).errors
        assert (finding.rule, finding.message.startswith("PD_BUFFER_SIZE")) == (rule, True)


def test_a_model_that_only_a_variable_can_name_is_no_mistake() -> None:
    """Entrypoints of some images read it there, and with a router Tandem names it."""
    args = {"spec.intelligentRoutingSpec": ..., "spec.worker.args": ["--enforce-eager"]}
    variable = {"spec.worker.environmentVariables": [{"name": "SM_VLLM_MODEL", "value": "/opt/ml/model"}]}
    assert ("IEC725", "spec.worker.args") in said(with_fields(COLOCATED, args))
    assert ("IEC725", "spec.worker.args") not in said(with_fields(COLOCATED, args | variable))
    args.pop("spec.intelligentRoutingSpec")
    assert ("IEC725", "spec.worker.args") not in said(with_fields(COLOCATED, args))


def test_findings_come_in_the_order_of_the_file() -> None:
    text = S3.replace("replicas: 2", "replicas: 0").replace("modelName: llama", "modelName: -llama")
    (document,) = read_manifest(text, "x.yaml").documents
    places = [f.position for f in validate(document.resource, lines=document.lines).findings]
    assert len(places) > 2
    assert places == sorted(p for p in places if p is not None)


def test_what_is_missing_is_placed_where_it_belongs() -> None:
    (document,) = read_manifest(NVME.replace("  modelName: llama-3-3-70b\n", ""), "x.yaml").documents
    (finding,) = validate(document.resource, lines=document.lines).errors
    assert finding.path == "spec.modelName"
    assert finding.position == Position("x.yaml", 6, 1), "at spec"


def test_flags_of_both_roles_are_told_once_where_they_are_shared() -> None:
    shared = with_fields(S3, {"spec.worker.args": ["--max-model-len", "many"]})
    assert said(shared).count(("IEC401", "spec.worker.args[0]")) == 1


def test_the_resource_alone_can_be_judged_and_checks_added() -> None:
    def no_tests(subject: Subject) -> Any:
        if subject.text("metadata.name").startswith("test"):
            yield Found("IEC233", ("metadata", "name"), "is a test's")

    resource = with_fields(NVME, {"metadata.name": "test-1", "spec.worker.args": ["--port", "x"]})
    assert judge(resource).ok
    assert [f.rule for f in judge(resource, checks=[no_tests]).errors] == ["IEC233"]


CARRIED = f"metadata.annotations[{ANNOTATION_V1_FIELDS}]"


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        ({"spec.worker.args": ["--dtype", "x"]}, [("IEC401", "spec.worker.args[0]")]),
        (
            {"spec.kubernetes": {"volumes": [{"name": "shm", "emptyDir": {}}]}},
            [("IEC206", "spec.kubernetes.volumes[0].name")],
        ),
        ({"spec.pdSpec.routingThreshold": -1}, [("IEC301", CARRIED)]),
    ],
)
def test_what_an_object_in_v1alpha1_carries_is_judged_with_it(
    changes: dict[str, Any], found: list[tuple[str, str]]
) -> None:
    older = convert(with_fields(S3, changes), "v1alpha1")
    assert [(f.rule, f.path) for f in validate(older).errors] == found


@pytest.mark.parametrize("carried", ["", "junk", "[]", '{"fields": {"spec.no": 1}}', '{"fields":' * 5000])
def test_what_an_object_in_v1alpha1_cannot_carry_is_told(carried: str) -> None:
    older = convert(with_fields(S3, {}), "v1alpha1")
    older["metadata"]["annotations"][ANNOTATION_V1_FIELDS] = carried
    assert [(f.rule, f.path) for f in validate(older).errors] == [("IEC301", CARRIED)]
    older["metadata"] = {"name": "a", "labels": {LABEL_TOO_LARGE: "true"}}
    ((rule, path),) = [(f.rule, f.path) for f in validate(older).errors]
    assert (rule, path) == ("IEC301", f"metadata.labels[{LABEL_TOO_LARGE}]")


def test_null_counts_as_left_out() -> None:
    assert not changed(S3, {"spec.replicas": None, "spec.kvCacheSpec.cacheConfigFile": None})
    assert changed(NVME, {"spec.worker.image": None}) == [("IEC102", "spec.worker.image")]
    assert changed(NVME, {"spec.worker.args": ["--seed", None]}) == [("IEC103", "spec.worker.args[1]")]


def test_a_resource_is_not_changed() -> None:
    resource = with_fields(S3, {"spec.replicas": None})
    validate(resource)
    assert resource == with_fields(S3, {"spec.replicas": None})


TRIGGER = "spec.autoScalingSpec.cloudWatchTrigger"
SOURCE = "spec.modelSourceConfig"
BUCKET = {"bucketName": "b", "region": "us-west-2"}


@pytest.mark.parametrize(
    ("text", "changes", "found"),
    [
        # The volume with the weights
        (NVME, {"spec.worker.modelVolumeMount.name": "w"}, [("IEC221", "spec.worker.modelVolumeMount.name")]),
        (NVME, {"spec.kubernetes.volumes": []}, [("IEC205", "spec.kubernetes.volumes")]),
        (
            S3,
            {"spec.modelSourceConfig.s3Storage.region": ""},
            [("IEC230", "spec.modelSourceConfig.s3Storage.region")],
        ),
        # A bucket may be an access point
        (S3, {"spec.modelSourceConfig.s3Storage.bucketName": "arn:aws:s3:us-east-2:1:accesspoint/a"}, []),
        # Resources
        (
            S3,
            {"spec.metricsSidecarResources": {"requests": {"cpu": "2"}, "limits": {"cpu": "1500m"}}},
            [("IEC226", "spec.metricsSidecarResources.requests.cpu")],
        ),
        (S3, {"spec.metricsSidecarResources": {"requests": {"cpu": 1}, "limits": {"cpu": "1000m"}}}, []),
        *(
            (COLOCATED, {"metadata.name": name, **changes}, found)
            for name, changes, found in (
                ("sidecar-reverse-proxy", {}, [("IEC222", "metadata.name")]),
                ("otel-collector", {"spec.metrics.enabled": False, "spec.worker.requestLimits": ...}, []),
                ("hf-model-downloader", {}, []),
            )
        ),
        # Paths that nginx has no word for
        *(
            (S3, {path: f"{'/' * slash}{'a' * 1001}"}, [(rule, path)])
            for path, slash, rule in (
                ("spec.invocationEndpoint", 0, "IEC235"),
                ("spec.loadBalancer.healthCheckPath", 1, "IEC235"),
                ("spec.metrics.modelMetrics.path", 1, "IEC235"),
            )
        ),
        (
            HUGGING_FACE,
            {"spec.worker.modelVolumeMount.mountPath": f"/{'a' * 1000}"},
            [("IEC233", "spec.worker.modelVolumeMount.mountPath"), ("IEC713", "spec.worker.args[0]")],
        ),
        # What mounts buckets would take for a flag
        (
            S3,
            {"spec.modelSourceConfig.s3Storage.bucketName": "--allow-delete"},
            [("IEC233", "spec.modelSourceConfig.s3Storage.bucketName")],
        ),
        # Triggers: an empty list does not win
        (COLOCATED, {"spec.autoScalingSpec.cloudWatchTriggerList": []}, []),
        # CloudWatch's data points
        *(
            (COLOCATED, {f"{TRIGGER}.metricCollectionPeriod": seconds}, [])
            for seconds in (1, 5, 10, 30, 60, 120)
        ),
        *(
            (
                COLOCATED,
                {f"{TRIGGER}.metricCollectionPeriod": seconds},
                [("IEC702", f"{TRIGGER}.metricCollectionPeriod")],
            )
            for seconds in (-60, 0, 2, 45, 90)
        ),
        (COLOCATED, {f"{TRIGGER}.dimensions": []}, [("IEC702", TRIGGER)]),
        # A region that does not count, as the weights are elsewhere
        (COLOCATED, {"spec.modelSourceConfig.s3Storage": BUCKET}, [("IEC511", f"{SOURCE}.s3Storage")]),
        # Ports
        (COLOCATED, {"spec.metrics.modelMetrics.port": 8080}, []),
        # Routing
        (
            S3,
            {
                "spec.intelligentRoutingSpec": {"routingStrategy": "kvaware"},
                "spec.invocationEndpoint": "/v1/completions",
            },
            [],
        ),
        (S3, {"spec.invocationEndpoint": "/v1/completions/"}, []),
        (S3, {"spec.invocationEndpoint": "/"}, [("IEC712", "spec.invocationEndpoint")]),
        # No model length, no threshold too high
        (S3, {"spec.pdSpec.routingThreshold": 2_000_000}, []),
        # A token that may be missing is still named
        (
            HUGGING_FACE,
            {"spec.modelSourceConfig.huggingFaceModel.tokenSecretRef": {"key": "k", "optional": True}},
            [("IEC230", "spec.modelSourceConfig.huggingFaceModel.tokenSecretRef.name")],
        ),
        # The resource of a role that has none of its own
        (
            S3,
            {"spec.pdSpec.prefillSpec.resources": {"limits": {"cpu": 1}}},
            [("IEC705", "spec.pdSpec.prefillSpec.resources")],
        ),
    ],
)
def test_rules_across_fields(text: str, changes: dict[str, Any], found: list[tuple[str, str]]) -> None:
    assert changed(text, changes) == found


LLAMA_70B = {
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
}


@pytest.mark.parametrize(("tokens", "enough"), [("6144", True), ("6145", False)])
def test_with_the_models_config_the_buffer_is_compared_exactly(tokens: str, enough: bool) -> None:
    """A prompt of 6,144 tokens of Llama 3.3 70B takes 251,658,240 bytes on each of 8 ranks."""
    args = ["--tensor-parallel-size", "8", "--max-model-len", tokens]
    variables = [{"name": "PD_BUFFER_SIZE", "value": "251658240"}]
    resource = with_fields(
        S3,
        {
            "spec.worker.args": args,
            "spec.worker.environmentVariables": variables,
            "spec.pdSpec.routingThreshold": 1,
        },
    )
    for options in ({"model_config": LLAMA_70B}, {}):  # its name tells as much
        found = said(resource, **options)
        assert (("IEC707", "spec.worker.environmentVariables[0]") not in found) == enough


def test_the_decoders_buffer_may_be_an_annotation() -> None:
    wish = {"tandem.dev/decode-env": '[{name: PD_BUFFER_SIZE, value: "1024"}]'}
    assert changed(S3, {"metadata.annotations": wish}) == [
        ("IEC237", "metadata.annotations[tandem.dev/decode-env][0]")
    ]


def test_the_decoders_own_buffer_is_the_last_word() -> None:
    """What an annotation replaces may be anything, and prefillers have no buffer."""
    variables = [{"name": "PD_BUFFER_SIZE", "value": "much"}]
    good = '[{name: PD_BUFFER_SIZE, value: "8589934592"}]'
    wish = {"tandem.dev/decode-env": good, "tandem.dev/prefill-env": good}
    found = changed(S3, {"metadata.annotations": wish, "spec.worker.environmentVariables": variables})
    assert found == [("IEC518", "metadata.annotations[tandem.dev/prefill-env][0]")]


@pytest.mark.parametrize(
    ("text", "amount"),
    [("500m", 0.5), ("16Gi", 16 * 2**30), ("1.5M", 1.5e6), ("2e3", 2000), ("1E", 1e18), (3, 3), ("-1", -1)],
)
def test_quantities_are_read_as_kubernetes_does(text: Any, amount: float) -> None:
    read = quantity(text)
    assert read is not None
    assert float(read) == amount


@pytest.mark.parametrize("text", ["", "eight", "1.2.3", "10 GB", "1ki", None, True, [1]])
def test_what_is_no_quantity_has_no_amount(text: Any) -> None:
    assert quantity(text) is None


def test_ids_tell_how_bad_it_is() -> None:
    for rule in RULES.values():
        assert (rule.severity == "error") == (rule.id[3] in "01234")
        assert not (rule.api_server and rule.severity == "warning"), "a warning is never a refusal"
