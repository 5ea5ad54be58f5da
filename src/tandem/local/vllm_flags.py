"""Flags that the installed vLLM does not have, found in its sources: to ask its parser takes ten seconds."""

from __future__ import annotations

import difflib
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tandem.engine.detect import Run, run

_FIRST = ("engine/arg_utils.py", "entrypoints/launchers/cli_args.py", "config")
_THEN = ("engine", "entrypoints", "platforms", "plugins", "utils")
"""Where flags are made, and where else one could be."""
_NAME = re.compile(r'^    (\w+): |"--([a-z0-9-]+)"', re.MULTILINE)
_ASK = "import importlib.util as u; print(*u.find_spec('vllm').submodule_search_locations)"


def find_sources(python: str, run: Run = run) -> Path | None:
    """The folder of the vLLM that an interpreter has; None where it cannot be told. Nothing is imported."""
    if python == sys.executable:
        spec = importlib.util.find_spec("vllm")
        found = list(spec.submodule_search_locations or ()) if spec else []
    else:
        found = (run([python, "-c", _ASK]) or "").split("\n")
    return Path(found[0]) if found and found[0] else None


def unknown_flags(flags: Iterable[str], sources: Path) -> dict[str, str | None]:
    """Of flags (`--max-model-len`) those that stand nowhere in vLLM's sources, and the nearest that does.

    Beginnings of flags are known, too: vLLM's parser takes them."""
    left = list(dict.fromkeys(flags))
    names: set[str] = set()
    for part in (*_FIRST, *_THEN):
        if not left:
            return {}
        for text in _texts(sources / part):
            left = [flag for flag in left if not _occurs(flag, text)]
            if part in _FIRST:
                names.update(f"--{(field or flag).replace('_', '-')}" for field, flag in _NAME.findall(text))
    if not names:
        return {}  # these are no sources of vLLM
    return {flag: next(iter(difflib.get_close_matches(flag, names, 1, 0.8)), None) for flag in left}


def _texts(place: Path) -> Iterator[str]:
    for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
        try:
            yield file.read_text("utf-8", "replace")
        except OSError:
            continue


def _occurs(flag: str, text: str) -> bool:
    name = flag.removeprefix("--")
    return name in text or name.replace("-", "_") in text
