"""Where a local endpoint keeps things: XDG folders, or everything under TANDEM_HOME."""

from __future__ import annotations

import os
from pathlib import Path


def model_cache() -> Path:
    """Converted models; safe to delete, they are made again."""
    return _base("XDG_CACHE_HOME", ".cache") / "models"


def state(endpoint: str) -> Path:
    """What the processes of one endpoint write, in a folder for each port of a router."""
    return states() / endpoint


def states() -> Path:
    """Where the folders of all endpoints are."""
    return _base("XDG_STATE_HOME", ".local/state")


def _base(variable: str, default: str) -> Path:
    if home := os.environ.get("TANDEM_HOME"):
        return Path(home)
    return Path(os.environ.get(variable) or Path.home() / default) / "tandem"
