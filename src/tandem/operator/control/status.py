"""The status of an endpoint: a pure function of what was made of it and what is seen of that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from tandem.kube import Key, Object, key_of
from tandem.operator import names
from tandem.operator.control.rollout import MISSING, Rollout, rollout
from tandem.operator.control.trouble import Trouble, condition, is_loading, most_telling, pod_trouble
from tandem.operator.texts import shortened, stamp

READY_MESSAGE = "DPD prefill and decode deployments are ready"
"""HyperPod's own words, which people and scripts look for."""

PENDING, IN_PROGRESS, FAILED, COMPLETE = (
    f"Deployment{phase}" for phase in ("Pending", "InProgress", "Failed", "Complete")
)
DELETING = "DeletionInProgress"

_SCALED_TO_ZERO = "ScaledToZero"
"""Nobody asks for a pod of a role, and no autoscaler will."""
_PROVED_SECONDS = 30
"""So long after its engines are ready a router should be, too."""
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
    no_driver: tuple[str, ...] = ()
    """CSI drivers that its volumes need and the cluster does not have."""


@dataclass(frozen=True, kw_only=True)
class Role(Rollout):
    component: str
    stuck: bool = False
    """It did not get on within its deadline."""
    trouble: Trouble | None = None
    blocked: str | None = None
    """Why pods cannot even be created."""
    loading: int = 0
    """Pods whose engine runs and does not answer yet."""
    waits_for: str = ""
    """Of a router: the role that answers, where it has no ready pod."""

    @property
    def cause(self) -> str:
        if self.blocked or self.trouble:
            return self.blocked or str(self.trouble)
        if self.waits_for:
            return f"waits for a pod of {self.waits_for} that is ready"
        return f"{self.loading} still loading the model" if self.loading else ""


def new_status(
    found: Object,
    before: Object,
    outcome: Outcome,
    owned: Sequence[Object],
    pods: Sequence[Object],
    warnings: Mapping[str, Sequence[Object]],
    *,
    applied: Mapping[Key, int] | None = None,
    paused: bool,
    now: datetime,
) -> Object:
    """`found` is the endpoint, `before` its status until now, `warnings` Events about pods by the pods' UIDs,
    `applied` the generations of the Deployments that were applied last: those in `owned` may be older.

    What has not changed keeps its time, so that the status of an endpoint at rest is always the same.
    """
    deployments = {key_of(o): o for o in owned if o["kind"] == "Deployment"}
    roles = [
        _role(w, deployments.get(w.deployment), (applied or {}).get(w.deployment, 0), pods, warnings)
        for w in outcome.wanted
    ]
    if outcome.absent:  # the autoscaler itself
        roles = [replace(role, scaled=False) for role in roles]
    roles = _told_apart(roles, outcome, before, now)
    generation = found["metadata"].get("generation", 0)
    state = _state(outcome, roles, before, generation)
    conditions = [
        _ready(outcome, roles, state),
        *(_role_ready(role) for role in roles),
        _validated(outcome),
        *_model_source(roles, outcome),
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


def pending(found: Object, now: datetime) -> Object:
    """Of an endpoint that nothing has been made of yet."""
    generation = found["metadata"].get("generation", 0)
    ready = _condition("Ready", False, "Pending", "the endpoint's objects are being made")
    return {
        "state": PENDING,
        "observedGeneration": generation,
        "conditions": _timed([ready], (), generation, now),
    }


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
    applied: int,
    pods: Sequence[Object],
    warnings: Mapping[str, Sequence[Object]],
) -> Role:
    if deployment is None:
        return Role(component=wanted.component, **vars(MISSING))
    mine = [p for p in pods if p["metadata"].get("labels", {}).get(names.COMPONENT_LABEL) == wanted.component]
    troubles = (pod_trouble(pod, warnings.get(pod["metadata"]["uid"], ())) for pod in mine)
    failure = condition(deployment, "ReplicaFailure")
    blocked = failure.get("message") if failure.get("status") == "True" else None
    late = condition(deployment, "Progressing").get("reason") == "ProgressDeadlineExceeded"
    return Role(
        component=wanted.component,
        **vars(rollout(deployment, applied)),
        stuck=late,
        trouble=most_telling(trouble for trouble in troubles if trouble),
        blocked=blocked,
        loading=sum(map(is_loading, mine)) if wanted.component != "router" else 0,
    )


def _told_apart(roles: Sequence[Role], outcome: Outcome, before: Object, now: datetime) -> list[Role]:
    """A cause that is another's: a router is not ready as long as its engines are not; pods wait without a
    word for a driver that nobody has installed."""
    return [
        _waiting_for_engines(role, roles, before, now)
        if role.component == "router"
        else _without_driver(role, outcome)
        for role in roles
    ]


