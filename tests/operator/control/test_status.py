"""An endpoint's status says what runs, what does not, and why; and rests when nothing changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.api.crd import schema_problems, spec_and_status
from tandem.operator.control.events import transitions
from tandem.operator.control.status import (
    READY_MESSAGE,
    Outcome,
    Wanted,
    change,
    deleting,
    new_status,
    pending,
)
from tandem.operator.names import START_ANNOTATION

Object = dict[str, Any]

SCHEMA = spec_and_status("v1")["properties"]["status"]
NOW = datetime(2026, 11, 30, 4, 0, tzinfo=UTC)
LATER = NOW + timedelta(minutes=5)
OUTCOME = Outcome(
    wanted=(
        Wanted("prefill", ("team-a", "prefill-x")),
        Wanted("decode", ("team-a", "decode-x")),
        Wanted("router", ("system", "x-team-a-router")),
    ),
    transfer={"connector": "nixl", "reason": "asked for"},
)
ENDPOINT: Object = {"metadata": {"name": "x", "namespace": "team-a", "generation": 3}}


def deployment(
    component: str, desired: int, ready: int, *, updated: int | None = None, **more: Any
) -> Object:
    names = {w.component: w.deployment for w in OUTCOME.wanted} | {"worker": ("team-a", "x")}
    namespace, name = names[component]
    conditions = more.get("conditions", [])
    return {
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": namespace, "generation": 1},
        "spec": {"replicas": desired, "selector": {"matchLabels": {"app": "x", "role": component}}},
        "status": {
            "replicas": more.get("total", max(desired, ready)),
            "readyReplicas": ready,
            "updatedReplicas": desired if updated is None else updated,
            "observedGeneration": more.get("observed", 1),
            "conditions": conditions,
        },
    }


def pod(component: str, name: str, reason: str) -> Object:
    status = {"name": component, "ready": False, "state": {"waiting": {"reason": reason, "message": "m"}}}
    return {
        "metadata": {"name": name, "uid": name, "labels": {"tandem.dev/component": component}},
        "spec": {"nodeName": "n"},
        "status": {"containerStatuses": [status]},
    }


def status(
    *owned: Object,
    before: Object | None = None,
    pods: Sequence[Object] = (),
    outcome: Outcome = OUTCOME,
    warnings: Mapping[str, Sequence[Object]] | None = None,
    applied: Mapping[Any, int] | None = None,
    now: datetime = NOW,
    paused: bool = False,
) -> Object:
    made = new_status(
        ENDPOINT, before or {}, outcome, owned, pods, warnings or {}, applied=applied, paused=paused, now=now
    )
    assert list(schema_problems(made, SCHEMA)) == []
    return made


def conditions(found: Object) -> dict[str, tuple[str, str]]:
    return {c["type"]: (c["status"], c["reason"]) for c in found["conditions"]}


WHOLE = [deployment("prefill", 2, 2), deployment("decode", 1, 1), deployment("router", 1, 1)]


def test_an_endpoint_that_is_deployed_says_so_in_hyperpods_words() -> None:
    made = status(*WHOLE)
    assert made["state"] == "DeploymentComplete"
    assert made["conditions"][0]["message"] == "DPD prefill and decode deployments are ready" == READY_MESSAGE
    assert conditions(made) == {
        "Ready": ("True", "Deployed"),
        "PrefillReady": ("True", "Ready"),
        "DecodeReady": ("True", "Ready"),
        "RouterReady": ("True", "Ready"),
        "Validated": ("True", "Valid"),
        "ModelSource": ("True", "Available"),
    }
    assert {name: role["summary"] for name, role in made["roles"].items()} == {
        "prefill": "2/2",
        "decode": "1/1",
        "router": "1/1",
    }
    assert made["observedGeneration"] == 3
    assert made["transfer"] == {"connector": "nixl", "reason": "asked for"}


def test_the_scale_subresource_counts_decoders() -> None:
    made = status(*WHOLE)
    assert (made["replicas"], made["selector"]) == (1, "app=x,role=decode")
    assert made["deploymentStatus"]["name"] == "decode-x"
    assert made["deploymentStatus"]["status"]["readyReplicas"] == 1


def test_before_anything_is_there_it_is_pending() -> None:
    made = status()
    assert made["state"] == "DeploymentPending"
    assert conditions(made)["Ready"] == ("False", "Deploying")


def test_while_pods_start_it_is_in_progress_and_says_which_are_missing() -> None:
    made = status(deployment("prefill", 2, 1), deployment("decode", 1, 0), deployment("router", 1, 0))
    assert made["state"] == "DeploymentInProgress"
    message = made["conditions"][0]["message"]
    assert "prefill: 1 of 2 pods are ready" in message
    assert "decode: 0 of 1 pods are ready" in message


def test_a_deployment_whose_newest_form_was_not_seen_yet_is_not_ready() -> None:
    made = status(deployment("prefill", 2, 2, observed=0), *WHOLE[1:])
    assert made["state"] != "DeploymentComplete"
    assert conditions(made)["PrefillReady"][0] == "False"


def test_the_cause_is_told_for_the_role_and_for_the_endpoint() -> None:
    pods = [pod("decode", "decode-x-1", "ImagePullBackOff")]
    made = status(deployment("prefill", 2, 2), deployment("decode", 1, 0), WHOLE[2], pods=pods)
    cause = "ImagePullBackOff: container decode: m (pod decode-x-1)"
    assert made["roles"]["decode"]["trouble"] == cause
    assert made["roles"]["prefill"]["trouble"] == ""
    assert cause in made["conditions"][0]["message"]
    assert conditions(made)["DecodeReady"] == ("False", "ImagePullBackOff")


def test_pods_that_may_not_be_created_are_told() -> None:
    failure = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: gpus"}
    made = status(deployment("prefill", 2, 0, conditions=[failure]), *WHOLE[1:])
    assert conditions(made)["PrefillReady"] == ("False", "PodsRefused")
    assert made["roles"]["prefill"]["trouble"] == "exceeded quota: gpus"


def test_a_deployment_that_does_not_get_on_has_failed_and_can_recover() -> None:
    late = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
    made = status(deployment("prefill", 2, 0, conditions=[late]), *WHOLE[1:])
    assert made["state"] == "DeploymentFailed"
    assert status(*WHOLE, before=made)["state"] == "DeploymentComplete"


def test_a_pod_that_goes_and_comes_back_is_no_new_deployment() -> None:
    made = status(deployment("prefill", 2, 1), *WHOLE[1:], before=status(*WHOLE))
    assert made["state"] == "DeploymentComplete"
    assert conditions(made)["Ready"] == ("True", "PodsMissing")
    assert conditions(made)["PrefillReady"] == ("False", "Starting")


def test_nor_is_it_before_the_cluster_has_made_the_new_pod() -> None:
    made = status(deployment("prefill", 2, 1, updated=1, total=1), *WHOLE[1:], before=status(*WHOLE))
    assert made["state"] == "DeploymentComplete"
    assert conditions(made)["PrefillReady"][0] == "False"


def test_the_last_pod_of_a_role_is_another_matter() -> None:
    made = status(WHOLE[0], deployment("decode", 1, 0), WHOLE[2], before=status(*WHOLE))
    assert made["state"] == "DeploymentInProgress"
    assert conditions(made)["Ready"] == ("False", "Deploying")


def test_a_rollout_serves_and_is_in_progress() -> None:
    made = status(deployment("prefill", 2, 2, updated=1), *WHOLE[1:], before=status(*WHOLE))
    assert made["state"] == "DeploymentInProgress"
    assert conditions(made)["Ready"] == ("True", "RollingOut")
    assert conditions(made)["PrefillReady"] == ("False", "RollingOut")


def test_an_old_pod_counts_for_no_new_one() -> None:
    """A router's newest pod comes before the old one leaves."""
    rolling = deployment("router", 1, 1, updated=1, total=2)
    made = status(*WHOLE[:2], rolling)
    assert made["state"] == "DeploymentInProgress"
    assert conditions(made)["RouterReady"] == ("False", "RollingOut")
    assert conditions(made)["Ready"] == ("True", "RollingOut")
    assert "router: pods of before are still there (1)" in made["conditions"][0]["message"]
    assert status(*WHOLE[:2], rolling, before=status(*WHOLE))["state"] == "DeploymentInProgress"


