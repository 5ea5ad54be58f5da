"""Asking a real API server what it would take."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

from .conftest import ApiServer

CASE = "case"


def asked(server: ApiServer, resources: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Those of the resources that the API server takes, as it would store them, by their places."""
    marked = [copy.deepcopy(resource) for resource in resources]
    for i, resource in enumerate(marked):
        resource["metadata"]["labels"] = {CASE: str(i)}
    words = ("create", "--dry-run=server", "--validate=strict", "-o", "json", "-f", "-")
    text = server.kubectl(*words, stdin="\n---\n".join(map(json.dumps, marked))).stdout.strip()
    taken: dict[int, dict[str, Any]] = {}
    while text:
        stored, end = json.JSONDecoder().raw_decode(text)
        text = text[end:].lstrip()
        taken[int(stored["metadata"]["labels"][CASE])] = stored
    return taken
