"""Volumes of weights stay as long as a pod may need them."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.kube import Object
from tandem.operator.control.volumes import in_use, worn_out

CLAIM: Object = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "model-old"}}
VOLUME: Object = {
    "apiVersion": "v1",
    "kind": "PersistentVolume",
    "metadata": {"name": "v"},
    "spec": {"claimRef": {"name": "model-old"}},
}


def pod_spec(claim: str) -> Object:
    return {"volumes": [{"name": "tmp", "emptyDir": {}}, {"persistentVolumeClaim": {"claimName": claim}}]}


def deployment(claim: str = "model-new", *, generation: int = 2, **status: int) -> Object:
    reported = {"observedGeneration": 2, "replicas": 2, "updatedReplicas": 2} | status
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "decode", "generation": generation},
        "spec": {"replicas": 2, "template": {"spec": pod_spec(claim)}},
        "status": reported,
    }


@pytest.mark.parametrize("found", [CLAIM, VOLUME], ids=["claim", "volume"])
@pytest.mark.parametrize(
    ("deployments", "pods", "used"),
    [
        ([deployment()], [], False),
        ([], [], False),
        ([deployment("model-old")], [], True),
        ([deployment()], [{"spec": pod_spec("model-old")}], True),
        ([deployment()], [{"spec": pod_spec("model-new")}], False),
        ([deployment(generation=3)], [], True),
        ([deployment(updatedReplicas=1)], [], True),
        ([deployment(replicas=3)], [], True),
        ([deployment(), deployment(updatedReplicas=0)], [], True),
    ],
    ids=[
        "rolled out",
        "none",
        "wanted",
        "a pod left",
        "new pods",
        "unseen",
        "new ones missing",
        "old ones left",
        "one of two",
    ],
)
def test_a_former_one_stays_until_the_last_pod_has_the_new_one(
    found: Object, deployments: list[Object], pods: list[Object], used: bool
) -> None:
    assert in_use(found, [found, *deployments], pods) == used


def test_other_objects_go_at_once() -> None:
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s"}}
    assert not in_use(service, [deployment(updatedReplicas=0)], [])


@pytest.mark.parametrize(
    ("found", "phase", "worn"),
    [
        (VOLUME, "Released", True),
        (VOLUME, "Available", False),
        (VOLUME, "Bound", False),
        (CLAIM, "Lost", True),
        (CLAIM, "Pending", False),
        (CLAIM, None, False),
    ],
)
def test_what_has_lost_its_other_half_can_serve_no_more(found: Object, phase: Any, worn: bool) -> None:
    assert worn_out({**found, "status": {"phase": phase}}) == worn
