"""Which nodes pods run on, and where HyperPod would say no."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from tandem.api.crd.structural import Location
from tandem.api.validation.checks.resources import ROLES
from tandem.api.validation.metadata import key_mistake, label_mistake
from tandem.api.validation.report import Found
from tandem.api.validation.subject import Subject, location, objects_in, whole

DPD_TYPES = (
    "ml.p5.48xlarge",
    "ml.p5e.48xlarge",
    "ml.p5en.48xlarge",
    "ml.p6-b200.48xlarge",
    "ml.p6-b300.48xlarge",
)
"""The instance types that HyperPod disaggregates on."""


def placement_checks(subject: Subject) -> Iterator[Found]:
    kind, kinds = subject.text("spec.instanceType"), subject.texts("spec.instanceTypes")
    listed = [(location("spec.instanceTypes", i), name) for i, name in enumerate(kinds)]
    if subject.has("spec.nodeAffinity") and (kind or kinds):
        yield Found(
            "IEC604",
            location("spec.nodeAffinity"),
            f"stands beside {'instanceType' if kind else 'instanceTypes'}: nodes must satisfy both, and "
            f"HyperPod's "
            "command line refuses it. Keep one of them",
        )
    if (
        subject.version == "v1"
        and subject.object("spec")
        and not (kind or kinds or subject.has("spec.nodeAffinity"))
    ):
        yield Found(
            "IEC605",
            location("spec"),
            "names no nodes: pods run on any that have the GPUs. HyperPod wants instanceType, "
            "instanceTypes or "
            "nodeAffinity",
        )
    for i, (at, name) in enumerate(listed):
        if name in kinds[:i]:
            yield Found("IEC716", at, f"is {name}, which is in the list already")
        elif not name.startswith("ml."):
            yield Found(
                "IEC716", at, f"is {name!r}; HyperPod's instance types begin with ml., as ml.p5.48xlarge"
            )
    yield from _labels(subject)
    yield from node_affinity_errors(subject.get("spec.nodeAffinity"), location("spec.nodeAffinity"))
    yield from combined_errors(subject, None, location("spec.nodeAffinity"))
    if subject.disaggregated:
        given = [(location("spec.instanceType"), kind)] if kind else listed
        for at, name in given:
            if name.startswith("ml.") and name not in DPD_TYPES:
                yield Found("IEC602", at, f"is {name}; HyperPod disaggregates only on {', '.join(DPD_TYPES)}")


MOST_COMBINED = 1 << 20
"""Bytes of a pod's node selector terms; no object may hold much more."""


def combined_errors(subject: Subject, affinity: Any, at: Location) -> Iterator[Found]:
    """A role's NodeAffinity, of which each term is put together with each of the endpoint's own and with its
    instance types: two long lists come to more than any memory holds."""
    types = [text for path in ("spec.instanceType", "spec.instanceTypes") if (text := subject.get(path))]
    lists = [types[:1], _required(subject.get("spec.nodeAffinity")), _required(affinity)]
    count, size = 1, 0
    for terms in filter(None, lists):
        count *= len(terms)
        size += max(len(json.dumps(term)) for term in terms)
    if count * size > MOST_COMBINED and sum(map(bool, lists)) > 1:
        yield Found(
            "IEC233",
            at,
            f"comes to {count} terms of up to {size} bytes, each of its own with each of the endpoint's and "
            "its instance types: more than an object may hold",
        )


def _required(affinity: Any) -> list[dict[str, Any]]:
    required = affinity.get(_REQUIRED) if isinstance(affinity, dict) else None
    terms = required.get("nodeSelectorTerms") if isinstance(required, dict) else None
    return [term for _, term in objects_in(terms, ())]


_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt")


