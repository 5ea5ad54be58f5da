"""When volumes of weights and their claims may go.

Nothing in them can be changed, so each is named by what it holds: another bucket is another volume, and the
one before serves until the last pod has the new one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tandem.kube import Object, resource_of
from tandem.kube import resources as kinds
from tandem.operator.control.rollout import rollout


def in_use(found: Object, objects: Iterable[Object], pods: Iterable[Object]) -> bool:
    """Whether pods use the claim, or the claim the volume, or may again: while a Deployment is rolled out, a
    pod of its former form that is lost is made anew with the former claim. False for other kinds."""
    resource = resource_of(found)
    if resource == kinds.CLAIM:
        claim = found["metadata"]["name"]
    elif resource == kinds.VOLUME:
        claim = (found["spec"].get("claimRef") or {}).get("name")
    else:
        return False
    deployments = [there for there in objects if resource_of(there) == kinds.DEPLOYMENT]
    if not all(rollout(there).rolled for there in deployments):
        return True
    specs = [pod.get("spec", {}) for pod in pods]
    specs += [there["spec"]["template"]["spec"] for there in deployments]
    return any(claim in _claims(spec) for spec in specs)


def worn_out(found: Object) -> bool:
    """Whether it has lost its other half, and would wait for it for ever: in its life a volume belongs to one
    claim, and a claim to one volume."""
    phase = found.get("status", {}).get("phase")
    resource = resource_of(found)
    return (resource == kinds.VOLUME and phase == "Released") or (resource == kinds.CLAIM and phase == "Lost")


def _claims(pod_spec: Object) -> Iterator[str]:
    for volume in pod_spec.get("volumes") or ():
        if "persistentVolumeClaim" in volume:
            yield volume["persistentVolumeClaim"]["claimName"]
