"""The status of an endpoint: a pure function of what was made of it and what is seen of that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from tandem.kube import Key, Object, key_of
from tandem.operator import names
from tandem.operator.control.trouble import Trouble, condition, most_telling, pod_trouble
from tandem.operator.texts import shortened, stamp

READY_MESSAGE = "DPD prefill and decode deployments are ready"
"""HyperPod's own words, which people and scripts look for."""

PENDING, IN_PROGRESS, FAILED, COMPLETE = (
    f"Deployment{phase}" for phase in ("Pending", "InProgress", "Failed", "Complete")
)
DELETING = "DeletionInProgress"

_LONGEST_MESSAGE = 32_768
_DEPLOYMENT_FIELDS = (
    "availableReplicas",
    "collisionCount",
    "conditions",
    "observedGeneration",
    "readyReplicas",
    "replicas",
    "terminatingReplicas",
    "unavailableReplicas",
    "updatedReplicas",
)


@dataclass(frozen=True)
class Wanted:
    """A Deployment of the endpoint, by its component: prefill, decode, worker or router."""

    component: str
    deployment: Key


@dataclass(frozen=True)
class Outcome:
    """What a pass made of an endpoint."""

    problems: tuple[str, ...] = ()
    """Why nothing can be made of it."""
    problem_reason: str = "Invalid"
    warnings: tuple[str, ...] = ()
    wanted: tuple[Wanted, ...] = ()
    """Workers first, the router last."""
    disaggregated: bool = True
    transfer: Mapping[str, str] | None = None
    metrics: Mapping[str, Any] | None = None
    refused: tuple[str, ...] = ()
    """Objects that the API server will not have, and why."""
    absent: tuple[str, ...] = ()
    """Definitions of kinds that the endpoint needs and the cluster does not have."""

    def with_objects(self, *, refused: tuple[str, ...], absent: tuple[str, ...]) -> Outcome:
        return replace(self, refused=refused, absent=absent)


@dataclass(frozen=True)
class Role:
    component: str
    desired: int
    ready: int
    updated: int
    observed: bool
    """The Deployment is there, and its controller has seen its newest form."""
    stuck: bool
    """It did not get on within its deadline, or its pods cannot be created."""
    trouble: Trouble | None
    blocked: str | None
    """Why pods cannot even be created."""

    @property
    def whole(self) -> bool:
        return self.observed and self.ready >= self.desired and self.updated >= self.desired

    @property
    def serving(self) -> bool:
        return self.ready > 0 or (self.observed and self.desired == 0)

    @property
    def cause(self) -> str:
        return self.blocked or (str(self.trouble) if self.trouble else "")


def new_status(
    found: Object,
    before: Object,
    outcome: Outcome,
    owned: Sequence[Object],
    pods: Sequence[Object],
    warnings: Mapping[str, Sequence[Object]],
    *,
    paused: bool,
    now: datetime,
) -> Object:
    """`found` is the endpoint, `before` its status until now, `warnings` Events about pods by the pods' UIDs.

    What has not changed keeps its time, so that the status of an endpoint at rest is always the same.
    """
    deployments = {key_of(o): o for o in owned if o["kind"] == "Deployment"}
    roles = [_role(w, deployments.get(w.deployment), pods, warnings) for w in outcome.wanted]
    generation = found["metadata"].get("generation", 0)
    state = _state(outcome, roles, before, generation)
    conditions = [
        _ready(outcome, roles, state),
        *(_role_ready(role) for role in roles),
        _validated(outcome),
        *_model_source(roles),
        *_others(outcome, paused),
    ]
    made: Object = {
        "state": state,
        "observedGeneration": generation,
        "conditions": _timed(conditions, before.get("conditions") or (), generation, now),
        "roles": {role.component: _role_status(role) for role in roles},
    }
    if outcome.transfer:
        made["transfer"] = dict(outcome.transfer)
    if outcome.metrics:
        made["metricsStatus"] = dict(outcome.metrics)
    workers = [w for w in outcome.wanted if w.component != "router"]
    main = deployments.get(workers[-1].deployment) if workers else None
    if main is not None:
        selector = main["spec"]["selector"]["matchLabels"]
        made["replicas"] = main.get("status", {}).get("replicas", 0)
        made["selector"] = ",".join(f"{name}={value}" for name, value in sorted(selector.items()))
        made["deploymentStatus"] = _deployment_status(main, state, conditions[0], before, now)
    return made


