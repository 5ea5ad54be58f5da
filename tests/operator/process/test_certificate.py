"""The webhooks' certificate is looked after for as long as the operator runs."""

from __future__ import annotations

import asyncio
import ssl
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from tandem.kube import KubeError
from tandem.operator.process import run as module
from tandem.operator.process.run import OperatorConfig, _Operator
from tandem.operator.webhooks.certificates import Certificate, make


async def test_one_that_could_not_be_written_is_tried_again_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after a day, which is the time between two looks that nothing asks for."""
    made = make("webhooks", "system", datetime.now(UTC))
    told = asyncio.Event()
    tries = 0

    async def shared(*_: object) -> Certificate:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise KubeError("the API server is away")
        return made

    async def get(*_: object) -> None:
        """Of the definition: there is none."""

    async def trust(*given: object) -> None:
        assert given[-1] == made.bundle
        told.set()

    monkeypatch.setattr(module, "shared", shared)
    monkeypatch.setattr(module, "trust", trust)
    monkeypatch.setattr(module, "CERTIFICATE_AGAIN_SECONDS", 0.01)
    operator = _Operator(SimpleNamespace(sent={}, get=get), OperatorConfig())  # type: ignore[arg-type]
    operator._distrusted.set()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    task = asyncio.create_task(operator._renew(tmp_path, context, own=True))
    async with asyncio.timeout(10):
        await told.wait()
    assert tries == 2
    task.cancel()