def test_what_was_applied_counts_before_a_watch_shows_it() -> None:
    name = OUTCOME.wanted[0].deployment
    assert status(*WHOLE, applied={name: 1})["state"] == "DeploymentComplete"
    made = status(*WHOLE, applied={name: 2}, before=status(*WHOLE))
    assert made["state"] == "DeploymentInProgress"
    assert conditions(made)["PrefillReady"][0] == "False"


def test_before_its_objects_are_made_an_endpoint_is_pending() -> None:
    made = pending(ENDPOINT, NOW)
    assert list(schema_problems(made, SCHEMA)) == []
    assert (made["state"], made["observedGeneration"]) == ("DeploymentPending", 3)
    assert conditions(made) == {"Ready": ("False", "Pending")}
    assert [event.type for event in transitions((), made["conditions"])] == ["Normal"]


def running(component: str, *, started: bool) -> Object:
    made = pod(component, f"{component}-1", "")
    container = {"name": component, "ready": False, "started": started, "state": {"running": {}}}
    return made | {"status": {"containerStatuses": [container]}}


def unhealthy(message: str) -> Object:
    return {
        "type": "Warning",
        "reason": "Unhealthy",
        "message": message,
        "lastTimestamp": "2026-11-30T04:00:00Z",
    }


def test_an_engine_that_loads_is_not_ill() -> None:
    loading = running("prefill", started=False)
    warnings = {"prefill-1": [unhealthy("Startup probe failed: connection refused")]}
    made = status(deployment("prefill", 1, 0), *WHOLE[1:], pods=[loading], warnings=warnings)
    assert conditions(made)["PrefillReady"] == ("False", "Loading")
    assert "prefill: 0 of 1 pods are ready: 1 still loading the model" in made["conditions"][0]["message"]
    served = running("prefill", started=True)
    warnings = {"prefill-1": [unhealthy("Readiness probe failed: statuscode 503")]}
    made = status(deployment("prefill", 1, 0), *WHOLE[1:], pods=[served], warnings=warnings)
    assert conditions(made)["PrefillReady"] == ("False", "Unhealthy")


