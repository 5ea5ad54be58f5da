"""Where the weights lie, as a volume says it, and the names of volume and claim.

Kubernetes lets nobody change what a volume or a claim holds. So their names have a digest of it: another
bucket is another volume with another claim, which pods get with a rollout like any other change.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from tandem.operator.errors import RenderError
from tandem.operator.plan import Plan
from tandem.operator.wishes import section

CAPACITY = "1Ti"
"""The API wants one; neither driver looks at it."""
SHARED: dict[str, Any] = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
"""What is said of volume and claim."""


@dataclass(frozen=True)
class ModelVolume:
    volume: str
    """Its name; the whole cluster sees it."""
    claim: str
    options: list[str]
    """Of the mount."""
    csi: dict[str, Any]


def model_volume(plan: Plan) -> ModelVolume:
    """Of weights in S3 or FSx. Raises RenderError where the resource does not say enough."""
    options, csi = _s3(plan) if plan.spec.model_source_config.model_source_type == "s3" else _fsx(plan)
    held = json.dumps([options, csi, SHARED, CAPACITY], sort_keys=True)
    digest = hashlib.sha256(held.encode()).hexdigest()[:8]
    volume = plan.names.volume(digest)
    return ModelVolume(volume, plan.names.claim(digest), options, {"volumeHandle": volume} | csi)


def _s3(plan: Plan) -> tuple[list[str], dict[str, Any]]:
    source = plan.spec.model_source_config
    bucket = _required(source.s3_storage, "s3Storage", "bucketName", "region")
    options = ["read-only", "allow-other", f"region {bucket['region']}"]
    if source.model_location:
        options.append(f"prefix {source.model_location.strip('/')}/")
    attributes = {"bucketName": bucket["bucketName"]}
    return options, {"driver": "s3.csi.aws.com", "readOnly": True, "volumeAttributes": attributes}


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
    # Claims are not bound to be mounted read-only by who names them; volumes are.
    options = ["flock", "ro"]
    return options, {"driver": "fsx.csi.aws.com", "volumeHandle": identity, "volumeAttributes": attributes}


def _required(value: Any, name: str, *fields: str) -> dict[str, Any]:
    given = section(value)
    for field in fields:
        if not given.get(field):
            raise RenderError(f"spec.modelSourceConfig.{name}.{field}: is required")
    return given
