"""Where a model lies: each way to name one, and what is said when it is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.api import Endpoint, parse_endpoint
from tandem.local.builtin import MODEL_ID
from tandem.local.errors import LocalError
from tandem.local.source import find_model

from ..api.manifests import HUGGING_FACE, NVME, S3


def endpoint(text: str, worker_args: list[str] | None = None, **volume: Any) -> Endpoint:
    """A manifest, with other flags or another first volume."""
    raw = yaml.safe_load(text)
    if worker_args is not None:
        raw["spec"]["worker"]["args"] = worker_args
    if volume:
        raw["spec"]["kubernetes"]["volumes"] = [volume]
    return parse_endpoint(yaml.safe_dump(raw), source="endpoint.yaml")[0]


def no_builtin() -> Path:
    pytest.fail("the built-in model was asked for")


def refusal(endpoint: Endpoint, override: Path | None = None) -> str:
    with pytest.raises(LocalError) as error:
        find_model(endpoint, override, no_builtin)
    return str(error.value)


def test_a_folder_on_the_command_line_beats_what_the_manifest_names(model: Path) -> None:
    assert find_model(endpoint(NVME), model, no_builtin) == model


def test_a_host_path_volume_is_the_model(model: Path) -> None:
    given = endpoint(NVME, name="model-weights", hostPath={"path": str(model)})
    assert find_model(given, None, no_builtin) == model


def test_a_model_below_the_mount_is_found_below_the_host_path(model: Path) -> None:
    given = endpoint(
        NVME,
        ["--model=/opt/ml/model/" + model.name],
        name="model-weights",
        hostPath={"path": str(model.parent)},
    )
    assert find_model(given, None, no_builtin) == model


@pytest.mark.parametrize("how", ["--model {}", "--model={}", "{} --seed 1", "serve {}"])
def test_a_local_path_in_the_workers_flags_is_the_model(model: Path, how: str) -> None:
    assert find_model(endpoint(S3, how.format(model).split(" ")), None, no_builtin) == model


def test_the_builtin_models_id_is_the_builtin_model(model: Path) -> None:
    given = endpoint(HUGGING_FACE.replace("meta-llama/Llama-3.3-70B-Instruct", MODEL_ID))
    assert find_model(given, None, lambda: model) == model


def test_other_sources_are_refused_with_the_way_out() -> None:
    for text, source in ((S3, "s3"), (HUGGING_FACE, "huggingface")):
        said = refusal(endpoint(text))
        assert said.startswith(f"spec.modelSourceConfig: {source} is not read on one machine.")
        assert "tandem up --model FOLDER" in said


def test_a_mount_without_its_volume_is_told() -> None:
    said = refusal(endpoint(NVME, name="other", hostPath={"path": "/m"}))
    assert said.startswith("spec.kubernetes.volumes: no volume is named 'model-weights'")
    assert "spec.worker.modelVolumeMount.name" in said


def test_a_volume_that_only_a_cluster_has_is_told() -> None:
    said = refusal(endpoint(NVME, name="model-weights", persistentVolumeClaim={"claimName": "c"}))
    assert "spec.kubernetes.volumes: volume 'model-weights' is no hostPath" in said


def test_a_model_outside_the_mount_is_told() -> None:
    said = refusal(endpoint(NVME, ["--model", "/elsewhere"]))
    assert "spec.worker.args: --model /elsewhere does not lie under" in said
    assert "spec.worker.modelVolumeMount.mountPath (/opt/ml/model)" in said


def test_a_folder_that_is_not_there_is_told_with_who_named_it(tmp_path: Path) -> None:
    assert refusal(endpoint(NVME)) == (
        "spec.kubernetes.volumes: /opt/dlami/nvme/Llama-3.3-70B-Instruct is not a folder on this machine. "
        "Models are not downloaded; put one there first."
    )
    assert refusal(endpoint(NVME), tmp_path / "none").startswith("--model: ")


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
def test_a_folder_that_is_no_model_is_told(model: Path, missing: str) -> None:
    (model / missing).unlink()
    assert f"has no {missing}; it must be a Hugging Face model folder." in refusal(endpoint(NVME), model)
    assert refusal(endpoint(S3, ["--model", str(model)])).startswith("spec.worker.args --model: ")