def test_a_router_without_engines_is_not_ill() -> None:
    waits = running("router", started=True)
    warnings = {"router-1": [unhealthy("Readiness probe failed: statuscode 503")]}
    router = deployment("router", 1, 0)
    first = status(
        deployment("prefill", 1, 0), WHOLE[1], router, pods=[waits], warnings=warnings, before=status(*WHOLE)
    )
    assert conditions(first)["RouterReady"] == ("False", "Starting")
    soon = status(*WHOLE[:2], router, pods=[waits], warnings=warnings, before=first)
    assert conditions(soon)["RouterReady"] == ("False", "Starting")
    later = status(*WHOLE[:2], router, pods=[waits], warnings=warnings, before=soon, now=LATER)
    assert conditions(later)["RouterReady"] == ("False", "Unhealthy")


def test_a_router_says_that_it_waits_for_engines_that_answer() -> None:
    """It needs no prefiller: decoders answer alone."""
    engines, router = [deployment("prefill", 1, 0), deployment("decode", 1, 0)], deployment("router", 1, 0)
    made = status(*engines, router)
    assert made["roles"]["router"]["trouble"] == "waits for a pod of decode that is ready"
    made = status(deployment("prefill", 1, 0), WHOLE[1], router)
    assert made["roles"]["router"]["trouble"] == ""
    unpullable = pod("router", "router-1", "ImagePullBackOff")
    made = status(*engines, router, pods=[unpullable])
    assert made["roles"]["router"]["trouble"].startswith("ImagePullBackOff")


def test_a_driver_that_nobody_installed_is_named_at_once() -> None:
    lacking = replace(OUTCOME, no_driver=("s3.csi.aws.com",))
    creating = pod("prefill", "prefill-x-1", "ContainerCreating")
    made = status(deployment("prefill", 2, 0), *WHOLE[1:], pods=[creating], outcome=lacking)
    assert conditions(made)["PrefillReady"] == ("False", "CsiDriverMissing")
    assert "s3.csi.aws.com" in made["roles"]["prefill"]["trouble"]
    none = [deployment(role, 1, 0) for role in ("prefill", "decode", "router")]
    found = conditions(status(*none, outcome=lacking))
    assert found["ModelSource"] == ("False", "CsiDriverMissing")
    assert found["RouterReady"] == ("False", "Starting")
    assert conditions(status(*WHOLE, outcome=lacking))["ModelSource"] == ("True", "Available")


