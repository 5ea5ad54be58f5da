"""The model folder and the machine that planning looks at, which tests of `tandem up` have."""

from __future__ import annotations

from ..local.conftest import machine, model

__all__ = ["machine", "model"]
