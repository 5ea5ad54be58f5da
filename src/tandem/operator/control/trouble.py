"""Why a pod does not become ready, by its cause: what its status says, and the warnings about it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tandem.kube import Object
from tandem.operator import names
from tandem.operator.texts import shortened

LONGEST_TEXT = 600
"""Characters of a message that are kept."""
UNHEALTHY_SECONDS = 30.0
"""A container that runs for so long and still fails a probe is in trouble."""

_APART, _OTHER_NODES = "didn't match pod affinity rules", "didn't match Pod's node affinity/selector"
"""The scheduler's words (kube-scheduler, plug-ins InterPodAffinity and NodeAffinity)."""
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_STARTING = ("ContainerCreating", "PodInitializing")
_PULLING = ("ErrImagePull", "ImagePullBackOff")
"""A kubelet says the one after a try and the other between two: it is the same trouble."""
_PULL_FAILED = re.compile(r'^Failed to pull image "[^"]*": ')
_PULL_SAID = tuple(f"Error: {reason}" for reason in _PULLING)
"""Events that add nothing to the one before."""
_BACK_OFF = re.compile(r'^Back-off pulling image "[^"]*": ErrImagePull: ')
_LOUD = re.compile(
    r"error|exception|fatal|cannot|failed|refused|denied|no space|not found|killed", re.IGNORECASE
)
_STAMP = r"(?:(?:\d{4}-)?\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?Z?\s*)?"
_LOG_HEAD = re.compile(
    rf"(?:\([^)]*\)\s*)?{_STAMP}(?:(?:ERROR|CRITICAL|FATAL|WARNING|INFO):?\s+)?{_STAMP}(?:\[[^\]]*\]\s*)?"
)
"""What stands before the message: vLLM's process, time, level, file."""


@dataclass(frozen=True)
class Trouble:
    reason: str
    """One word, as Kubernetes has it: ImagePullBackOff, OOMKilled, Unschedulable, NodeNotReady …"""
    message: str
    pod: str | None
    """None: it is not one pod's."""

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}" + (f" (pod {self.pod})" if self.pod else "")


def pod_trouble(pod: Object, warnings: Sequence[Object] = ()) -> Trouble | None:
    """None for a pod that is ready, or on its way without a sign of trouble. `warnings` are Events about it,
    which are looked at where the pod's own status tells no cause."""
    if is_ready(pod) or "deletionTimestamp" in pod["metadata"]:
        return None
    status = pod.get("status", {})
    found = (
        _unschedulable(pod)
        or _lost(pod, status)
        or _evicted(status)
        or next(_containers(status), None)
        or (None if is_loading(pod) else _warned(warnings, _running_since(status)))
    )
    return Trouble(*found, pod["metadata"]["name"]) if found else None


def needs_warnings(pod: Object) -> bool:
    """Whether only Events can tell why the pod does not go on: its volumes are not mounted, its sandbox is
    not made, or its probes fail."""
    if is_ready(pod) or "deletionTimestamp" in pod["metadata"]:
        return False
    placed = bool(pod.get("spec", {}).get("nodeName"))
    return placed and not is_loading(pod) and pod_trouble(pod) is None


def is_loading(pod: Object) -> bool:
    """Whether a container runs and has not passed its startup probe: an engine that loads its model. That it
    does not answer yet is no trouble."""
    if is_ready(pod) or "deletionTimestamp" in pod["metadata"]:
        return False
    containers = pod.get("status", {}).get("containerStatuses") or ()
    return any("running" in c.get("state", {}) and c.get("started") is False for c in containers)


def is_ready(pod: Object) -> bool:
    return condition(pod, "Ready").get("status") == "True"


def condition(found: Object, kind: str) -> dict[str, Any]:
    """Empty where it is not there."""
    conditions = found.get("status", {}).get("conditions") or ()
    return next((c for c in conditions if c.get("type") == kind), {})


def most_telling(troubles: Iterable[Trouble]) -> Trouble | None:
    """That which most pods have; of equals the first by name, so that status does not go to and fro."""
    ordered = sorted(troubles, key=lambda trouble: trouble.pod or "")
    counts: dict[str, int] = {}
    for trouble in ordered:
        counts[trouble.reason] = counts.get(trouble.reason, 0) + 1
    return max(ordered, key=lambda trouble: counts[trouble.reason], default=None)


_Found = tuple[str, str]


def _unschedulable(pod: Object) -> _Found | None:
    found = condition(pod, "PodScheduled")
    if found.get("status") != "False":
        return None
    reason = found.get("reason") or "Unschedulable"
    if reason == "SchedulingGated":
        return reason, "the pod waits for its scheduling gates"
    said = found.get("message") or "no node takes the pod"
    return reason, " ".join([_short(said), *_labels_missed(pod, said)])


def _labels_missed(pod: Object, said: str) -> Iterator[str]:
    """What the scheduler leaves out where labels keep a pod from all nodes: which, and what to do."""
    spec = pod.get("spec", {})
    affinity = spec.get("affinity") or {}
    if _APART in said:
        terms = (affinity.get("podAffinity") or {}).get(_REQUIRED) or ()
        if any(term.get("topologyKey") == names.ZONE_LABEL for term in terms):
            yield (
                "The pods of an endpoint go into one zone (spec.pdSpec.topologySpec.sameAZ), and a node "
                f"without the label {names.ZONE_LABEL} is in none: label the nodes, or set sameAZ to false."
            )
    if _OTHER_NODES in said and "Insufficient" not in said:  # else there are such nodes, without room
        asked = [" and ".join(f"{key}={value}" for key, value in (spec.get("nodeSelector") or {}).items())]
        terms = ((affinity.get("nodeAffinity") or {}).get(_REQUIRED) or {}).get("nodeSelectorTerms") or ()
        alternatives = (" and ".join(map(_label, term.get("matchExpressions") or ())) for term in terms)
        asked.append(" or ".join(filter(None, alternatives)))
        if wanted := " and ".join(filter(None, asked)):
            wanted = _short(wanted)  # a resource may list any number
            yield f"The pod takes nodes with {wanted}: label nodes so, or change what the resource asks for."


