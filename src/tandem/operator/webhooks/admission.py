"""Admission: mistakes are told when a resource is applied, not later in its status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.engine.validation import validate
from tandem.operator.texts import shortened

_LONGEST_WARNING = 250
"""Characters of one warning that API servers pass on whole."""


def admission_review(review: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to an AdmissionReview (`admission.k8s.io/v1`): every mistake at once, and warnings.

    A change is refused for what it makes wrong, not for what was there before: else a rule that a newer
    version brings would forbid even the deletion of an object, whose finalizers are a change.
    """
    request = review["request"]
    new, old = request.get("object"), request.get("oldObject")
    response: dict[str, Any] = {"uid": request["uid"], "allowed": True}
    if isinstance(new, Mapping):
        report = validate(_judged(new), stored=True)
        known = (
            {(f.rule, f.path) for f in validate(_judged(old), stored=True).errors}
            if isinstance(old, Mapping)
            else set()
        )
        errors = [f for f in report.errors if (f.rule, f.path) not in known]
        if errors:
            count = "1 mistake" if len(errors) == 1 else f"{len(errors)} mistakes"
            text = "\n".join(f"- {f.said}" for f in errors)
            response["allowed"] = False
            response["status"] = {"code": 422, "reason": "Invalid", "message": f"{count}:\n{text}"}
        said = [shortened(finding.said, _LONGEST_WARNING) for finding in report.warnings]
        if said:
            response["warnings"] = said
    return {"apiVersion": review["apiVersion"], "kind": review["kind"], "response": response}


def _judged(found: Mapping[str, Any]) -> dict[str, Any]:
    """As its author wrote it: status and the API server's own metadata are not theirs."""
    return {name: value for name, value in found.items() if name != "status"}
