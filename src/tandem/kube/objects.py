"""Kubernetes objects as dicts."""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]
"""A Kubernetes object as JSON gives it."""

Key = tuple[str, str]
"""Namespace ("" for objects of the whole cluster) and name."""


def key_of(found: Object) -> Key:
    metadata = found["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def version_of(found: Object) -> str:
    """The resource version: opaque, compared for equality only."""
    version: str = found["metadata"].get("resourceVersion", "")
    return version
