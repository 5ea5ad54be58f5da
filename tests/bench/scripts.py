"""The scripts of benchmarks/, which is no package."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@contextmanager
def script(file: str, called: str) -> Iterator[ModuleType]:
    """A file of benchmarks/ as a module of this name, by which others import it within the block. It finds
    what is in benchmarks/common."""
    spec = importlib.util.spec_from_file_location(called, BENCHMARKS / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with _found_in("common"):
        sys.modules[called] = module
        spec.loader.exec_module(module)
        yield module


@contextmanager
def scripts(folder: str, *names: str) -> Iterator[dict[str, ModuleType]]:
    """Modules of a folder of benchmarks/, which find each other and what is in benchmarks/common."""
    others = _loaded()
    for name in others:
        del sys.modules[name]
    try:
        with _found_in(folder, "common"):
            yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.modules.update(others)


@contextmanager
def _found_in(*folders: str) -> Iterator[None]:
    """Modules of these folders are found within the block, and forgotten after it."""
    before, paths = _loaded(), [str(BENCHMARKS / folder) for folder in folders]
    sys.path[:0] = paths
    try:
        yield
    finally:
        for path in paths:
            sys.path.remove(path)
        for name in _loaded().keys() - before.keys():
            del sys.modules[name]


def _loaded() -> dict[str, ModuleType]:
    """All modules of benchmarks/."""
    files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
    return {
        name: sys.modules[name] for name, file in files.items() if file and BENCHMARKS in Path(file).parents
    }
