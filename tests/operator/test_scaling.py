"""ScaledObjects: what KEDA is told, and whose pods are left alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tandem.api import Role
from tandem.operator import RenderError
from tandem.operator.names import START_ANNOTATION

from .endpoints import SETTINGS, VARIANTS, deployment, named, of_kind, rendered


def triggers(of: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = of["spec"]["triggers"]
    return found


def test_a_cloudwatch_trigger_is_kedas() -> None:
    made = rendered("colocated-routing")
    scaled = named(made, "ScaledObject", "chat-8b")
    assert (scaled["spec"]["minReplicaCount"], scaled["spec"]["maxReplicaCount"]) == (2, 6)
    (trigger,) = triggers(scaled)
    assert (trigger["type"], trigger["metricType"]) == ("aws-cloudwatch", "AverageValue")
    assert trigger["metadata"] == {
        "awsRegion": "us-east-2",
        "identityOwner": "operator",
        "namespace": "AWS/SageMaker",
        "metricName": "Invocations",
        "dimensionName": "EndpointName;VariantName",
        "dimensionValue": "chat-8b;AllTraffic",
        "targetMetricValue": "10",
        "activationTargetMetricValue": "0",
        "minMetricValue": "0",
        "metricStat": "Sum",
        "metricStatPeriod": "300",
        "metricCollectionTime": "300",
    }


def test_each_role_scales_by_itself() -> None:
    made = rendered(*VARIANTS["scaled roles"])
    prefill, decode = (named(made, "ScaledObject", f"{role}-pd-hf") for role in Role)
    assert prefill["spec"]["scaleTargetRef"]["name"] == "prefill-pd-hf"
    assert triggers(prefill)[0]["metadata"]["threshold"] == "4"
    assert [t["metadata"]["metricName"] for t in triggers(decode)] == ["a", "b"]
    assert [t["metricType"] for t in triggers(decode)] == ["AverageValue", "Value"]
    assert triggers(decode)[0]["metadata"]["targetMetricValue"] == "1.5"


def test_amazons_prometheus_is_asked_with_a_signature() -> None:
    made = rendered(*VARIANTS["scaled roles"])
    (trigger,) = triggers(named(made, "ScaledObject", "prefill-pd-hf"))
    assert trigger["metadata"]["awsRegion"] == "us-east-2"
    signing = named(made, "TriggerAuthentication", trigger["authenticationRef"]["name"])
    assert signing["spec"] == {"podIdentity": {"provider": "aws"}}
    assert signing["metadata"]["namespace"] == "team-a"


def test_a_scaled_deployments_number_is_its_autoscalers() -> None:
    made = rendered(*VARIANTS["scaled roles"])
    assert all("replicas" not in deployment(made, c)["spec"] for c in (*Role, "router"))
    assert deployment(rendered("dpd-nixl"), Role.PREFILL)["spec"]["replicas"] == 1


@pytest.mark.parametrize(("replicas", "start"), [(1, "2"), (4, "4"), (9, "6")])
def test_an_autoscaled_deployment_starts_with_the_resources_number_within_the_bounds(
    replicas: int, start: str
) -> None:
    """Between 2 and 6 pods."""
    made = rendered("colocated-routing", {"spec.replicas": replicas})
    assert deployment(made, None)["metadata"]["annotations"][START_ANNOTATION] == start
    assert deployment(made, "router")["metadata"]["annotations"][START_ANNOTATION] == "1"


def test_a_deployment_without_an_autoscaler_has_its_number_alone() -> None:
    for role in (*Role, "router"):
        assert START_ANNOTATION not in deployment(rendered("dpd-nixl"), role)["metadata"]["annotations"]


def test_a_router_without_a_trigger_scales_by_its_cpu() -> None:
    scaled = named(rendered("colocated-routing"), "ScaledObject", "chat-8b-team-a-router")
    (trigger,) = triggers(scaled)
    assert trigger["type"] == "cpu"
    assert trigger["metadata"]["containerName"] == "router-container"
    assert (scaled["spec"]["minReplicaCount"], scaled["spec"]["maxReplicaCount"]) == (1, 3)


def test_one_endpoint_cannot_fill_the_routers_namespace() -> None:
    """Its quota does not count there."""
    path = "spec.intelligentRoutingSpec.autoScalingSpec"
    for least, most, kept in (
        (1, 2**31 - 1, (1, 100)),
        (2**31 - 1, 2**31 - 1, (100, 100)),
        (2, 100, (2, 100)),
    ):
        made = rendered("colocated-routing", {path: {"minReplicaCount": least, "maxReplicaCount": most}})
        spec = named(made, "ScaledObject", "chat-8b-team-a-router")["spec"]
        assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == kept
        assert any(note.startswith(f"{path}: ") for note in made.notes) is ((least, most) != kept)


def test_by_cpu_alone_nothing_is_scaled_to_none() -> None:
    changes = {"spec.intelligentRoutingSpec.autoScalingSpec": {"minReplicaCount": 0}}
    made = rendered("colocated-routing", changes)
    assert named(made, "ScaledObject", "chat-8b-team-a-router")["spec"]["minReplicaCount"] == 1


def test_pods_without_a_trigger_stay_as_many_and_it_is_told() -> None:
    made = rendered("dpd-nixl", {"spec.pdSpec.autoScalingSpec": {"prefillAutoScaling": {}}})
    assert not of_kind(made, "ScaledObject")
    assert deployment(made, Role.PREFILL)["spec"]["replicas"] == 1
    assert any("prefillAutoScaling: has no trigger" in note for note in made.notes)


def test_with_lmcache_the_router_is_not_scaled_and_it_is_told() -> None:
    made = rendered("dpd-s3", {"spec.intelligentRoutingSpec.autoScalingSpec": {"maxReplicaCount": 3}})
    assert not of_kind(made, "ScaledObject")
    assert any("prefillers notify one router" in note for note in made.notes)


@pytest.mark.parametrize("trigger", [{"metricName": "a"}, {"targetValue": 1}])
def test_a_trigger_without_what_it_needs_is_told(trigger: dict[str, Any]) -> None:
    changes = {"spec.autoScalingSpec": {"cloudWatchTrigger": trigger}}
    with pytest.raises(RenderError, match=r"spec\.autoScalingSpec\.cloudWatchTrigger"):
        rendered("colocated-routing", changes)


def test_a_region_that_nobody_names_is_told() -> None:
    changes = {
        "spec.modelSourceConfig.fsxStorage.dnsName": "fs.example",
        # Without effect, as the weights are not there.
        "spec.modelSourceConfig.s3Storage": {"bucketName": "b", "region": "us-west-2"},
    }
    with pytest.raises(RenderError, match="--region"):
        rendered("colocated-routing", changes, replace(SETTINGS, region=None))


def test_times_are_the_resources() -> None:
    changes = {
        "spec.autoScalingSpec": {
            "pollingInterval": 5,
            "cooldownPeriod": 6,
            "initialCooldownPeriod": 7,
            "scaleDownStabilizationTime": 8,
            "scaleUpStabilizationTime": 9,
            "cloudWatchTrigger": {"metricName": "a", "targetValue": 1, "metricCollectionPeriod": 600},
        }
    }
    spec = named(rendered("colocated-routing", changes), "ScaledObject", "chat-8b")["spec"]
    assert (spec["pollingInterval"], spec["cooldownPeriod"], spec["initialCooldownPeriod"]) == (5, 6, 7)
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior["scaleDown"]["stabilizationWindowSeconds"] == 8
    assert behavior["scaleUp"]["stabilizationWindowSeconds"] == 9
    assert spec["triggers"][0]["metadata"]["metricCollectionTime"] == "600", "never less than one period"


@pytest.mark.parametrize(
    ("period", "start", "time"), [(300, 300, 300), (60, 100, 120), (300, 301, 600), (60, 0, 60), (10, 25, 30)]
)
def test_cloudwatch_is_asked_for_whole_data_points(period: int, start: int, time: int) -> None:
    """KEDA refuses parts of one."""
    trigger = {"metricName": "a", "targetValue": 1}
    trigger |= {"metricCollectionPeriod": period, "metricCollectionStartTime": start}
    changes = {"spec.autoScalingSpec": {"cloudWatchTrigger": trigger}}
    (found,) = triggers(named(rendered("colocated-routing", changes), "ScaledObject", "chat-8b"))
    assert found["metadata"]["metricStatPeriod"] == str(period)
    assert found["metadata"]["metricCollectionTime"] == str(time)


def test_keda_looks_at_least_once_a_second() -> None:
    """HyperPod's schema takes 0, KEDA's does not."""
    trigger = {"namespace": "X", "metricName": "a", "targetValue": 1}
    wish = {"pollingInterval": 0, "cloudWatchTrigger": trigger}
    (found,) = of_kind(rendered("colocated-routing", {"spec.autoScalingSpec": wish}), "ScaledObject")[:1]
    assert found["spec"]["pollingInterval"] == 1


@pytest.mark.parametrize("seconds", [-1, 0, 15, 16, 3600])
def test_a_deployment_may_take_longer_than_a_pod_has_to_be_ready(seconds: int) -> None:
    """Kubernetes takes no deadline that is over before."""
    for found in of_kind(rendered("dpd-s3", {"spec.maxDeployTimeInSeconds": seconds}), "Deployment"):
        least = found["spec"].get("minReadySeconds", 0)
        assert found["spec"]["progressDeadlineSeconds"] > least
