"""The certificate is written to API servers once, however many replicas start at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tandem.kube import ApiError, Object, Resource
from tandem.kube import resources as kinds
from tandem.operator.names import WEBHOOK
from tandem.operator.webhooks.trust import trust


class Api:
    """Has the webhook's configuration, and no definition."""

    def __init__(self) -> None:
        self.version = 1
        self.webhooks: list[Object] = [{"name": "w", "clientConfig": {"service": {"name": "s"}}}]
        self.writes = 0

    async def get(self, resource: Resource, name: str) -> Object | None:
        if resource != kinds.VALIDATING_WEBHOOK:
            return None
        found: Object = {
            "metadata": {"name": WEBHOOK, "resourceVersion": str(self.version)},
            "webhooks": self.webhooks,
        }
        await asyncio.sleep(0)
        return found

    async def patch(self, resource: Resource, name: str, namespace: None, change: Object, **_: Any) -> None:
        await asyncio.sleep(0)
        if change["metadata"]["resourceVersion"] != str(self.version):
            raise ApiError(409, "Conflict", "the object has been modified")
        self.version += 1
        self.writes += 1
        self.webhooks = change["webhooks"]


async def test_replicas_that_start_at_once_write_it_once() -> None:
    api = Api()
    await asyncio.gather(*(trust(api, "s", "system", "AA==") for _ in range(4)))  # type: ignore[arg-type]
    assert api.writes == 1
    assert api.webhooks == [{"name": "w", "clientConfig": {"service": {"name": "s"}, "caBundle": "AA=="}}]


async def test_what_is_changed_without_end_is_given_up() -> None:
    class Restless(Api):
        async def get(self, resource: Resource, name: str) -> Object | None:
            found = await super().get(resource, name)
            self.version += 1
            return found

    with pytest.raises(ApiError):
        await trust(Restless(), "s", "system", "AA==")  # type: ignore[arg-type]
