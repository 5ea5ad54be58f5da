"""A model folder and a machine, as far as planning looks at them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.engine import Core, Machine

from .models import model_folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a model with a context of 8192 tokens."""
    return model_folder(tmp_path / "model")


@pytest.fixture
def machine() -> Machine:
    return Machine(
        cores=tuple(Core((i,)) for i in range(4)),
        gpus=(),
        memory_bytes=16 << 30,
        accelerator="cpu",
        python="/venv/bin/python",
    )
