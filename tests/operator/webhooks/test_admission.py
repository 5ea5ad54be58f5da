"""`kubectl apply` is told every mistake at once; what was wrong before does not stand in the way."""

from __future__ import annotations

import copy
from typing import Any

from tandem.operator.webhooks.admission import admission_review

from ..endpoints import changed, manifest

Object = dict[str, Any]


def review(new: Object | None, old: Object | None = None) -> Object:
    asked = {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {"uid": "u1", "object": new, "oldObject": old},
    }
    answer = admission_review(asked)
    assert (answer["apiVersion"], answer["kind"]) == (asked["apiVersion"], asked["kind"])
    response: Object = answer["response"]
    assert response["uid"] == "u1"
    return response


BAD = {"spec.worker.args": ["--tensor-parallel-size", "none"], "spec.invocationEndpoint": "no spaces"}


def test_a_good_resource_is_taken() -> None:
    assert review(manifest("dpd-s3"))["allowed"]


def test_every_mistake_is_told_with_its_field() -> None:
    response = review(changed("dpd-s3", BAD))
    assert not response["allowed"]
    assert response["status"]["code"] == 422
    assert "spec.worker.args" in response["status"]["message"]
    assert "spec.invocationEndpoint" in response["status"]["message"]


def test_warnings_do_not_forbid() -> None:
    response = review(changed("dpd-s3", {"spec.pdSpec.decodingSpec.replicas": 3}))
    assert response["allowed"]
    assert any("decodingSpec" in text for text in response["warnings"])
    assert all(len(text) <= 250 for text in response["warnings"])


def test_what_was_wrong_before_may_stay_so_that_finalizers_can_be_taken_off() -> None:
    old = changed("dpd-s3", BAD)
    new = copy.deepcopy(old)
    new["metadata"]["finalizers"] = []
    assert review(new, old)["allowed"]


def test_a_new_mistake_beside_an_old_one_is_told_alone() -> None:
    old = changed("dpd-s3", {"spec.invocationEndpoint": "no spaces"})
    response = review(changed("dpd-s3", BAD), old)
    assert not response["allowed"]
    assert "spec.worker.args" in response["status"]["message"]
    assert "spec.invocationEndpoint" not in response["status"]["message"]


def test_a_deletion_is_none_of_its_business() -> None:
    assert review(None, manifest("dpd-s3"))["allowed"]


def test_any_shape_gets_an_answer() -> None:
    assert not review({"spec": [1, 2], "metadata": None, "kind": 7})["allowed"]