def deleting(found: Object, before: Object, left: int, now: datetime) -> Object:
    """Of an endpoint that waits for `left` of its objects to go."""
    message = f"{left} objects of the endpoint are being deleted"
    ready = _condition("Ready", False, "Deleting", message)
    generation = found["metadata"].get("generation", 0)
    conditions = _timed([ready], before.get("conditions") or (), generation, now)
    return {**before, "state": DELETING, "conditions": conditions, "observedGeneration": generation}


def change(before: Object, after: Object) -> Object:
    """A JSON merge patch (RFC 7386) that makes one object the other; empty where they are equal."""
    patch: Object = {name: None for name in before if name not in after}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(value, dict) and isinstance(old, dict):
            inner = change(old, value)
            if inner:
                patch[name] = inner
        elif name not in before or old != value:
            patch[name] = value
    return patch


def _role(
    wanted: Wanted,
    deployment: Object | None,
    pods: Sequence[Object],
    warnings: Mapping[str, Sequence[Object]],
) -> Role:
    if deployment is None:
        return Role(wanted.component, 1, 0, 0, False, False, None, None)
    status = deployment.get("status", {})
    mine = [p for p in pods if p["metadata"].get("labels", {}).get(names.COMPONENT_LABEL) == wanted.component]
    troubles = (pod_trouble(pod, warnings.get(pod["metadata"]["uid"], ())) for pod in mine)
    failure = condition(deployment, "ReplicaFailure")
    blocked = failure.get("message") if failure.get("status") == "True" else None
    late = condition(deployment, "Progressing").get("reason") == "ProgressDeadlineExceeded"
    return Role(
        component=wanted.component,
        desired=deployment["spec"].get("replicas", 1),
        ready=status.get("readyReplicas", 0),
        updated=status.get("updatedReplicas", 0),
        observed=status.get("observedGeneration", 0) >= deployment["metadata"].get("generation", 0),
        stuck=late,
        trouble=most_telling(trouble for trouble in troubles if trouble),
        blocked=blocked,
    )


def _state(outcome: Outcome, roles: Sequence[Role], before: Object, generation: int) -> str:
    if outcome.problems or outcome.refused:
        return FAILED
    if not any(role.observed for role in roles):
        return PENDING
    if all(role.whole for role in roles):
        return COMPLETE
    if any(role.stuck and not role.serving for role in roles):
        return FAILED
    # A pod that goes and comes back is no new deployment.
    done = before.get("state") == COMPLETE and before.get("observedGeneration") == generation
    if done and all(role.serving and role.updated >= role.desired for role in roles):
        return COMPLETE
    return IN_PROGRESS


def _ready(outcome: Outcome, roles: Sequence[Role], state: str) -> Object:
    """The first condition: whether the endpoint serves."""
    if outcome.problems:
        return _condition("Ready", False, outcome.problem_reason, "; ".join(outcome.problems))
    if outcome.refused:
        return _condition("Ready", False, "ObjectsRefused", "; ".join(outcome.refused))
    short = [role for role in roles if not role.whole]
    if not short:
        message = READY_MESSAGE if outcome.disaggregated else "the deployment is ready"
        return _condition("Ready", True, "Deployed", message)
    message = "; ".join(map(_shortage, short))
    if all(role.serving for role in roles):
        reason = "RollingOut" if any(role.updated < role.desired for role in short) else "PodsMissing"
        return _condition("Ready", True, reason, f"the endpoint serves; {message}")
    reason = "DeploymentFailed" if state == FAILED else "Deploying"
    return _condition("Ready", False, reason, message)


def _role_ready(role: Role) -> Object:
    name = f"{role.component.capitalize()}Ready"
    if role.whole:
        return _condition(name, True, "Ready", f"{role.ready} of {role.desired} pods are ready")
    if role.blocked:
        reason = "PodsRefused"
    elif role.trouble:
        reason = role.trouble.reason
    elif role.ready >= role.desired:
        reason = "RollingOut"
    else:
        reason = "Starting"
    return _condition(name, False, reason, _shortage(role))


