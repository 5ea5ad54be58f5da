"""How far a Deployment has got with what is asked of it."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.kube import Object
from tandem.operator.control.replicas import autoscaled


@dataclass(frozen=True)
class Rollout:
    desired: int
    ready: int
    updated: int
    total: int
    """Pods of all revisions, without those that are ending."""
    observed: bool
    """The Deployment is there, and its controller has seen its newest form."""
    scaled: bool = False
    """The number of its pods is an autoscaler's."""

    @property
    def current(self) -> bool:
        """No pod is of an older revision; there may be too few."""
        return self.observed and self.total <= self.updated

    @property
    def rolled(self) -> bool:
        """Pods are of the newest revision, and there are no others."""
        return self.current and self.updated >= self.desired

    @property
    def whole(self) -> bool:
        """Pods are as they should be: an old one that is ready counts for none that is not."""
        return self.rolled and self.ready >= self.desired

    @property
    def serving(self) -> bool:
        """An autoscaler that has taken all pods away makes one when there is work; nobody else does."""
        return self.ready > 0 or (self.scaled and self.observed and self.desired == 0)


MISSING = Rollout(1, 0, 0, 0, observed=False)
"""Of a Deployment that is not there."""


def rollout(deployment: Object, applied: int = 0) -> Rollout:
    """`applied`: its generation as it was last applied, which may be newer than the Deployment given."""
    status = deployment.get("status", {})
    newest = max(applied, deployment["metadata"].get("generation", 0))
    return Rollout(
        desired=deployment["spec"].get("replicas", 1),
        ready=status.get("readyReplicas", 0),
        updated=status.get("updatedReplicas", 0),
        total=status.get("replicas", 0),
        observed=status.get("observedGeneration", 0) >= newest,
        scaled=autoscaled(deployment),
    )