def test_a_secret_that_is_missing_is_no_failed_download() -> None:
    for reason, said in (("CreateContainerConfigError", "CreateContainerConfigError"), ("", "Crash")):
        waits = pod("prefill", "p", reason)
        state: Object = {"waiting": {"reason": reason, "message": 'secret "hf-token-secret" not found'}}
        if not reason:
            state = {"terminated": {"exitCode": 1, "message": "401 Client Error"}}
        container = {"name": "hf-model-downloader", "ready": False, "state": state}
        waits["status"] = {"initContainerStatuses": [container]}
        made = conditions(status(deployment("prefill", 1, 0), *WHOLE[1:], pods=[waits]))
        assert made["PrefillReady"] == ("False", said)
        assert made["ModelSource"] == ("False", reason or "HuggingFaceDownloadFailed")


def test_a_role_that_its_autoscaler_has_scaled_to_nothing_lacks_nothing() -> None:
    idle = deployment("decode", 0, 0)
    idle["metadata"]["annotations"] = {START_ANNOTATION: "1"}
    made = status(WHOLE[0], idle, WHOLE[2])
    assert made["state"] == "DeploymentComplete"
    assert conditions(made)["Ready"] == ("True", "Deployed")
    assert conditions(made)["DecodeReady"] == ("True", "Ready")
    assert made["roles"]["router"]["trouble"] == ""
    alone = status(WHOLE[0], idle, WHOLE[2], outcome=replace(OUTCOME, absent=("scaledobjects.keda.sh",)))
    assert conditions(alone)["Ready"] == ("False", "ScaledToZero"), "KEDA was removed"


@pytest.mark.parametrize("router", [1, 0], ids=["router not told yet", "router waits"])
def test_a_role_that_nobody_will_scale_up_from_nothing_does_not_serve(router: int) -> None:
    """Scaled by hand while the endpoint is paused; of a colocated one its resource may say so."""
    made = status(WHOLE[0], deployment("decode", 0, 0), deployment("router", 1, router), paused=True)
    assert conditions(made)["Ready"] == ("False", "ScaledToZero")
    assert conditions(made)["DecodeReady"] == ("False", "ScaledToZero")
    assert "decode: scaled to no pods" in made["conditions"][0]["message"]
    assert made["roles"]["router"]["trouble"] == "waits for a pod of decode that is ready"
    assert made["state"] == ("DeploymentComplete" if router else "DeploymentInProgress")


def test_mistakes_are_the_state_and_nothing_else_is_claimed() -> None:
    made = status(outcome=Outcome(problems=("spec.x: is wrong", "spec.y: too"), problem_reason="Invalid"))
    assert made["state"] == "DeploymentFailed"
    assert made["conditions"][0]["message"] == "spec.x: is wrong; spec.y: too"
    assert conditions(made)["Validated"] == ("False", "Invalid")


def test_objects_that_the_api_server_refuses_are_told() -> None:
    refused = replace(OUTCOME, refused=("Service x: name taken",))
    made = status(*WHOLE, outcome=refused)
    assert made["state"] == "DeploymentFailed"
    assert conditions(made)["ObjectsApplied"] == ("False", "Refused")


def test_autoscaling_without_keda_is_a_condition_and_no_failure() -> None:
    made = status(*WHOLE, outcome=replace(OUTCOME, absent=("scaledobjects.keda.sh",)))
    assert made["state"] == "DeploymentComplete"
    assert conditions(made)["Autoscaling"] == ("False", "KedaMissing")


def test_weights_that_cannot_be_reached_are_the_model_sources_trouble() -> None:
    creating = pod("prefill", "prefill-x-1", "ContainerCreating")
    event = {
        "type": "Warning",
        "reason": "FailedMount",
        "message": "driver name s3.csi.aws.com not found",
        "lastTimestamp": "2026-11-30T04:00:00Z",
    }
    made = status(deployment("prefill", 2, 0), *WHOLE[1:], pods=[creating], warnings={"prefill-x-1": [event]})
    source = next(c for c in made["conditions"] if c["type"] == "ModelSource")
    assert (source["status"], source["reason"]) == ("False", "FailedMount")
    assert "s3.csi.aws.com" in source["message"]