def _label(expression: Object) -> str:
    """As the label that satisfies it, for the operator that most expressions have."""
    key, operator, values = expression["key"], expression["operator"], expression.get("values") or ()
    if operator == "In":
        return " or ".join(f"{key}={value}" for value in values)
    return " ".join([key, operator, *([", ".join(values)] if values else [])])


def _lost(pod: Object, status: Object) -> _Found | None:
    """The node's lifecycle controller takes the pod's readiness away without giving a reason; a kubelet has
    one, and takes that of the containers too."""
    ready, containers = condition(pod, "Ready"), condition(pod, "ContainersReady")
    silent = ready.get("status") == "False" and not ready.get("reason")
    if (silent and containers.get("status") == "True") or status.get("reason") == "NodeLost":
        node = pod.get("spec", {}).get("nodeName", "?")
        return "NodeNotReady", f"node {node} is not ready: its kubelet no longer answers"
    return None


def _evicted(status: Object) -> _Found | None:
    if status.get("phase") == "Failed" and status.get("reason"):
        return status["reason"], _short(status.get("message") or "the pod has failed")
    return None


def _containers(status: Object) -> Iterator[_Found]:
    for container in (
        *(status.get("initContainerStatuses") or ()),
        *(status.get("containerStatuses") or ()),
    ):
        found = _container(container)
        if found is not None:
            yield found


def _container(found: Object) -> _Found | None:
    name = found["name"]
    state, last = found.get("state", {}), found.get("lastState", {})
    ended = state.get("terminated") or last.get("terminated")
    waiting = state.get("waiting", {})
    reason = waiting.get("reason") or ""
    if ended and (ended.get("exitCode") or ended.get("signal")) and not found.get("ready"):
        return _crash(name, ended, found.get("restartCount", 0))
    if reason in _PULLING:
        cause = _BACK_OFF.sub("", waiting.get("message") or "its image cannot be pulled")
        return "ImagePullBackOff", f"container {name}: {_short(cause)}"
    if reason and reason not in _STARTING:
        return reason, f"container {name}: {_short(waiting.get('message') or 'does not start')}"
    return None


def _crash(name: str, ended: Object, restarts: int) -> _Found:
    reason = ended.get("reason") or "Error"
    if reason == "OOMKilled":
        what = "was ended because it used more memory than its limit"
    else:
        code = ended.get("exitCode")
        what = f"ended with exit code {code}"
        line = last_error(ended.get("message") or "")
        if line:
            what += f": {line}"
        if reason in ("Error", "Completed"):
            reason = "CrashLoop" if restarts > 1 else "Crash"
    return reason, f"container {name} {what}"


def last_error(text: str) -> str:
    """The last line of an engine's log that sounds like the cause; else the last one. Tracebacks end with
    their cause."""
    lines = [_message(line) for line in text.splitlines()]
    lines = [line for line in lines if line]
    loud = [line for line in lines if _LOUD.search(line) and not line.startswith(("File ", "Traceback"))]
    return _short((loud or lines or [""])[-1])


def _running_since(status: Object) -> str:
    """When the last of the containers was started; empty where none runs."""
    states = [found.get("state", {}) for found in status.get("containerStatuses") or ()]
    return max(
        (state["running"].get("startedAt") or "" for state in states if "running" in state), default=""
    )


def _warned(warnings: Sequence[Object], since: str) -> _Found | None:
    """`since`: when the containers were started. What was before that is over, as is that no node took the
    pod; and every container fails its first probes."""
    bad = [
        event
        for event in warnings
        if event.get("type") == "Warning"
        and event.get("reason") != "FailedScheduling"
        and event.get("message") not in _PULL_SAID
        and _seconds(since, _when(event)) >= (UNHEALTHY_SECONDS if event.get("reason") == "Unhealthy" else 0)
    ]
    if not bad:
        return None
    newest = max(bad, key=_when)
    message = newest.get("message") or ""
    if pull := _PULL_FAILED.match(message):
        # The container says the same, in these words, once it is known there.
        return "ImagePullBackOff", f"container {_container_of(newest)}: {_short(message[pull.end() :])}"
    return newest.get("reason") or "Warning", _short(message)


def _container_of(event: Object) -> str:
    found = re.search(r"\{(.+)\}", event.get("involvedObject", {}).get("fieldPath") or "")
    return found[1] if found else "?"


def _when(event: Object) -> str:
    return event.get("lastTimestamp") or event.get("eventTime") or ""


def _seconds(since: str, until: str) -> float:
    """Between two times as the API has them; endless where the first is not known."""
    if not since or not until:
        return float("inf")
    return (datetime.fromisoformat(until) - datetime.fromisoformat(since)).total_seconds()


def _short(text: str) -> str:
    return shortened(" ".join(text.split()), LONGEST_TEXT)


def _message(line: str) -> str:
    head = _LOG_HEAD.match(line)
    return line[head.end() if head else 0 :].strip()
