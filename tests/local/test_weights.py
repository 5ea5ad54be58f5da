"""Weights of a model's folder: what an engine would stumble over is told with the file and what to do."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.local.weights import is_gguf, read_weights

from .models import safetensors, sharded

FILE = "model.safetensors"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab\nsize 269060552\n"


def test_a_whole_file_has_no_problem_and_a_size(model: Path) -> None:
    weights = read_weights(model)
    assert weights.problems == []
    assert (weights.floats, weights.other_bytes) == (8, 0)


@pytest.mark.parametrize(
    ("kind", "width", "in_two", "in_four"),
    [("BF16", 2, 16, 32), ("F32", 4, 16, 32), ("I64", 8, 64, 64), ("F8_E4M3", 1, 8, 8)],
)
def test_floats_take_what_the_engine_computes_in(
    model: Path, kind: str, width: int, in_two: int, in_four: int
) -> None:
    (model / FILE).write_bytes(safetensors(8, kind, width))
    weights = read_weights(model)
    assert (weights.loaded_bytes(2), weights.loaded_bytes(4)) == (in_two, in_four)


WHOLE = safetensors()
BROKEN: dict[str, tuple[bytes, str]] = {
    "a pointer": (POINTER, "is a Git LFS pointer and not the file itself: run `git lfs pull` in {folder}"),
    "empty": (b"", "is empty: the download was cut short; download it again"),
    "cut in the data": (
        WHOLE[:-1],
        f"has {len(WHOLE) - 1} bytes and its header tells of {len(WHOLE)}: the download was cut short; "
        "download it again",
    ),
    "cut in the header": (
        WHOLE[:20],
        f"has 20 bytes and its header alone takes {len(WHOLE) - 16}: the download was cut short; "
        "download it again",
    ),
    "too long": (
        WHOLE + b"x",
        f"has {len(WHOLE) + 1} bytes, more than the {len(WHOLE)} that its header tells of: it is damaged; "
        "download it again",
    ),
    "no JSON": (
        (5).to_bytes(8, "little") + b"[not{",
        "has a header that is not that of a safetensors file; download it again",
    ),
    "no tensors": (
        (9).to_bytes(8, "little") + b'{"a": {}}',
        "has a header that is not that of a safetensors file; download it again",
    ),
    "other bytes": (b"\xff" * 100, "is no safetensors file; download it again"),
    "GGUF": (b"GGUF" + bytes(100), "is a GGUF file, which vLLM does not read, whatever its name"),
    "a web page": (
        b"<!DOCTYPE html><html>Sign in",
        "is a web page and not weights: the download was refused; download it again",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_file_that_is_not_whole_is_told(model: Path, what: str) -> None:
    data, said = BROKEN[what]
    (model / FILE).write_bytes(data)
    assert read_weights(model).problems == [f"{model / FILE} {said.format(folder=model)}"]


def test_every_file_is_looked_at(model: Path) -> None:
    first, second, third = sharded(model, 3)
    assert read_weights(model).problems == []
    assert read_weights(model).floats == 24
    first.write_bytes(POINTER)
    third.write_bytes(WHOLE[:-4])
    problems = read_weights(model).problems
    assert [problem.split()[0] for problem in problems] == [str(first), str(third)]
    second.unlink()
    assert f"lacks 1 of 3 files of weights ({second.name})" in read_weights(model).problems[0]


def test_files_that_others_are_named_after_are_missed_without_an_index(model: Path) -> None:
    files = sharded(model, 6)
    (model / "model.safetensors.index.json").unlink()
    assert read_weights(model).problems == []
    for file in files[1:5]:
        file.unlink()
    assert read_weights(model).problems == [
        f"{model} lacks 4 of 6 files of weights ({files[1].name}, {files[2].name}, {files[3].name} and "
        "others): the download is not complete; run it again"
    ]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_damaged_is_told(model: Path, text: str) -> None:
    sharded(model, 2)
    index = model / "model.safetensors.index.json"
    index.write_text(text)
    assert read_weights(model).problems == [f"{index} names no files: it is damaged; download it again"]
    index.write_bytes(POINTER)
    assert "git lfs pull" in read_weights(model).problems[0]


def test_only_what_an_engine_would_load_is_looked_at(model: Path) -> None:
    """A repository may have the same weights in several formats."""
    (model / "pytorch_model.bin").touch()
    assert read_weights(model).problems == []
    (model / "consolidated.safetensors").write_bytes(safetensors(4))
    assert read_weights(model).floats == 4


def make(*names: str) -> Callable[[Path], None]:
    def files(folder: Path) -> None:
        for name in names:
            (folder / name).touch()

    return files


@pytest.mark.parametrize(
    ("there", "said"),
    [
        (make(), "has no weights (*.safetensors or *.bin): the download is not complete, or the model lies"),
        (make("optimizer.pt", "training_args.bin"), "has no weights"),
        (make("m.Q4_1.gguf"), "has its weights as GGUF only, which vLLM does not read; take the model's"),
    ],
)
def test_a_folder_without_weights_is_told(model: Path, there: Callable[[Path], None], said: str) -> None:
    (model / FILE).unlink()
    there(model)
    (problem,) = read_weights(model).problems
    assert problem.startswith(f"{model} {said}")


def test_older_formats_are_taken_where_they_are_whole(model: Path) -> None:
    (model / FILE).unlink()
    file = model / "pytorch_model.bin"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("data.pkl", bytes(1000))
    weights = read_weights(model)
    assert (weights.problems, weights.loaded_bytes(2)) == ([], file.stat().st_size)
    file.write_bytes(file.read_bytes()[:-30])
    assert read_weights(model).problems == [
        f"{file} has no end: the download was cut short; download it again"
    ]
    (model / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": "other.bin"}}))
    assert "lacks 1 of 1 files of weights (other.bin)" in read_weights(model).problems[0]


def test_a_gguf_file_is_known_by_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"GGUF\x03")
    (tmp_path / "b.gguf").write_bytes(b"text")
    assert [is_gguf(tmp_path / name) for name in ("a", "b.gguf", "none")] == [True, False, False]
