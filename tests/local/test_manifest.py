"""Manifests as `tandem up` reads them: their mistakes are those of `tandem validate`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.api import InvalidResource
from tandem.engine import flag_value, has_flag, int_value, without
from tandem.local.fields import has_local_meaning
from tandem.local.manifest import read_manifest

from ..api.manifests import HUGGING_FACE, S3


def refusal(text: str, file: Path) -> list[str]:
    file.write_text(text)
    with pytest.raises(InvalidResource) as error:
        read_manifest(file)
    return list(map(str, error.value.problems))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "endpoint.yaml"


def test_the_builtin_endpoint_has_no_warnings() -> None:
    manifest = read_manifest(None)
    assert manifest.warnings == ()
    assert manifest.raw["metadata"]["name"] == manifest.endpoint.metadata.name == "smollm2"


def test_a_file_with_two_endpoints_is_refused(file: Path) -> None:
    assert refusal(f"{S3}\n---\n{HUGGING_FACE}", file) == [
        "the file: must hold exactly one object of kind InferenceEndpointConfig; it holds 2"
    ]


def test_mistakes_in_all_of_them_are_told_first(file: Path) -> None:
    broken = S3.replace("pdSpec:", "pdSpecs:")
    (problem,) = refusal(f"{broken}\n---\n{HUGGING_FACE}", file)
    assert problem.startswith(f"{file}:")
    assert problem.endswith("error IEC101 spec.pdSpecs: is not a field; did you mean pdSpec?")


def test_a_mode_in_which_lmcache_hands_over_garbage_is_refused_before_anything_starts(file: Path) -> None:
    hash_seed = '{name: PYTHONHASHSEED, value: "0"}'
    layerwise = S3.replace(hash_seed, '{name: LMCACHE_USE_LAYERWISE, value: "true"}')
    (problem,) = refusal(layerwise, file)
    assert "error IEC409 spec.worker.environmentVariables[1].value: LMCACHE_USE_LAYERWISE" in problem
    assert "LMCache #1174" in problem


def test_a_buffer_may_be_small_as_it_is_for_small_models(file: Path) -> None:
    """Of how many bytes a chunk is, the manifest says nothing."""
    file.write_text(S3.replace("8589934592", "35389440"))
    (size, _) = read_manifest(file).endpoint.spec.worker.environment_variables
    assert size.value == "35389440"


@pytest.mark.parametrize(
    ("path", "has"),
    [
        ("spec.pdSpec", True),
        ("spec.pdSpec.routingThreshold", True),
        ("spec.worker.args[3]", True),
        ("spec.worker.argsOf", False),
        ("spec.kubernetes.volumes[0]", False),
        ("spec.worker.resources", False),
        ("metadata.annotations[tandem.dev/connector]", True),
        ("metadata.annotations[tandem.dev/router-image]", False),
    ],
)
def test_a_warning_matters_where_its_field_does(path: str, has: bool) -> None:
    assert has_local_meaning(path) is has


def test_another_model_is_served_with_sizes_of_its_own() -> None:
    own, another = read_manifest(None), read_manifest(None, another_model=True)
    args, others = own.endpoint.spec.worker.args, another.endpoint.spec.worker.args
    assert int_value(args, "--max-model-len") == 8192
    assert flag_value(others, "--max-model-len") == "auto"
    assert not has_flag(others, "--kv-cache-memory-bytes")
    sizes = ("--max-model-len", "--kv-cache-memory-bytes")
    assert without(args, sizes) == without(others, sizes)
