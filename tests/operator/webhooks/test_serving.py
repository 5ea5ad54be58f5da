"""Who can reach the webhooks' port may send anything, and takes neither memory nor turns from API servers."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import pytest

from tandem.operator.process import serving as module
from tandem.operator.process.serving import SMALL_REVIEW, serving, webhook_app

SMALL, LARGE = b"{}", b"{}" + b" " * SMALL_REVIEW


async def answered(bodies: list[bytes]) -> list[int]:
    """The status of each answer, of reviews that are sent at the same time."""
    async with serving(webhook_app(), "127.0.0.1", 0) as port, aiohttp.ClientSession() as client:

        async def status(body: bytes) -> int:
            async with client.post(f"http://127.0.0.1:{port}/validate", data=io.BytesIO(body)) as answer:
                return answer.status

        return await asyncio.gather(*map(status, bodies))


def reviewing(monkeypatch: pytest.MonkeyPatch, review: Callable[[], object]) -> None:
    def reviewed(_: Mapping[str, Any]) -> dict[str, Any]:
        review()
        return {}

    monkeypatch.setattr(module, "admission_review", reviewed)


@pytest.mark.parametrize("path", ["/validate", "/convert"])
@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"[]", b"{}", b'{"request": 1}', b"{" * 1000),
        pytest.param(b"[" * 100_000 + b"]" * 100_000, id="deep"),
        pytest.param(b'{"request": {"object": [' + b"[]," * 10_000_000 + b"[]]}}", id="a gigabyte in memory"),
    ],
)
async def test_what_is_no_review_is_refused(path: str, body: bytes) -> None:
    async with (
        serving(webhook_app(), "127.0.0.1", 0) as port,
        aiohttp.ClientSession() as client,
        client.post(f"http://127.0.0.1:{port}{path}", data=io.BytesIO(body)) as answer,
    ):
        assert answer.status == 400
        assert "not a review" in await answer.text()


async def test_small_reviews_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(3)
    reviewing(monkeypatch, lambda: together.wait(10))
    assert await answered([SMALL] * 3) == [200] * 3


async def test_of_large_reviews_one_is_in_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(2)
    met: list[int] = []

    def review() -> None:
        try:
            met.append(together.wait(0.05))
        except threading.BrokenBarrierError:
            together.reset()  # nobody came

    reviewing(monkeypatch, review)
    assert await answered([LARGE] * 3) == [200] * 3
    assert not met


async def test_a_review_that_is_never_sent_to_its_end_gives_its_turn_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "READ_SECONDS", 0.05)
    async with serving(webhook_app(), "127.0.0.1", 0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /validate HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n{")
        async with asyncio.timeout(10):
            assert (await reader.readline()).split()[1] == b"408"
        writer.close()
        await writer.wait_closed()
