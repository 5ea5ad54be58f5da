"""Why a pod does not become ready is told by its cause."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.operator.control.trouble import (
    LONGEST_TEXT,
    Trouble,
    last_error,
    most_telling,
    needs_warnings,
    pod_trouble,
)

Object = dict[str, Any]
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def pod(name: str = "decode-a-1", *, node: str | None = "node-1", **status: Any) -> Object:
    return {"metadata": {"name": name, "uid": name}, "spec": {"nodeName": node}, "status": status}


def container(name: str = "decode-a", **state: Any) -> Object:
    return {"name": name, "ready": False, "restartCount": state.pop("restartCount", 0), **state}


def waiting(reason: str, message: str = "", **more: Any) -> Object:
    return container(state={"waiting": {"reason": reason, "message": message}}, **more)


LOG = """\
(EngineCore_DP0 pid=41) INFO 11-30 04:00:01 [core.py:80] Initializing a V1 LLM engine
(EngineCore_DP0 pid=41) ERROR 11-30 04:00:09 [core.py:700] Traceback (most recent call last):
(EngineCore_DP0 pid=41) ERROR 11-30 04:00:09 [core.py:700]   File "/vllm/v1/engine/core.py", line 690, in run
(EngineCore_DP0 pid=41) ERROR 11-30 04:00:09 [core.py:700] torch.OutOfMemoryError: CUDA out of memory.
INFO 11-30 04:00:10 [launcher.py:1] Shutting down
"""

CASES: dict[str, tuple[Object, str, str]] = {
    "image that cannot be pulled": (
        pod(containerStatuses=[waiting("ImagePullBackOff", 'Back-off pulling image "vllm/x"')]),
        "ImagePullBackOff",
        'container decode-a: Back-off pulling image "vllm/x"',
    ),
    "a missing secret": (
        pod(containerStatuses=[waiting("CreateContainerConfigError", 'secret "hf" not found')]),
        "CreateContainerConfigError",
        'container decode-a: secret "hf" not found',
    ),
    "too little memory": (
        pod(
            containerStatuses=[
                waiting(
                    "CrashLoopBackOff", lastState={"terminated": {"reason": "OOMKilled", "exitCode": 137}}
                )
            ]
        ),
        "OOMKilled",
        "container decode-a was ended because it used more memory than its limit",
    ),
    "a crash, with the engine's last error": (
        pod(
            containerStatuses=[
                waiting(
                    "CrashLoopBackOff",
                    lastState={"terminated": {"reason": "Error", "exitCode": 1, "message": LOG}},
                    restartCount=3,
                )
            ]
        ),
        "CrashLoop",
        "container decode-a ended with exit code 1: torch.OutOfMemoryError: CUDA out of memory.",
    ),
    "a crash that has just happened": (
        pod(containerStatuses=[container(state={"terminated": {"reason": "Error", "exitCode": 2}})]),
        "Crash",
        "container decode-a ended with exit code 2",
    ),
    "an init container that fails": (
        pod(
            initContainerStatuses=[
                container(
                    "hf-model-downloader",
                    state={"terminated": {"reason": "Error", "exitCode": 1, "message": "401 Client Error"}},
                )
            ],
            containerStatuses=[waiting("PodInitializing")],
        ),
        "Crash",
        "container hf-model-downloader ended with exit code 1: 401 Client Error",
    ),
    "no room": (
        pod(
            node=None,
            conditions=[
                {
                    "type": "PodScheduled",
                    "status": "False",
                    "reason": "Unschedulable",
                    "message": "0/2 nodes are available: 2 Insufficient nvidia.com/gpu.",
                }
            ],
        ),
        "Unschedulable",
        "0/2 nodes are available: 2 Insufficient nvidia.com/gpu.",
    ),
    "a node that is lost": (
        pod(
            conditions=[{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "True"}],
            containerStatuses=[container(state={"running": {}}) | {"ready": True}],
        ),
        "NodeNotReady",
        "node node-1 is not ready: its kubelet no longer answers",
    ),
    "evicted": (
        pod(phase="Failed", reason="Evicted", message="The node was low on resource: memory."),
        "Evicted",
        "The node was low on resource: memory.",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_cause_is_told(case: str) -> None:
    found, reason, message = CASES[case]
    assert pod_trouble(found) == Trouble(reason, message, "decode-a-1")


@pytest.mark.parametrize(
    "found",
    [
        pod(containerStatuses=[waiting("ContainerCreating")]),
        pod(containerStatuses=[container(state={"running": {}})]),
        pod(),
        {"metadata": {"name": "p", "uid": "p"}, "spec": {}},
    ],
)
def test_a_pod_on_its_way_has_no_trouble(found: Object) -> None:
    assert pod_trouble(found) is None


@pytest.mark.parametrize("case", CASES)
def test_a_pod_that_is_ready_or_leaves_has_none(case: str) -> None:
    found = CASES[case][0]
    leaving = found | {"metadata": found["metadata"] | {"deletionTimestamp": "2026-11-30T00:00:00Z"}}
    assert pod_trouble(leaving) is None
    ready = found | {"status": found["status"] | {"conditions": [{"type": "Ready", "status": "True"}]}}
    assert pod_trouble(ready) is None


def test_what_only_events_tell_is_asked_for_and_used() -> None:
    found = pod(containerStatuses=[waiting("ContainerCreating")])
    assert needs_warnings(found)
    events = [
        {"type": "Normal", "reason": "Pulled", "message": "x", "lastTimestamp": "2026-11-30T00:00:09Z"},
        {
            "type": "Warning",
            "reason": "FailedMount",
            "message": "old",
            "lastTimestamp": "2026-11-30T00:00:01Z",
        },
        {
            "type": "Warning",
            "reason": "FailedMount",
            "message": "driver name s3.csi.aws.com not found in the list of registered CSI drivers",
            "lastTimestamp": "2026-11-30T00:00:05Z",
        },
    ]
    assert str(pod_trouble(found, events)) == (
        "FailedMount: driver name s3.csi.aws.com not found in the list of registered CSI drivers "
        "(pod decode-a-1)"
    )


def test_nothing_is_asked_where_the_pod_itself_tells_or_has_no_node() -> None:
    assert not needs_warnings(pod(containerStatuses=[waiting("ErrImagePull")]))
    assert not needs_warnings(pod(node=None))


def test_a_pull_that_fails_again_and_again_is_one_trouble() -> None:
    cause = "rpc error: code = NotFound desc = failed to resolve reference"
    tried = pod(containerStatuses=[waiting("ErrImagePull", cause)])
    pause = f'Back-off pulling image "vllm/x": ErrImagePull: {cause}'
    between = pod(containerStatuses=[waiting("ImagePullBackOff", pause)])
    assert pod_trouble(tried) == pod_trouble(between)
    trying = pod(containerStatuses=[waiting("ContainerCreating")])
    failed = {
        "type": "Warning",
        "reason": "Failed",
        "message": f'Failed to pull image "vllm/x": {cause}',
        "involvedObject": {"fieldPath": "spec.containers{decode-a}"},
        "lastTimestamp": "2026-11-30T00:00:05Z",
    }
    after = failed | {"message": "Error: ErrImagePull", "lastTimestamp": "2026-11-30T00:00:06Z"}
    assert pod_trouble(trying, [failed, after]) == pod_trouble(tried)


@pytest.mark.parametrize(
    ("reason", "at", "said"),
    [
        ("Unhealthy", "00:00:29", False),
        ("Unhealthy", "00:00:30", True),
        ("FailedMount", "00:00:00", True),
        ("FailedScheduling", "00:00:30", False),
    ],
)
def test_what_is_over_is_no_trouble(reason: str, at: str, said: bool) -> None:
    found = pod(
        containerStatuses=[
            container(state={"running": {"startedAt": "2026-11-30T00:00:00Z"}}, started=True),
            container("nginx", state={"running": {"startedAt": "2026-11-29T23:00:00Z"}}, started=True),
        ]
    )
    event = {"type": "Warning", "reason": reason, "lastTimestamp": f"2026-11-30T{at}Z"}
    earlier = {"type": "Warning", "reason": "FailedMount", "lastTimestamp": "2026-11-29T23:59:59Z"}
    trouble = pod_trouble(found, [earlier, event])
    assert (trouble and trouble.reason) == (reason if said else None)


def test_nothing_is_asked_of_an_engine_that_loads() -> None:
    loads = pod(containerStatuses=[container(state={"running": {}}, started=False)])
    assert not needs_warnings(loads)
    assert needs_warnings(pod(containerStatuses=[container(state={"running": {}}, started=True)]))


ONE_ZONE = {
    "podAffinity": {
        REQUIRED: [{"labelSelector": {}, "topologyKey": "topology.kubernetes.io/zone"}],
    },
}
ONE_TYPE = {
    "nodeAffinity": {
        REQUIRED: {
            "nodeSelectorTerms": [
                {
                    "matchExpressions": [
                        {
                            "key": "node.kubernetes.io/instance-type",
                            "operator": "In",
                            "values": ["ml.p5.48xlarge"],
                        },
                        {"key": "spot", "operator": "DoesNotExist"},
                    ]
                },
                {"matchExpressions": [{"key": "zone", "operator": "NotIn", "values": ["a", "b"]}]},
            ]
        }
    }
}
NO_ZONE = "0/2 nodes are available: 2 node(s) didn't match pod affinity rules."
NO_LABEL = "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector."


@pytest.mark.parametrize(
    ("said", "spec", "hint"),
    [
        (
            NO_ZONE,
            {"affinity": ONE_ZONE},
            "The pods of an endpoint go into one zone (spec.pdSpec.topologySpec.sameAZ), and a node without "
            "the label topology.kubernetes.io/zone is in none: label the nodes, or set sameAZ to false.",
        ),
        (NO_ZONE, {}, None),
        (
            NO_LABEL,
            {"affinity": ONE_TYPE, "nodeSelector": {"pool": "prefill"}},
            "The pod takes nodes with pool=prefill and node.kubernetes.io/instance-type=ml.p5.48xlarge and "
            "spot DoesNotExist or zone NotIn a, b: label nodes so, or change what the resource asks for.",
        ),
        (
            NO_LABEL,
            {"nodeSelector": {"pool": "prefill"}},
            "The pod takes nodes with pool=prefill: label nodes so, or change what the resource asks for.",
        ),
        (NO_LABEL, {}, None),
        (
            "0/2 nodes are available: 1 Insufficient nvidia.com/gpu, 1 node(s) didn't match Pod's node "
            "affinity/selector.",
            {"nodeSelector": {"pool": "prefill"}},
            None,
        ),
    ],
    ids=["zone", "another affinity", "labels", "selector", "none of ours", "such nodes are full"],
)
def test_of_labels_that_keep_a_pod_from_all_nodes_is_told_which_and_what_to_do(
    said: str, spec: Object, hint: str | None
) -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": said}
    found = pod(node=None, conditions=[condition])
    found["spec"] = spec
    trouble = pod_trouble(found)
    assert trouble is not None
    assert trouble.message == (f"{said} {hint}" if hint else said)


def test_of_many_labels_no_more_are_told_than_a_status_holds() -> None:
    said = "0/9 nodes are available: " + "1 node(s) had untolerated taint {x}, " * 40 + NO_LABEL
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": said}
    found = pod(node=None, conditions=[condition])
    found["spec"] = {"nodeSelector": {f"label-{i}": "x" for i in range(1000)}}
    trouble = pod_trouble(found)
    assert trouble is not None
    assert "The pod takes nodes with label-0=x and label-1=x" in trouble.message
    assert len(trouble.message) < 3 * LONGEST_TEXT


def test_of_many_pods_the_most_frequent_cause_is_told() -> None:
    one, two, three = Trouble("OOMKilled", "m", "a"), Trouble("Crash", "m", "b"), Trouble("Crash", "m", "c")
    assert most_telling([three, one, two]) == two
    assert most_telling([]) is None


@pytest.mark.parametrize(
    ("log", "line"),
    [
        (LOG, "torch.OutOfMemoryError: CUDA out of memory."),
        ("one\ntwo\n", "two"),
        ("", ""),
        ("ValueError: bad flag\n\n", "ValueError: bad flag"),
        ("2026-11-30 04:00:00,123 ERROR no space left on device", "no space left on device"),
    ],
)
def test_the_last_line_that_sounds_like_the_cause(log: str, line: str) -> None:
    assert last_error(log) == line


def test_a_message_is_not_longer_than_a_status_can_bear() -> None:
    found = pod_trouble(pod(containerStatuses=[waiting("ErrImagePull", "x" * 100_000)]))
    assert found is not None
    assert len(found.message) < 1000