def node_affinity_errors(affinity: Any, at: Location) -> Iterator[Found]:
    """Mistakes in a NodeAffinity that lies at `at`."""
    if not isinstance(affinity, dict):
        return
    required = affinity.get(_REQUIRED)
    below = (*at, _REQUIRED, "nodeSelectorTerms")
    terms = list(objects_in(required.get("nodeSelectorTerms") if isinstance(required, dict) else None, below))
    name = "preferredDuringSchedulingIgnoredDuringExecution"
    for where, wish in objects_in(affinity.get(name), (*at, name)):
        weight = whole(wish.get("weight"))
        if weight is not None and not 1 <= weight <= 100:
            yield Found("IEC233", (*where, "weight"), f"must be from 1 to 100 (it is {weight})")
        if isinstance(term := wish.get("preference"), dict):
            terms.append(((*where, "preference"), term))
    for where, term in terms:
        for place, asked in objects_in(term.get("matchExpressions"), (*where, "matchExpressions")):
            key, operator = asked.get("key"), asked.get("operator")
            if isinstance(key, str) and (mistake := key_mistake(key)):
                yield Found("IEC233", (*place, "key"), mistake)
            if isinstance(operator, str) and operator not in _OPERATORS:
                said = f"must be one of {', '.join(_OPERATORS)} (it is {operator!r})"
                yield Found("IEC233", (*place, "operator"), said)
            elif isinstance(values := asked.get("values") or [], list) and (
                what := _values(operator, values)
            ):
                yield Found("IEC233", (*place, "values"), f"must be {what}, as the operator is {operator}")


def _values(operator: Any, values: list[Any]) -> str | None:
    """What the values of a requirement must be, where they are not."""
    if operator in ("In", "NotIn") and not values:
        return "at least one value"
    if operator in ("Exists", "DoesNotExist") and values:
        return "left out"
    one_number = len(values) == 1 and re.fullmatch(r"-?[0-9]+", str(values[0]), re.ASCII)
    return "one whole number in quotes" if operator in ("Gt", "Lt") and not one_number else None


_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


def toleration_errors(tolerations: Any, at: Location) -> Iterator[Found]:
    """Mistakes in a list of Tolerations that lies at `at`."""
    for where, toleration in objects_in(tolerations, at):
        key, operator, effect = (toleration.get(name) for name in ("key", "operator", "effect"))
        value = toleration.get("value") or ""
        if key and (mistake := key_mistake(key)):
            yield Found("IEC233", (*where, "key"), mistake)
        if operator and operator not in ("Equal", "Exists"):
            yield Found("IEC233", (*where, "operator"), f"must be Equal or Exists (it is {operator!r})")
        elif not key and operator != "Exists":
            yield Found("IEC233", (*where, "operator"), "must be Exists where there is no key")
        elif operator == "Exists" and value:
            yield Found("IEC233", (*where, "value"), "must be left out, as the operator is Exists")
        elif mistake := label_mistake(value):
            yield Found("IEC233", (*where, "value"), mistake)
        if effect and effect not in _EFFECTS:
            yield Found(
                "IEC233", (*where, "effect"), f"must be one of {', '.join(_EFFECTS)} (it is {effect!r})"
            )
        elif "tolerationSeconds" in toleration and effect != "NoExecute":
            yield Found(
                "IEC233", (*where, "tolerationSeconds"), "must be left out unless effect is NoExecute"
            )


def _labels(subject: Subject) -> Iterator[Found]:
    """What is compared with nodes' labels."""
    topology = "spec.pdSpec.topologySpec"
    paths = ("spec.instanceType", f"{topology}.availabilityZone", f"{topology}.placementGroup")
    given = [(location(path), subject.text(path)) for path in paths]
    given += [
        (location("spec.instanceTypes", i), t) for i, t in enumerate(subject.texts("spec.instanceTypes"))
    ]
    for role in ROLES:
        path = f"spec.pdSpec.{role}.nodeSelector"
        for key, value in subject.object(path).items():
            if mistake := key_mistake(str(key)):
                yield Found("IEC233", location(path, str(key)), mistake)
            given += [(location(path, str(key)), value)] if isinstance(value, str) else []
    for at, value in given:
        if mistake := label_mistake(value):
            yield Found("IEC233", at, mistake)
