"""Whether a folder holds a model that engines can load, and what its config.json says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.engine import flag_value, has_flag
from tandem.local.weights import Weights, lfs_problem, read_weights

_FROM_FILES = ("auto", "hf", "safetensors")
"""Of `--load-format`: those that read the folder's files as they are. `dummy`, say, reads none."""


def read_config(folder: Path) -> dict[str, Any]:
    """A model's config.json. Raises ValueError, which says why it is none."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_bytes())
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}. Download it again") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} is not a model's config.json: it holds no object")
    return config


def architecture_problem(folder: Path, config: dict[str, Any], args: Sequence[str]) -> str | None:
    """What to say where config.json names no class of models that an engine could choose its code by."""
    named = config.get("architectures")
    if (isinstance(named, list) and named) or has_flag(args, "--hf-overrides"):
        return None
    return (
        f'{folder / "config.json"} names no architecture (`"architectures": ["LlamaForCausalLM"]`, say), so '
        "engines cannot tell what to load: take the file of the model's own repository"
    )


def read_files(folder: Path, args: Sequence[str]) -> Weights:
    """The weights that an engine with these flags would load; a tokenizer that is not there is their problem
    too."""
    asked = flag_value(args, "--load-format") or "auto"
    weights = read_weights(folder) if asked in _FROM_FILES else Weights()
    try:
        if problem := lfs_problem(folder / "tokenizer.json"):
            weights.problems.append(problem)
    except OSError as error:
        weights.problems.append(f"{folder / 'tokenizer.json'} cannot be read: {error.strerror}")
    return weights
