"""The scripts of benchmarks/, which is no package."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


COMMON = ("machine", "packages", "pages", "processes", "quiet", "svg")
"""Modules of benchmarks/common."""


@contextmanager
def script(file: str, called: str) -> Iterator[ModuleType]:
    """A file of benchmarks/ as a module of this name, by which others import it within the block. It finds
    what is in benchmarks/common."""
    spec = importlib.util.spec_from_file_location(called, BENCHMARKS / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[called] = module
    common = str(BENCHMARKS / "common")
    sys.path.insert(0, common)
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(common)
        for name in (called, *COMMON):
            sys.modules.pop(name, None)
