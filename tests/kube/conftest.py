"""A client of a real API server, and a namespace of the test's own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tandem.kube import Client, connect

from ..api.conftest import ApiServer, bare_api_server, new_namespace

__all__ = ["bare_api_server"]


@pytest.fixture
def namespace(bare_api_server: ApiServer) -> str:
    return new_namespace(bare_api_server)


@pytest.fixture
async def client(bare_api_server: ApiServer) -> AsyncIterator[Client]:
    async with connect(bare_api_server.kubeconfig) as client:
        yield client