@pytest.mark.parametrize(
    "message",
    [
        'persistentvolumeclaim "llama-weights" not found',
        "0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims. not found",
    ],
)
def test_a_claim_that_keeps_pods_from_nodes_is_the_model_sources_trouble(message: str) -> None:
    waits = pod("prefill", "prefill-x-1", "")
    unplaced = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    waits["status"] = {"conditions": [unplaced]}
    made = status(deployment("prefill", 2, 0), *WHOLE[1:], pods=[waits])
    assert conditions(made)["ModelSource"] == ("False", "Unschedulable")


def test_a_colocated_endpoint_has_workers() -> None:
    colocated = Outcome(wanted=(Wanted("worker", ("team-a", "x")),), disaggregated=False)
    made = status(deployment("worker", 2, 2), outcome=colocated)
    assert made["conditions"][0]["message"] == "the deployment is ready"
    assert made["roles"] == {
        "worker": {"desired": 2, "ready": 2, "updated": 2, "summary": "2/2", "trouble": ""}
    }


def test_a_pause_is_told() -> None:
    assert conditions(status(*WHOLE, paused=True))["Paused"] == ("True", "Annotation")


def test_nothing_is_written_for_an_endpoint_at_rest() -> None:
    first = status(*WHOLE)
    second = status(*WHOLE, before=first, now=LATER)
    assert second == first
    assert change(first, second) == {}
    assert list(transitions(first["conditions"], second["conditions"])) == []


def test_a_conditions_time_is_that_of_its_last_change() -> None:
    first = status(*WHOLE)
    second = status(deployment("prefill", 2, 1), *WHOLE[1:], before=first, now=LATER)
    times = {c["type"]: c["lastTransitionTime"] for c in second["conditions"]}
    assert times["PrefillReady"] == "2026-11-30T04:05:00Z"
    assert times["Ready"] == times["DecodeReady"] == "2026-11-30T04:00:00Z"


def test_events_tell_what_has_changed_once() -> None:
    first = status(deployment("prefill", 2, 0), *WHOLE[1:])
    pods = [pod("prefill", "p", "ErrImagePull")]
    second = status(deployment("prefill", 2, 0), *WHOLE[1:], before=first, pods=pods)
    told = list(transitions(first["conditions"], second["conditions"]))
    assert [(e.type, e.reason) for e in told] == [("Warning", "ImagePullBackOff")]
    third = status(*WHOLE, before=second)
    told = list(transitions(second["conditions"], third["conditions"]))
    assert {("Normal", "Deployed"), ("Normal", "Ready")} <= {(e.type, e.reason) for e in told}


def test_one_that_is_deleted_says_what_it_waits_for() -> None:
    made = deleting(ENDPOINT, status(*WHOLE), 7, LATER)
    assert made["state"] == "DeletionInProgress"
    assert made["conditions"][0]["message"] == "7 objects of the endpoint are being deleted"
    assert list(schema_problems(made, SCHEMA)) == []


json = st.recursive(
    st.integers() | st.text(max_size=3),
    lambda inner: (
        st.dictionaries(st.text("abc", max_size=2), inner, max_size=3) | st.lists(inner, max_size=2)
    ),
    max_leaves=12,
)


@given(
    st.dictionaries(st.text("abc", max_size=2), json, max_size=4),
    st.dictionaries(st.text("abc", max_size=2), json, max_size=4),
)
def test_a_change_makes_one_status_the_other(before: Object, after: Object) -> None:
    def merged(target: Any, patch: Any) -> Any:  # RFC 7386
        if not isinstance(patch, dict):
            return patch
        made = dict(target) if isinstance(target, dict) else {}
        for name, value in patch.items():
            if value is None:
                made.pop(name, None)
            else:
                made[name] = merged(made.get(name), value)
        return made

    patch = change(before, after)
    assert merged(before, patch) == after
    assert (patch == {}) == (before == after)


def test_a_message_fits_into_a_condition() -> None:
    problems = tuple(f"spec.field{number}: is wrong" for number in range(5000))
    made = status(*WHOLE, outcome=Outcome(problems=problems))
    assert all(len(c["message"]) <= 32_768 for c in made["conditions"])
