"""Where the model of an endpoint lies on this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath

from tandem.api import Endpoint, Role
from tandem.engine import model_argument, role_args
from tandem.local.builtin import MODEL_ID
from tandem.local.errors import ResourceError
from tandem.local.weights import is_gguf


def find_model(endpoint: Endpoint, override: Path | None, builtin: Callable[[], Path]) -> Path:
    """The model's folder: `--model` of the command line, else what the resource names.

    The resource can name it by a kubernetesVolume's hostPath, by `--model PATH` in worker.args where
    PATH exists here, or by the Hugging Face id of the built-in model. Raises ResourceError with the field
    path and the way out.
    """
    if override is not None:
        return _checked(override, "--model")
    spec = endpoint.spec
    source = spec.model_source_config
    named = model_argument(role_args(endpoint, Role.DECODE))
    if source.model_source_type == "kubernetesVolume":
        return _checked(_in_host_path(endpoint, named), "spec.kubernetes.volumes")
    if named is not None and Path(named).is_dir():
        return _checked(Path(named), "spec.worker.args --model")
    hub = source.hugging_face_model
    if isinstance(hub, dict) and hub.get("modelId") == MODEL_ID:
        return builtin()
    raise ResourceError(
        f"spec.modelSourceConfig: {source.model_source_type} is not read on one machine. Put the model "
        "into a folder and run `tandem up --model FOLDER`, or name it by a kubernetesVolume with a hostPath."
    )


def _in_host_path(endpoint: Endpoint, named: str | None) -> Path:
    mount = endpoint.spec.worker.model_volume_mount
    volumes = endpoint.spec.kubernetes.volumes if endpoint.spec.kubernetes else ()
    volume = next((v for v in volumes if v.name == mount.name), None)
    if volume is None:
        raise ResourceError(
            f"spec.kubernetes.volumes: no volume is named {mount.name!r}, "
            "the name in spec.worker.modelVolumeMount.name."
        )
    if volume.host_path is None:
        raise ResourceError(
            f"spec.kubernetes.volumes: volume {mount.name!r} is no hostPath, "
            "the only kind that one machine has."
        )
    host = Path(volume.host_path.path)
    if named is None:
        return host
    try:
        inside = PurePosixPath(named).relative_to(mount.mount_path)
    except ValueError:
        raise ResourceError(
            f"spec.worker.args: --model {named} does not lie under "
            f"spec.worker.modelVolumeMount.mountPath ({mount.mount_path})."
        ) from None
    return host / inside


def _checked(folder: Path, where: str) -> Path:
    if not folder.is_dir():
        raise ResourceError(f"{where}: {folder} {_instead(folder)}")
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ResourceError(
                f"{where}: {folder} has no {name}; it must be a Hugging Face model folder.{_nearby(folder)}"
            )
    return folder.resolve()


def _instead(path: Path) -> str:
    """What a path is that is not a folder, and what to do."""
    if path.is_file() and is_gguf(path):
        return (
            "is a GGUF file, which vLLM does not read. Name the folder of the model's repository that has "
            "config.json, tokenizer.json and *.safetensors."
        )
    if path.is_file():
        return f"is a file. Name the folder that it lies in, {path.absolute().parent}."
    return "is not a folder on this machine. Models are not downloaded; put one there first."


def _nearby(folder: Path) -> str:
    """A folder below that is probably meant: of a model's own cache, as the Hub's client keeps it, say."""
    below = (file.parent for depth in ("*", "snapshots/*") for file in folder.glob(f"{depth}/config.json"))
    found = sorted(place for place in below if (place / "tokenizer.json").is_file())
    return f" Did you mean {found[0]}?" if len(found) == 1 else ""
