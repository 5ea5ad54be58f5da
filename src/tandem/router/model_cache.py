"""The folder where engines' model files are kept: each content once, under its hash; models made of them."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

_CONTENTS = "contents"
_MODELS = "models"


@dataclass(frozen=True)
class Manifest:
    """What one engine serves: the content of each file by its hash, and the names that are merely there."""

    files: Mapping[str, str] = field(default_factory=dict)
    marks: frozenset[str] = frozenset()

    @cached_property
    def digest(self) -> str:
        """Equal for equal files, whoever serves them."""
        lines = [f"{name} {content}" for name, content in self.files.items()] + sorted(self.marks)
        return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


class ModelCache:
    """Every name in it is whole: made under another name, and renamed. Methods block; threads may call them,
    one at a time."""

    def __init__(self, folder: str | None) -> None:
        """`folder` stays after `close`, with what is in it; None: a temporary one, which does not. Raises
        OSError."""
        self._temporary = None if folder else tempfile.TemporaryDirectory(prefix="tandem-model-files-")
        self.folder = Path(folder or (self._temporary.name if self._temporary else ""))
        for part in (_CONTENTS, _MODELS):
            (self.folder / part).mkdir(mode=0o700, parents=True, exist_ok=True)
            for unfinished in (self.folder / part).glob(".*"):
                _remove(unfinished)

    def keep(self, data: bytes) -> str:
        """Keep a file's content; its hash. Raises OSError."""
        content = hashlib.sha256(data).hexdigest()
        path = self._content(content)
        if not self.has(content):
            descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".")
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(descriptor)
            os.replace(name, path)
        return content

    def has(self, content: str) -> bool:
        return self._content(content).is_file()

    def model(self, manifest: Manifest) -> Path:
        """The folder of a model: its files under their own names. Raises OSError."""
        path = self.folder / _MODELS / manifest.digest
        if not path.is_dir():
            made = Path(tempfile.mkdtemp(dir=path.parent, prefix="."))
            for name in (*manifest.files, *manifest.marks):
                (made / name).parent.mkdir(parents=True, exist_ok=True)
            for name, content in manifest.files.items():
                shutil.copyfile(self._content(content), made / name)
            for name in manifest.marks:
                (made / name).touch()
            os.replace(made, path)
        return path

    def prune(self, wanted: Iterable[Manifest]) -> None:
        """Keep nothing but these models and their files."""
        models = {manifest.digest: manifest for manifest in wanted}
        contents = {content for manifest in models.values() for content in manifest.files.values()}
        for part, names in ((_CONTENTS, contents), (_MODELS, models.keys())):
            for path in (self.folder / part).iterdir():
                if path.name not in names:
                    _remove(path)

    def close(self) -> None:
        if self._temporary is not None:
            with suppress(OSError):
                self._temporary.cleanup()

    def _content(self, content: str) -> Path:
        return self.folder / _CONTENTS / content


def _remove(path: Path) -> None:
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