def _shortage(role: Role) -> str:
    if not role.observed:
        return f"{role.component}: the deployment is being made"
    if role.ready >= role.desired:
        text = f"{role.component}: {role.updated} of {role.desired} pods are of the newest revision"
    else:
        text = f"{role.component}: {role.ready} of {role.desired} pods are ready"
    return f"{text}: {role.cause}" if role.cause else text


def _validated(outcome: Outcome) -> Object:
    if outcome.problems:
        return _condition("Validated", False, outcome.problem_reason, "; ".join(outcome.problems))
    if outcome.warnings:
        return _condition("Validated", True, "Warnings", "; ".join(outcome.warnings))
    return _condition("Validated", True, "Valid", "the resource is valid")


_SOURCE = ("FailedMount", "FailedAttachVolume", "FailedMapVolume", "ProvisioningFailed")


def _model_source(roles: Sequence[Role]) -> Iterable[Object]:
    """Whether model pods get at their weights."""
    workers = [role for role in roles if role.component != "router"]
    if not workers:
        return
    for role in workers:
        trouble = role.trouble
        if trouble and (
            trouble.reason in _SOURCE
            or names.DOWNLOAD_CONTAINER in trouble.message
            or names.COPY_CONTAINER in trouble.message
            or "persistentvolumeclaim" in trouble.message
        ):
            reason = (
                "HuggingFaceDownloadFailed" if names.DOWNLOAD_CONTAINER in trouble.message else trouble.reason
            )
            yield _condition("ModelSource", False, reason, str(trouble))
            return
    if any(role.ready for role in workers):
        yield _condition("ModelSource", True, "Available", "the weights reach the model pods")
    else:
        yield _condition("ModelSource", None, "Unknown", "no model pod is ready yet")


def _others(outcome: Outcome, paused: bool) -> Iterable[Object]:
    if outcome.absent:
        kinds = ", ".join(outcome.absent)
        yield _condition(
            "Autoscaling",
            False,
            "KedaMissing",
            f"the cluster does not have {kinds}: install KEDA, and the endpoint scales; until then the "
            "number of pods stays as it is",
        )
    if outcome.refused and not outcome.problems:
        yield _condition("ObjectsApplied", False, "Refused", "; ".join(outcome.refused))
    if paused:
        yield _condition("Paused", True, "Annotation", "nothing is changed while tandem.dev/paused is set")


def _role_status(role: Role) -> Object:
    return {
        "desired": role.desired,
        "ready": role.ready,
        "updated": role.updated,
        "summary": f"{role.ready}/{role.desired}",
        "trouble": role.cause,
    }


def _deployment_status(
    deployment: Object, state: str, ready: Object, before: Object, now: datetime
) -> Object:
    status = deployment.get("status", {})
    made = {
        "name": deployment["metadata"]["name"],
        "deploymentObjectOverallState": state,
        "message": ready["message"],
        "reason": ready["reason"],
        "status": {name: status[name] for name in _DEPLOYMENT_FIELDS if name in status},
    }
    old = before.get("deploymentStatus") or {}
    same = {name: value for name, value in old.items() if name != "lastUpdated"} == made
    return made | {"lastUpdated": old["lastUpdated"] if same else stamp(now)}


def _condition(kind: str, holds: bool | None, reason: str, message: str) -> Object:
    status = "Unknown" if holds is None else str(holds)
    return {"type": kind, "status": status, "reason": reason, "message": shortened(message, _LONGEST_MESSAGE)}


def _timed(made: Sequence[Object], before: Iterable[Object], generation: int, now: datetime) -> list[Object]:
    """With the time of their last transition: when their status last changed."""
    old = {found["type"]: found for found in before}
    timed = []
    for found in made:
        last = old.get(found["type"])
        kept = last is not None and last["status"] == found["status"]
        at = last["lastTransitionTime"] if last is not None and kept else stamp(now)
        timed.append(found | {"lastTransitionTime": at, "observedGeneration": generation})
    return timed