def _waiting_for_engines(router: Role, roles: Sequence[Role], before: Object, now: datetime) -> Role:
    answering = [role for role in roles if role.component in ("decode", "worker")]
    router = replace(router, waits_for=next((r.component for r in answering if not r.serving), ""))
    if router.trouble is None or router.trouble.reason != "Unhealthy":
        return router
    of_engines = [f"{component}Ready" for component in ("Prefill", "Decode", "Worker")]
    long_ago = stamp(now - timedelta(seconds=_PROVED_SECONDS))
    known = [c for c in before.get("conditions") or () if c["type"] in of_engines]
    long_ready = known and all(c["status"] == "True" and c["lastTransitionTime"] <= long_ago for c in known)
    return router if long_ready else replace(router, trouble=None)


def _without_driver(role: Role, outcome: Outcome) -> Role:
    silent = role.trouble is None or role.trouble.reason in _SOURCE
    if not outcome.no_driver or role.ready or not role.total or role.loading or not silent:
        return role
    pod = role.trouble.pod if role.trouble else None
    return replace(role, trouble=Trouble(_NO_DRIVER, _drivers(outcome), pod))


def _drivers(outcome: Outcome) -> str:
    drivers = " and ".join(outcome.no_driver)
    return f"the cluster has no CSI driver {drivers} (no CSIDriver of that name): install it"


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
    if done and all(role.serving and role.current for role in roles):
        return COMPLETE
    return IN_PROGRESS


def _ready(outcome: Outcome, roles: Sequence[Role], state: str) -> Object:
    """The first condition: whether the endpoint serves."""
    if outcome.problems:
        return _condition("Ready", False, outcome.problem_reason, "; ".join(outcome.problems))
    if outcome.refused:
        return _condition("Ready", False, "ObjectsRefused", "; ".join(outcome.refused))
    short = [role for role in roles if not (role.whole and role.serving)]
    if not short:
        message = READY_MESSAGE if outcome.disaggregated else "the deployment is ready"
        return _condition("Ready", True, "Deployed", message)
    message = "; ".join(map(_shortage, short))
    if all(role.serving for role in roles):
        reason = "PodsMissing" if all(role.rolled for role in short) else "RollingOut"
        return _condition("Ready", True, reason, f"the endpoint serves; {message}")
    if state == FAILED:
        reason = "DeploymentFailed"
    elif any(role.whole for role in short):
        reason = _SCALED_TO_ZERO
    else:
        reason = "Deploying"
    return _condition("Ready", False, reason, message)


def _role_ready(role: Role) -> Object:
    name = f"{role.component.capitalize()}Ready"
    if role.whole and role.serving:
        return _condition(name, True, "Ready", f"{role.ready} of {role.desired} pods are ready")
    if role.whole:
        reason = _SCALED_TO_ZERO
    elif role.blocked:
        reason = "PodsRefused"
    elif role.trouble:
        reason = role.trouble.reason
    elif role.ready >= role.desired:
        reason = "RollingOut"
    elif role.loading:
        reason = "Loading"
    else:
        reason = "Starting"
    return _condition(name, False, reason, _shortage(role))


def _shortage(role: Role) -> str:
    if not role.observed:
        return f"{role.component}: the deployment is being made"
    if role.whole:
        text = f"{role.component}: scaled to no pods"
    elif role.ready >= role.desired and role.updated < role.desired:
        text = f"{role.component}: {role.updated} of {role.desired} pods are of the newest revision"
    elif role.ready >= role.desired:
        text = f"{role.component}: pods of before are still there ({role.total - role.updated})"
    else:
        text = f"{role.component}: {role.ready} of {role.desired} pods are ready"
    return f"{text}: {role.cause}" if role.cause else text


def _validated(outcome: Outcome) -> Object:
    if outcome.problems:
        return _condition("Validated", False, outcome.problem_reason, "; ".join(outcome.problems))
    if outcome.warnings:
        return _condition("Validated", True, "Warnings", "; ".join(outcome.warnings))
    return _condition("Validated", True, "Valid", "the resource is valid")


_SOURCE = ("FailedMount", "FailedAttachVolume", "FailedMapVolume")
_NO_DRIVER = "CsiDriverMissing"
_CRASHES = ("Crash", "CrashLoop")


def _model_source(roles: Sequence[Role], outcome: Outcome) -> Iterable[Object]:
    """Whether model pods get at their weights."""
    workers = [role for role in roles if role.component != "router"]
    if not workers:
        return
    if outcome.no_driver and not any(role.ready for role in workers):
        yield _condition("ModelSource", False, _NO_DRIVER, _drivers(outcome))
        return
    for role in workers:
        trouble = role.trouble
        if trouble and (
            trouble.reason in _SOURCE
            or names.DOWNLOAD_CONTAINER in trouble.message
            or names.COPY_CONTAINER in trouble.message
            or "persistentvolumeclaim" in trouble.message.lower()
        ):
            failed = names.DOWNLOAD_CONTAINER in trouble.message and trouble.reason in _CRASHES
            reason = "HuggingFaceDownloadFailed" if failed else trouble.reason
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
            "number of pods is the resource's",
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
