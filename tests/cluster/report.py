"""What a failed test's report says of the cluster: which pods are not well, and why."""

from __future__ import annotations

from collections.abc import Iterator

from .kube import Cluster, Object, ready

_EVENTS, _LINES = 25, 15


def report(cluster: Cluster) -> str:
    """Pods with the state of each container, the last warnings, and the last lines that containers of pods
    which are not well have logged."""
    pods = cluster.get("/api/v1/pods")["items"]
    events = cluster.get("/api/v1/events", fieldSelector="type!=Normal")["items"]
    lines = [line for pod in pods for line in _pod(pod)]
    events.sort(key=lambda e: e.get("lastTimestamp") or e.get("eventTime") or "")
    for event in events[-_EVENTS:]:
        what = event["involvedObject"]
        lines.append(f"{what['kind']} {what.get('name')}: {event.get('reason')}: {event.get('message')}")
    for pod in pods:
        ill = not ready(pod) or any(container["restartCount"] for container in _statuses(pod))
        if ill and "deletionTimestamp" not in pod["metadata"]:
            lines += _logs(cluster, pod)
    return "\n".join(lines)


def _statuses(pod: Object) -> list[Object]:
    status = pod.get("status", {})
    return [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]


def _pod(pod: Object) -> Iterator[str]:
    metadata, status = pod["metadata"], pod.get("status", {})
    phase = "ending" if "deletionTimestamp" in metadata else status.get("phase")
    where = f"{pod['spec'].get('nodeName')} {status.get('podIP')}"
    yield f"{metadata['namespace']}/{metadata['name']}: {phase}, {where}"
    for condition in status.get("conditions", ()):
        if condition["status"] != "True" and condition.get("message"):
            yield f"  {condition['type']}: {condition['message']}"
    for container in _statuses(pod):
        ready_ = "ready" if container["ready"] else "not ready"
        yield f"  {container['name']}: {ready_}, {container['restartCount']} restarts, {container['state']}"
        if container.get("lastState"):
            yield f"    before: {container['lastState']}"


def _logs(cluster: Cluster, pod: Object) -> Iterator[str]:
    namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
    for container in _statuses(pod):
        for previous in ("true", "false"):
            reply = cluster.api.get(
                f"/api/v1/namespaces/{namespace}/pods/{name}/log",
                params={"container": container["name"], "tailLines": str(_LINES), "previous": previous},
            )
            if reply.status_code == 200 and reply.text:
                yield f"{name} {container['name']}{' before it restarted' * (previous == 'true')}:"
                yield from (f"  {line}" for line in reply.text.splitlines())
