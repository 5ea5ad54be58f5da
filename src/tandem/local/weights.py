"""The weights of a model's folder: whether they are whole, and how much memory they take.

Only the heads of files are read. A download that was cut short shows in a few milliseconds here, and to an
engine after half a minute or never.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_LFS = b"version https://git-lfs.github.com/spec/"
_GGUF = b"GGUF"
_ZIP = b"PK\x03\x04"
_LONGEST_HEADER = 100_000_000  # bytes; the safetensors library reads no longer one
_HEADER_LENGTH = 8  # bytes: the length of the header, little-endian, before it
_FLOATS = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}
"""Bytes of an element of the kinds that engines convert to the type that they compute in."""
_SHARD = re.compile(r"(?P<name>.+)-(?P<number>\d+)-of-(?P<count>\d+)\.(safetensors|bin)")
_KINDS = {
    "consolidated*.safetensors": "consolidated.safetensors.index.json",
    "*.safetensors": "model.safetensors.index.json",
    "*.bin": "pytorch_model.bin.index.json",
    "*.pt": "",
}
"""What vLLM looks for, in its order, and the file that names all of them where there are several."""
_OF_TRAINING = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
_TOLD = 3  # files that are named of many
_AGAIN = "download it again"


@dataclass
class Weights:
    """What an engine would load of a folder."""

    problems: list[str] = field(default_factory=list)
    """What keeps an engine from loading them, each with its path and what to do."""
    floats: int = 0
    """Numbers that are converted to the type that the engine computes in."""
    other_bytes: int = 0
    """Bytes of what stays as it is."""

    def loaded_bytes(self, float_bytes: int) -> int:
        """Bytes of memory in an engine that computes with numbers of `float_bytes` bytes."""
        return self.floats * float_bytes + self.other_bytes


def read_weights(folder: Path) -> Weights:
    """Look at every file of weights that an engine would load."""
    weights = Weights()
    files = _files(folder, weights.problems)
    for file in files:
        try:
            _read(file, weights)
        except OSError as error:
            weights.problems.append(f"{file} cannot be read: {error.strerror}")
    return weights


def lfs_problem(file: Path) -> str | None:
    """What to say of a file that Git LFS has not fetched; None of any other."""
    with file.open("rb") as stream:
        if not stream.read(len(_LFS)).startswith(_LFS):
            return None
    return f"{file} is a Git LFS pointer and not the file itself: run `git lfs pull` in {file.parent}"


def is_gguf(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            return stream.read(len(_GGUF)) == _GGUF
    except OSError:
        return False


def _files(folder: Path, problems: list[str]) -> list[Path]:
    """What an engine would load; what is missing of it is a problem."""
    for pattern, index in _KINDS.items():
        found = sorted(file for file in folder.glob(pattern) if file.name not in _OF_TRAINING)
        if index and (folder / index).is_file() and (named := _indexed(folder / index, problems)):
            wanted = [folder / name for name in named]
        elif found:
            wanted = [*found, *_missing_shards(found)]
        else:
            continue
        missing = [file.name for file in wanted if not file.is_file()]
        if missing:
            told = ", ".join(missing[:_TOLD]) + (" and others" if len(missing) > _TOLD else "")
            problems.append(
                f"{folder} lacks {len(missing)} of {len(wanted)} files of weights ({told}): the download is "
                "not complete; run it again"
            )
        return [file for file in wanted if file.is_file()]
    if not problems:
        problems.append(_none(folder))
    return []


def _none(folder: Path) -> str:
    if any(folder.glob("*.gguf")):
        return (
            f"{folder} has its weights as GGUF only, which vLLM does not read; take the model's repository "
            "that has *.safetensors"
        )
    return (
        f"{folder} has no weights (*.safetensors or *.bin): the download is not complete, or the model lies "
        "in another folder"
    )


def _indexed(index: Path, problems: list[str]) -> list[str]:
    """The files that an index names; none where it cannot be read, which is a problem."""
    try:
        if problem := lfs_problem(index):
            problems.append(problem)
            return []
        names = set(json.loads(index.read_bytes())["weight_map"].values())
        if names and all(isinstance(name, str) for name in names):
            return sorted(names)
    except OSError as error:
        problems.append(f"{index} cannot be read: {error.strerror}")
        return []
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    problems.append(f"{index} names no files: it is damaged; {_AGAIN}")
    return []


def _missing_shards(found: Iterable[Path]) -> Iterator[Path]:
    """Files that, by the names of others (`model-00001-of-00004.safetensors`), should be there too."""
    series: dict[tuple[str, str, str], tuple[Path, set[int]]] = {}
    for file in found:
        if match := _SHARD.fullmatch(file.name):
            key = match["name"], match["count"], file.suffix
            series.setdefault(key, (file.parent, set()))[1].add(int(match["number"]))
    for (name, count, suffix), (folder, numbers) in series.items():
        first = 0 if 0 in numbers else 1
        for number in range(first, min(int(count), 10_000) + first):
            if number not in numbers:
                yield folder / f"{name}-{number:0{len(count)}}-of-{count}{suffix}"


def _read(file: Path, weights: Weights) -> None:
    """Take one file in. Raises OSError."""
    if problem := lfs_problem(file) or _other_kind(file):
        weights.problems.append(problem)
    elif file.suffix == ".safetensors":
        _read_safetensors(file, weights)
    else:
        weights.other_bytes += file.stat().st_size


def _other_kind(file: Path) -> str | None:
    """What to say of a file that is plainly not what its name says."""
    with file.open("rb") as stream:
        begins = stream.read(64)
    if not begins:
        return f"{file} is empty: the download was cut short; {_AGAIN}"
    if begins.startswith(_GGUF):
        return f"{file} is a GGUF file, which vLLM does not read, whatever its name"
    if begins.lstrip().lower().startswith((b"<!doctype", b"<html")):
        return f"{file} is a web page and not weights: the download was refused; {_AGAIN}"
    if file.suffix != ".safetensors" and begins.startswith(_ZIP) and not zipfile.is_zipfile(file):
        return f"{file} has no end: the download was cut short; {_AGAIN}"
    return None


def _read_safetensors(file: Path, weights: Weights) -> None:
    """By its header, which names every tensor and the bytes where it lies."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_HEADER_LENGTH), "little")
        begins = _HEADER_LENGTH + length
        if length > _LONGEST_HEADER:
            weights.problems.append(f"{file} is no safetensors file; {_AGAIN}")
            return
        if size < begins:
            weights.problems.append(_cut_short(file, size, f"its header alone takes {begins:,}"))
            return
        header = _header(stream.read(length))
    if header is None:
        weights.problems.append(f"{file} has a header that is not that of a safetensors file; {_AGAIN}")
        return
    end = begins + max((tensor.end for tensor in header), default=0)
    if size < end:
        weights.problems.append(_cut_short(file, size, f"its header tells of {end:,}"))
    elif size > end:
        weights.problems.append(
            f"{file} has {size:,} bytes, more than the {end:,} that its header tells of: it is damaged; "
            f"{_AGAIN}"
        )
    for tensor in header:
        if tensor.kind in _FLOATS:
            weights.floats += tensor.bytes // _FLOATS[tensor.kind]
        else:
            weights.other_bytes += tensor.bytes


def _cut_short(file: Path, size: int, told: str) -> str:
    return f"{file} has {size:,} bytes and {told}: the download was cut short; {_AGAIN}"


@dataclass(frozen=True)
class _Tensor:
    kind: str
    bytes: int
    end: int


def _header(data: bytes) -> list[_Tensor] | None:
    """The tensors that a header names; None where it is no header."""
    try:
        entries: dict[str, Any] = json.loads(data)
        return [_tensor(entry) for name, entry in entries.items() if name != "__metadata__"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _tensor(entry: dict[str, Any]) -> _Tensor:
    begin, end = entry["data_offsets"]
    if not (isinstance(begin, int) and isinstance(end, int) and 0 <= begin <= end):
        raise ValueError("no offsets")
    return _Tensor(str(entry["dtype"]), end - begin, end)
