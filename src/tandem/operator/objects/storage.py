"""The volume of weights in S3 or FSx for Lustre, and the claim by which model pods mount it."""

from __future__ import annotations

from tandem.operator.model_volume import CAPACITY, SHARED, model_volume
from tandem.operator.objects.common import Object, head
from tandem.operator.plan import Plan
from tandem.operator.weights import has_claim


def storage(plan: Plan) -> list[Object]:
    """Empty where the weights come from elsewhere."""
    if not has_claim(plan):
        return []
    source, namespace = model_volume(plan), plan.names.namespace
    volume = head(plan, "v1", "PersistentVolume", source.volume, "model")
    del volume["metadata"]["namespace"]
    return [
        volume
        | {
            "spec": {
                **SHARED,
                "capacity": {"storage": CAPACITY},
                "persistentVolumeReclaimPolicy": "Retain",
                "claimRef": {
                    "apiVersion": "v1",
                    "kind": "PersistentVolumeClaim",
                    "name": source.claim,
                    "namespace": namespace,
                },
                "mountOptions": source.options,
                "csi": source.csi,
            }
        },
        head(plan, "v1", "PersistentVolumeClaim", source.claim, "model")
        | {
            "spec": {
                **SHARED,
                "volumeName": source.volume,
                "resources": {"requests": {"storage": CAPACITY}},
            }
        },
    ]
