"""How the weights come into a model pod: volumes, mounts and the containers that fetch them first."""

from __future__ import annotations

from typing import Any

from tandem.api import conventions
from tandem.operator import names
from tandem.operator.errors import RenderError
from tandem.operator.model_volume import model_volume
from tandem.operator.plan import Plan
from tandem.operator.pools import Pool
from tandem.operator.texts import literal
from tandem.operator.wishes import section

COPY_VOLUME = "model-weights-copy"
COPY_SCRIPT_VOLUME = "parallel-copy-configmap"
SCRIPTS = conventions.SCRIPTS_FOLDER

_IGNORED = "original/*,*.pth,*.pt,*.gguf,*.onnx"
"""Files of a Hugging Face repository that vLLM does not read: the same weights in other formats."""


def prefetched(plan: Plan) -> bool:
    """Whether weights are fetched before the engine starts. A volume of the resource's own has them."""
    source = plan.spec.model_source_config
    return source.prefetch_enabled and source.model_source_type != "kubernetesVolume"


def downloaded_by_engine(plan: Plan) -> bool:
    """Whether the engine fetches the weights from the Hub itself."""
    return plan.spec.model_source_config.model_source_type == "huggingface" and not prefetched(plan)


def has_claim(plan: Plan) -> bool:
    return plan.spec.model_source_config.model_source_type in ("s3", "fsx")


def in_folder(plan: Plan, folder: str) -> bool:
    """Whether a folder of the model container is there for other containers of the pod too: it is on the
    model's volume, and something has put the weights there."""
    mount = plan.spec.worker.model_volume_mount.mount_path.rstrip("/")
    return not downloaded_by_engine(plan) and (folder == mount or folder.startswith(f"{mount}/"))


def volumes(plan: Plan) -> list[dict[str, Any]]:
    """The model's volume, and with prefetching from a mount the copy in memory."""
    spec = plan.spec
    name = spec.worker.model_volume_mount.name
    given = {volume.name for volume in (spec.kubernetes.volumes if spec.kubernetes else ())}
    source = spec.model_source_config.model_source_type
    if source == "kubernetesVolume":
        if name not in given:
            raise RenderError(
                f"spec.worker.modelVolumeMount.name: is {name!r}, but no volume of spec.kubernetes.volumes "
                "is named so; with modelSourceType kubernetesVolume one must hold the model"
            )
        return []
    if name in given:
        raise RenderError(
            f"spec.kubernetes.volumes: {name!r} is the name of spec.worker.modelVolumeMount, whose volume "
            f"comes from spec.modelSourceConfig ({source})"
        )
    if source == "huggingface":
        return [{"name": name, "emptyDir": {}}]
    made: list[dict[str, Any]] = [
        {"name": name, "persistentVolumeClaim": {"claimName": model_volume(plan).claim, "readOnly": True}}
    ]
    if prefetched(plan):
        made.append({"name": COPY_VOLUME, "emptyDir": {"medium": "Memory"}})
    return made


def mount(plan: Plan) -> dict[str, Any]:
    """Where a container finds the weights; read-only, but where the engine itself downloads them."""
    given = plan.spec.worker.model_volume_mount
    if has_claim(plan) and prefetched(plan):
        return {"name": COPY_VOLUME, "mountPath": given.mount_path, "readOnly": True}
    made: dict[str, Any] = {"name": given.name, "mountPath": given.mount_path, **_location(plan)}
    return made if downloaded_by_engine(plan) else made | {"readOnly": True}


def _location(plan: Plan) -> dict[str, Any]:
    """The folder of a file system that is mounted; of a bucket the driver mounts a prefix."""
    source = plan.spec.model_source_config
    folder = (source.model_location or "").strip("/") if source.model_source_type == "fsx" else ""
    return {"subPath": folder} if folder else {}


def fetching(plan: Plan, pool: Pool) -> list[dict[str, Any]]:
    """The container that fetches the weights, with the engine's own image: it has Python and what the Hub
    needs. Empty where nothing is fetched; without what all containers have in common."""
    if not prefetched(plan):
        return []
    given = plan.spec.worker.model_volume_mount
    folder = literal(given.mount_path)
    if has_claim(plan):
        script = {"name": COPY_SCRIPT_VOLUME, "mountPath": SCRIPTS, "readOnly": True}
        return [
            {
                "name": names.COPY_CONTAINER,
                "image": pool.image,
                "command": ["python3", f"{SCRIPTS}/copy_weights.py", "/source", folder],
                "volumeMounts": [
                    script,
                    {"name": given.name, "mountPath": "/source", **_location(plan), "readOnly": True},
                    {"name": COPY_VOLUME, "mountPath": given.mount_path},
                ],
                # No limit of memory: the copy lies in memory and is counted here.
                "resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "8"}},
            }
        ]
    model = section(plan.spec.model_source_config.hugging_face_model)
    words = [model["modelId"], folder, "--ignore", _IGNORED]
    if model.get("commitSHA"):
        words += ["--revision", model["commitSHA"]]
    env: list[dict[str, Any]] = [{"name": "HF_HOME", "value": "/tmp/hf"}, {"name": "HOME", "value": "/tmp"}]
    if model.get("tokenSecretRef"):
        secret = {"secretKeyRef": section(model["tokenSecretRef"])}
        env.append({"name": "HF_TOKEN", "valueFrom": secret})
    return [
        {
            "name": names.DOWNLOAD_CONTAINER,
            "image": pool.image,
            "command": ["python3", f"{SCRIPTS}/download_model.py", *words],
            "env": env,
            "volumeMounts": [
                {"name": "tandem-scripts", "mountPath": SCRIPTS, "readOnly": True},
                {"name": given.name, "mountPath": given.mount_path},
                {"name": "tandem-tmp", "mountPath": "/tmp"},
            ],
            "resources": {
                "requests": {"cpu": "1", "memory": "2Gi"},
                "limits": {"cpu": "8", "memory": "16Gi"},
            },
        }
    ]
