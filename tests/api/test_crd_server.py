"""The CustomResourceDefinition on a real API server: what it takes, fills in, refuses and shows."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from tandem.api.crd import NAME, schema_problems, spec_and_status
from tandem.api.crd.schemas import fields
from tandem.api.models import GROUP
from tandem.cli import main

from .conftest import ApiServer, resource, with_fields
from .manifests import COLOCATED, HUGGING_FACE, MANIFESTS, NVME, S3
from .test_crd import LISTED, facts


def test_what_the_command_prints_is_applied(
    bare_api_server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """By kubectl apply, as people do, and by server-side apply, as the operator does."""
    main(["crd"])
    printed = capsys.readouterr().out
    done = bare_api_server.kubectl("apply", "-f", "-", stdin=printed)
    assert done.returncode == 0, done.stderr
    # Unless another test has applied it on the server's side, of which kubectl warns.
    assert "Warning" not in done.stderr or "last-applied-configuration" in done.stderr, done.stderr
    bare_api_server.install(yaml.safe_load(printed))
    conditions = bare_api_server.get("get", "crd", NAME)["status"]["conditions"]
    assert {c["type"]: c["status"] for c in conditions} == {"NamesAccepted": "True", "Established": "True"}


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_of_hyperpod_apply_unchanged(api_server: ApiServer, namespace: str, name: str) -> None:
    manifest = resource(MANIFESTS[name], namespace)
    for way in ([], ["--server-side", "--force-conflicts"]):
        done = api_server.kubectl("apply", *way, "--validate=strict", "-f", "-", stdin=manifest)
        assert done.returncode == 0, done.stderr
        assert "Warning" not in done.stderr
    stored = api_server.get("get", "iec", "-n", namespace, manifest["metadata"]["name"])
    assert _within(manifest["spec"], stored["spec"])


def _within(part: Any, whole: Any) -> bool:
    """Whether everything said in one object is said in another."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(k in whole and _within(v, whole[k]) for k, v in part.items())
    if isinstance(part, list):
        return len(part) == len(whole) and all(map(_within, part, whole))
    return bool(part == whole)


EMPTY_SCALING: dict[str, Any] = {
    "cloudWatchTrigger": {},
    "cloudWatchTriggerList": [{}],
    "prometheusTrigger": {},
    "prometheusTriggerList": [{}],
}
EMPTY_CAPTURE: dict[str, Any] = {"enabled": False, "bufferConfig": {}, "payloadConfig": {}}
EVERY_SECTION: dict[str, Any] = {
    "spec.autoScalingSpec": EMPTY_SCALING,
    "spec.dataCapture": {"modelPod": EMPTY_CAPTURE},
    "spec.inferenceGateway": {},
    "spec.intelligentRoutingSpec": {"autoScalingSpec": EMPTY_SCALING},
    "spec.invocationEndpoint": ...,
    "spec.kvCacheSpec": {},
    "spec.loadBalancer": {},
    "spec.metrics": {"modelMetrics": {}},
    "spec.modelCacheConfig": {"weightsCache": {}, "imageCache": {}},
    "spec.modelSourceConfig.huggingFaceModel.tokenSecretRef": {"key": "k"},
    "spec.modelSourceConfig.prefetchEnabled": ...,
    "spec.pdSpec": {
        "prefillSpec": {},
        "decodingSpec": {},
        "topologySpec": {},
        "autoScalingSpec": {"prefillAutoScaling": EMPTY_SCALING, "decodingAutoScaling": EMPTY_SCALING},
    },
    "spec.worker.requestLimits": {},
}


def test_the_defaults_are_filled_in_as_listed(api_server: ApiServer) -> None:
    created = api_server.get(
        "create", "--dry-run=server", "-f", "-", stdin=with_fields(HUGGING_FACE, EVERY_SECTION)
    )
    defaults = {p: f["default"] for p, f, _ in fields(spec_and_status()) if "default" in f}
    listed = {path: said["default"] for path, said in map(facts, LISTED) if "default" in said}
    assert listed.items() <= defaults.items()
    core = [path for path, said in map(facts, LISTED) if "core" in said]
    filled = {p: _at(created, p) for p in defaults if not any(p.startswith((f"{c}.", f"{c}[")) for c in core)}
    assert filled == {path: defaults[path] for path in filled}


