"""Events on endpoints: what `kubectl describe` shows."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from tandem.kube import KubeError, Object, Resource
from tandem.kube import resources as kinds
from tandem.operator.control.owned import MANAGER
from tandem.operator.texts import shortened, stamp

_LONGEST = 1024
"""Characters of a message that the API takes."""

_USUAL = ("Deploying", "Loading", "Pending", "RollingOut", "Starting")
"""Reasons of conditions that do not hold yet, without anything being wrong."""

log = logging.getLogger(__name__)


class Creator(Protocol):
    async def create(self, made: Object, resource: Resource, *, manager: str) -> Object: ...


@dataclass(frozen=True)
class Event:
    type: str
    """Normal or Warning."""
    reason: str
    message: str


def transitions(before: Iterable[Object], after: Iterable[Object]) -> Iterator[Event]:
    """What is worth telling when an endpoint's conditions become others: each new status or reason."""
    old = {c["type"]: (c["status"], c["reason"]) for c in before}
    for found in after:
        if old.get(found["type"]) == (found["status"], found["reason"]) or found["status"] == "Unknown":
            continue
        usual = found["status"] == "True" or found["reason"] in _USUAL
        yield Event("Normal" if usual else "Warning", found["reason"], f"{found['type']}: {found['message']}")


class Recorder:
    def __init__(self, client: Creator) -> None:
        self._client = client

    async def tell(self, about: Object, event: Event, now: datetime) -> None:
        """An event that cannot be written is no reason to fail."""
        metadata = about["metadata"]
        at = stamp(now)
        made = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{metadata['name'][:200]}.", "namespace": metadata["namespace"]},
            "involvedObject": {
                "apiVersion": about["apiVersion"],
                "kind": about["kind"],
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
                "resourceVersion": metadata["resourceVersion"],
            },
            "type": event.type,
            "reason": event.reason,
            "message": shortened(event.message, _LONGEST),
            "source": {"component": MANAGER},
            "firstTimestamp": at,
            "lastTimestamp": at,
            "count": 1,
        }
        try:
            await self._client.create(made, kinds.EVENT, manager=MANAGER)
        except KubeError as error:
            log.warning("event %s of %s: %s", event.reason, metadata["name"], error)
