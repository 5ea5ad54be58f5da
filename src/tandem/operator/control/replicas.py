"""How many pods a Deployment has whose number is an autoscaler's."""

from __future__ import annotations

from tandem.kube import Object
from tandem.operator import names


def autoscaled(found: Object) -> bool:
    """Whether the number of pods is an autoscaler's, in what is desired or in what there is."""
    return _start(found) is not None


def numbered(desired: Object, there: Object | None, *, scales: bool) -> Object:
    """What is desired, with its number of pods; any other object as it is.

    As many pods as there are stay: an autoscaler may have made them. A new Deployment has as many as the
    resource says, and where the cluster has no autoscaler (not `scales`) that number is also followed when it
    changes. It is never left out: a number that is no longer applied falls to one. `there` must be what there
    is when this is applied, or the answer is a conflict.
    """
    start = _start(desired)
    if start is None:
        return desired
    count = int(start)
    if there is None:
        return {**desired, "spec": {**desired["spec"], "replicas": count}}
    if scales or _start(there) == start:
        count = there["spec"].get("replicas", 1)
    metadata = {**desired["metadata"], "resourceVersion": there["metadata"]["resourceVersion"]}
    return {**desired, "metadata": metadata, "spec": {**desired["spec"], "replicas": count}}


def unnumbered(found: Object) -> Object:
    """Without the number where that is an autoscaler's: that it is another is nobody's edit."""
    if not autoscaled(found):
        return found
    return {**found, "spec": {name: value for name, value in found["spec"].items() if name != "replicas"}}


def _start(found: Object) -> str | None:
    told: str | None = (found["metadata"].get("annotations") or {}).get(names.START_ANNOTATION)
    return told