def _at(value: Any, path: str) -> Any:
    for part in path.split("."):
        value = value[part.removesuffix("[]")]
        if part.endswith("[]"):
            (value,) = value
    return value


def test_sections_that_are_left_out_stay_out(api_server: ApiServer) -> None:
    created = api_server.get("create", "--dry-run=server", "-f", "-", stdin=resource(NVME))
    assert "autoScalingSpec" not in created["spec"]
    assert "requestLimits" not in created["spec"]["worker"]


RULES: list[tuple[str, dict[str, Any], str]] = [
    (NVME, {"spec": ...}, "spec: Required value: spec is required"),
    (
        S3,
        {"spec.modelSourceConfig.s3Storage": ...},
        "spec.modelSourceConfig.s3Storage: Required value: s3Storage is required when modelSourceType is s3",
    ),
    (
        COLOCATED,
        {"spec.modelSourceConfig.fsxStorage": ...},
        "spec.modelSourceConfig.fsxStorage: Required value: "
        "fsxStorage is required when modelSourceType is fsx",
    ),
    (
        HUGGING_FACE,
        {"spec.modelSourceConfig.huggingFaceModel": ...},
        "spec.modelSourceConfig.huggingFaceModel: Required value: "
        "huggingFaceModel is required when modelSourceType is huggingface",
    ),
    (
        NVME,
        {"spec.modelSourceConfig.modelLocation": "Llama"},
        "spec.modelSourceConfig.modelLocation: Forbidden: "
        "modelLocation must be left out when modelSourceType is kubernetesVolume",
    ),
    (
        NVME,
        {"spec.kubernetes": ...},
        "spec.kubernetes.volumes: Required value: "
        "for modelSourceType kubernetesVolume the volume with the model must be among kubernetes.volumes",
    ),
    (
        NVME,
        {"spec.kubernetes.volumes": [{"name": "model-weights"}, {"name": "lmcache-config"}]},
        "spec.kubernetes.volumes[1].name: Invalid value: "
        "the names shm, model-weights-copy, parallel-copy-configmap, ",
    ),
    (
        S3,
        {"spec.instanceTypes": ["ml.p5.48xlarge"]},
        "spec.instanceTypes: Forbidden: instanceType and instanceTypes exclude each other",
    ),
    (
        S3,
        {"spec.inferenceGateway": {"enabled": True}},
        "spec.inferenceGateway.enabled: Forbidden: "
        "inferenceGateway and intelligentRoutingSpec cannot both be enabled",
    ),
    (
        COLOCATED,
        {"spec.autoScalingSpec": {"minReplicaCount": 6}},
        "spec.autoScalingSpec.minReplicaCount: Invalid value: "
        "minReplicaCount must not be greater than maxReplicaCount",
    ),
    (
        S3,
        {
            "spec.pdSpec.autoScalingSpec": {
                "decodingAutoScaling": {"minReplicaCount": 3, "maxReplicaCount": 2}
            }
        },
        "spec.pdSpec.autoScalingSpec.decodingAutoScaling.minReplicaCount: Invalid value: "
        "minReplicaCount must not be greater than maxReplicaCount",
    ),
]
"""A bad example for each rule: the manifest, what is changed, and what is said."""


@pytest.mark.parametrize(("text", "changes", "refusal"), RULES)
def test_a_rule_refuses_with_a_reason_and_a_path(
    api_server: ApiServer, text: str, changes: dict[str, Any], refusal: str
) -> None:
    (said,) = api_server.refusals(with_fields(text, changes))
    assert refusal in said


