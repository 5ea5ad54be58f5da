"""Who can reach the webhooks' port may send anything, and takes neither memory nor turns from API servers."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import pytest

from tandem.api import GROUP
from tandem.api.conversion import convert
from tandem.operator.process import serving as module
from tandem.operator.process.serving import SMALL_REVIEW, serving, webhook_app

from ..endpoints import changed

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


def conversion(*objects: bytes, to: str = "v1alpha1") -> bytes:
    head = b'{"apiVersion": "apiextensions.k8s.io/v1", "kind": "ConversionReview", "request": {"uid": "u", '
    version = f'"desiredAPIVersion": "{GROUP}/{to}", "objects": ['.encode()
    return head + version + b", ".join(objects) + b"]}}"


async def answer_to(body: bytes) -> dict[str, Any]:
    async with (
        serving(webhook_app(), "127.0.0.1", 0) as port,
        aiohttp.ClientSession() as client,
        client.post(f"http://127.0.0.1:{port}/convert", data=io.BytesIO(body)) as answer,
    ):
        assert answer.status == 200, await answer.text()
        made: dict[str, Any] = await answer.json()
        return made


async def test_a_list_is_converted_whatever_large_objects_are_in_it() -> None:
    """They may be another tenant's."""
    large = changed("dpd-s3", {"metadata.annotations": {"a": "," * (256 << 10)}})
    small = [changed("dpd-s3", {"metadata.name": f"pd-{i}"}) for i in range(3)]
    objects = [*small, *[large] * 10]
    answer = await answer_to(conversion(*(json.dumps(o).encode() for o in objects)))
    assert answer["kind"] == "ConversionReview"
    assert answer["response"]["uid"] == "u"
    assert answer["response"]["result"] == {"status": "Success"}
    assert answer["response"]["convertedObjects"] == [convert(o, "v1alpha1") for o in objects]
    assert (await answer_to(conversion()))["response"]["convertedObjects"] == []


async def test_a_list_with_an_object_that_cannot_be_converted_is_not() -> None:
    objects = [
        json.dumps(changed("dpd-s3", {"apiVersion": version})).encode() for version in (f"{GROUP}/v1", "v9")
    ]
    response = (await answer_to(conversion(*objects)))["response"]
    assert response["result"]["status"] == "Failure"
    assert "convertedObjects" not in response


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
