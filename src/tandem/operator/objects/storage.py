"""The volume of weights in S3 or FSx for Lustre, and the claim by which model pods mount it."""

from __future__ import annotations

from typing import Any

from tandem.operator.errors import RenderError
from tandem.operator.objects.common import Object, head
from tandem.operator.plan import Plan
from tandem.operator.weights import has_claim
from tandem.operator.wishes import section

_CAPACITY = "1Ti"
"""The API wants one; neither driver looks at it."""


def storage(plan: Plan) -> list[Object]:
    """Empty where the weights come from elsewhere."""
    if not has_claim(plan):
        return []
    options, csi = _s3(plan) if plan.spec.model_source_config.model_source_type == "s3" else _fsx(plan)
    claim, namespace = plan.names.claim, plan.names.namespace
    volume = head(plan, "v1", "PersistentVolume", plan.names.volume, "model")
    del volume["metadata"]["namespace"]
    shared: Object = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
    return [
        volume
        | {
            "spec": {
                **shared,
                "capacity": {"storage": _CAPACITY},
                "persistentVolumeReclaimPolicy": "Retain",
                "claimRef": {
                    "apiVersion": "v1",
                    "kind": "PersistentVolumeClaim",
                    "name": claim,
                    "namespace": namespace,
                },
                "mountOptions": options,
                "csi": csi,
            }
        },
        head(plan, "v1", "PersistentVolumeClaim", claim, "model")
        | {
            "spec": {
                **shared,
                "volumeName": plan.names.volume,
                "resources": {"requests": {"storage": _CAPACITY}},
            }
        },
    ]


def _s3(plan: Plan) -> tuple[list[str], dict[str, Any]]:
    source = plan.spec.model_source_config
    bucket = _required(source.s3_storage, "s3Storage", "bucketName", "region")
    options = ["read-only", "allow-other", f"region {bucket['region']}"]
    if source.model_location:
        options.append(f"prefix {source.model_location.strip('/')}/")
    attributes = {"bucketName": bucket["bucketName"]}
    handle = {"driver": "s3.csi.aws.com", "volumeHandle": plan.names.volume, "readOnly": True}
    return options, handle | {"volumeAttributes": attributes}


def _fsx(plan: Plan) -> tuple[list[str], dict[str, Any]]:
    system = _required(plan.spec.model_source_config.fsx_storage, "fsxStorage", "fileSystemId")
    identity = system["fileSystemId"]
    dns = system.get("dnsName")
    if not dns and not plan.settings.region:
        raise RenderError(
            "spec.modelSourceConfig.fsxStorage.dnsName: is needed to mount the file system; give it, or the "
            "AWS region with --region"
        )
    attributes = {
        "dnsname": dns or f"{identity}.fsx.{plan.settings.region}.amazonaws.com",
        "mountname": system.get("mountName") or "fsx",
    }
    return ["flock"], {"driver": "fsx.csi.aws.com", "volumeHandle": identity, "volumeAttributes": attributes}


def _required(value: Any, name: str, *fields: str) -> dict[str, Any]:
    given = section(value)
    for field in fields:
        if not given.get(field):
            raise RenderError(f"spec.modelSourceConfig.{name}.{field}: is required")
    return given