def test_every_rule_has_an_example() -> None:
    shown = [refusal for _, _, refusal in RULES]
    schema = spec_and_status()
    everything = [schema, *(f for _, f, _ in fields(schema))]
    everything += [f["items"] for f in everything if f.get("type") == "array"]
    messages = {r["message"] for field in everything for r in field.get("x-kubernetes-validations", ())}
    assert messages
    assert [m for m in messages if not any(m[:40] in said for said in shown)] == []


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        (COLOCATED, {"spec.autoScalingSpec.cloudWatchTriggerList": [{"metricName": "Invocations"}]}),
        (COLOCATED, {"spec.replicas": 9}),
        (COLOCATED, {"spec.instanceTypes": ...}),
        (COLOCATED, {"spec.instanceTypes": [], "spec.instanceType": "ml.g6e.12xlarge"}),
        (NVME, {"spec.modelSourceConfig.modelLocation": ""}),
        (NVME, {"spec.modelSourceConfig.s3Storage": {"bucketName": "b", "region": "r"}}),
        (S3, {"spec.kvCacheSpec": {"enableL2Cache": True}}),
        (S3, {"spec.kvCacheSpec.l2CacheSpec": {"l2CacheBackend": "TieredStorage"}}),
        (S3, {"spec.dnsConfig": {"hostedZoneId": "Z1"}}),
        (S3, {"spec.pdSpec.decodingSpec.replicas": 4}),
        (S3, {"spec.endpointName": "", "spec.modelVersion": "1"}),
        (S3, {"spec.loadBalancer.idleTimeoutSeconds": 4000}),
        (S3, {"spec.modelCacheConfig": {"weightsCache": {"enabled": True, "hostPath": "/data"}}}),
        (S3, {"spec.metricsSidecarResources": {"limits": {"memory": "1Gi"}}}),
        (S3, {"spec.inferenceGateway": {"enabled": True}, "spec.intelligentRoutingSpec": {"enabled": False}}),
    ],
)
def test_what_hyperpod_accepts_is_accepted(api_server: ApiServer, text: str, changes: dict[str, Any]) -> None:
    assert api_server.refusals(with_fields(text, changes)) == []


BAD: list[tuple[str, Any]] = [
    ("spec.modelName", ...),
    ("spec.modelName", "-a"),
    ("spec.modelName", "a" * 64),
    ("spec.modelname", "a"),
    ("spec.endpointName", "a_"),
    ("spec.instanceType", "p5.48xlarge"),
    ("spec.replicas", "2"),
    ("spec.replicas", 1.5),
    ("spec.replicas", 2**31),
    ("spec.pdSpec.routingThreshold", -1),
    ("spec.pdSpec.prefillSpec.replicas", 0),
    ("spec.pdSpec.prefillSpec", None),
    ("spec.pdSpec.topologySpec.sameAZ", "true"),
    ("spec.worker.args", "--model"),
    ("spec.worker.modelInvocationPort.containerPort", 65536),
    ("spec.worker.modelInvocationPort.name", "https"),
    ("spec.worker.requestLimits", {"maxConcurrentRequests": 0}),
    ("spec.worker.environmentVariables", [{"name": "A"}, {"name": "A"}]),
    ("spec.worker.environmentVariables", [{"value": "A"}]),
    ("spec.worker.resources", {"limits": {"cpu": "1 core"}}),
    ("spec.worker.resources", {"limits": {"cpu": 1.5}}),
    ("spec.worker.probes", {"livenessProbe": {"httpGet": {"path": "/health"}}}),
    ("spec.kubernetes", {"initContainers": [{"ports": []}]}),
    ("spec.kubernetes", {"initContainers": [{"name": "a", "ports": [{"containerPort": 1}] * 2}]}),
    ("spec.kubernetes", {"schedulerName": "Upper"}),
    ("spec.dataCapture", {"modelPod": {"enabled": True, "captureOptions": []}}),
    ("spec.dataCapture", {"s3Uri": "s3://b/a,b"}),
    ("spec.dataCapture", {"sagemakerEndpoint": {}}),
    (
        "spec.dataCapture",
        {"modelPod": {"enabled": True, "captureContentTypeHeader": {"csvContentTypes": ["a", "a"]}}},
    ),
    ("spec.tlsConfig", {"customCertificateConfig": {"acmArn": "arn:aws:iam::1:x", "domainName": "*.a"}}),
    ("spec.loadBalancer.idleTimeoutSeconds", 4001),
    ("spec.loadBalancer.healthCheckPath", "health"),
    ("spec.autoScalingSpec", {"prometheusTrigger": {"serverAddress": "http://prometheus:9090"}}),
    ("spec.autoScalingSpec", {"prometheusTriggerList": [{}] * 101}),
    ("spec.autoScalingSpec", {"cloudWatchTrigger": {"metricType": "AverageValue"}}),
    ("spec.kvCacheSpec.l2CacheSpec", {"l2CacheBackend": "memcached"}),
    ("spec.modelCacheConfig", {"weightsCache": {"hostPath": "data"}}),
    ("spec.tags", [{"name": "a"}]),
    ("spec.nodeAffinity", {"requiredDuringSchedulingIgnoredDuringExecution": {}}),
]


