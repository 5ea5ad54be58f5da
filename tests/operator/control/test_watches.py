"""What the operator must see before it works on endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from tandem.kube import ApiError, Resource
from tandem.kube import resources as kinds
from tandem.kube.client import Listing
from tandem.operator.control.watches import Watches


class Refusing:
    """An API server with nothing in it, that lets nobody see one kind."""

    def __init__(self, refused: Resource) -> None:
        self.refused = refused
        self.asked = asyncio.Event()

    async def list(self, resource: Resource, *_: Any, **selectors: Any) -> Listing:
        if resource == self.refused:
            self.asked.set()
            raise ApiError(403, "Forbidden", "the account may not list these")
        return Listing([], "1")

    async def watch(self, *_: Any, **selectors: Any) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        yield "OPEN", {}
        await asyncio.Event().wait()


async def test_endpoints_do_not_wait_for_the_webhooks_configuration() -> None:
    """It concerns the certificate alone: an operator that is newer than its rights goes on working."""
    server = Refusing(kinds.VALIDATING_WEBHOOK)
    watches = Watches(server, lambda key: None, "system")  # type: ignore[arg-type]
    running = asyncio.create_task(watches.run())
    try:
        async with asyncio.timeout(30):
            await server.asked.wait()
            await watches.wait()
        assert not watches.webhooks.synced.is_set()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
