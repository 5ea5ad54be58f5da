"""Where a local endpoint keeps things: XDG folders, or everything under TANDEM_HOME.

Raises LocalError where neither is known."""

from __future__ import annotations

import os
from pathlib import Path

from tandem.local.errors import LocalError


def model_cache() -> Path:
    """Converted models; safe to delete, they are made again."""
    return _base("XDG_CACHE_HOME", ".cache") / "models"


def state(endpoint: str) -> Path:
    """What the processes of one endpoint write, in a folder for each port of a router."""
    return states() / endpoint


def states() -> Path:
    """Where the folders of all endpoints are."""
    return _base("XDG_STATE_HOME", ".local/state")


def in_place_of_home() -> dict[str, str]:
    """Variables for programs that keep things in a home folder, where this user has none: they would make one
    called `~` where they are started."""
    try:
        Path.home()
    except RuntimeError:
        return {"HOME": str(model_cache().parent)}
    return {}


def _base(variable: str, default: str) -> Path:
    if home := os.environ.get("TANDEM_HOME"):
        return Path(home)
    try:
        return Path(os.environ.get(variable) or Path.home() / default) / "tandem"
    except RuntimeError:  # as in a container whose user is a number
        raise LocalError(
            f"User {os.getuid()} has no home folder here, so set TANDEM_HOME to a folder for models and logs."
        ) from None