@pytest.mark.parametrize(("path", "value"), BAD)
def test_the_schema_refuses_and_our_own_reading_of_it_agrees(
    api_server: ApiServer, path: str, value: Any
) -> None:
    wrong = with_fields(S3, {path: value})
    said = "\n".join(api_server.refusals(wrong))
    found = list(schema_problems(wrong, spec_and_status()))
    assert said
    assert found
    for at, _ in found:
        assert str(next(part for part in reversed(at) if isinstance(part, str))) in said


@pytest.mark.parametrize("value", [0, 2**31 - 1, 3.0])
def test_whole_numbers_are_taken_however_they_are_written(api_server: ApiServer, value: float) -> None:
    right = with_fields(S3, {"spec.pdSpec.routingThreshold": value})
    assert api_server.refusals(right) == []
    assert [*schema_problems(right, spec_and_status())] == []


def test_an_endpoint_is_scaled_by_its_subresource(api_server: ApiServer, namespace: str) -> None:
    api_server.get("create", "-f", "-", stdin=resource(COLOCATED, namespace))
    done = api_server.kubectl("scale", "-n", namespace, "iec/chat-8b", "--replicas=5")
    assert done.returncode == 0, done.stderr
    assert api_server.get("get", "iec", "-n", namespace, "chat-8b")["spec"]["replicas"] == 5
    _status(api_server, namespace, "chat-8b", {"replicas": 4, "selector": "app=chat-8b"})
    path = f"/apis/{GROUP}/v1/namespaces/{namespace}/inferenceendpointconfigs/chat-8b/scale"
    scale = api_server.raw(path)
    assert (scale["spec"], scale["status"]) == ({"replicas": 5}, {"replicas": 4, "selector": "app=chat-8b"})


def _status(server: ApiServer, namespace: str, name: str, status: dict[str, Any]) -> None:
    patch = json.dumps({"status": status})
    done = server.kubectl(
        "patch", "iec", "-n", namespace, name, "--subresource=status", "--type=merge", "-p", patch
    )
    assert done.returncode == 0, done.stderr


def test_kubectl_get_shows_the_state_and_each_role(api_server: ApiServer, namespace: str) -> None:
    api_server.get("create", "-f", "-", stdin=resource(S3, namespace))
    roles = {"prefill": {"summary": "1/2", "ready": 1, "desired": 2}, "decode": {"summary": "1/1"}}
    roles["router"] = {"summary": "2/2", "trouble": ""}
    _status(api_server, namespace, "pd-s3", {"state": "DeploymentInProgress", "roles": roles})
    head, line = api_server.kubectl("get", "iec", "-n", namespace).stdout.splitlines()
    assert head.split() == ["NAME", "STATE", "PREFILL", "DECODE", "ROUTER", "AGE"]
    assert line.split()[:5] == ["pd-s3", "DeploymentInProgress", "1/2", "1/1", "2/2"]


def test_status_is_written_by_its_subresource_alone(api_server: ApiServer, namespace: str) -> None:
    both = resource(NVME, namespace) | {"status": {"state": "DeploymentComplete"}}
    assert "status" not in api_server.get("create", "-f", "-", stdin=both)


def test_kubectl_explain_tells_what_a_field_is_for(api_server: ApiServer) -> None:
    told = api_server.kubectl("explain", "iec.spec.pdSpec.routingThreshold").stdout
    assert "Prompt tokens from which a request goes through a prefiller" in " ".join(told.split())
