"""An engine with several data-parallel ranks is told which of them has the prompt's beginning."""

from __future__ import annotations

import socket

import pytest

from .conftest import Endpoint, Start
from .fakes import FakeEngine, local_counter

BLOCK = 16
LETTERS = 100
HEADER = "x-data-parallel-rank"


def free_ports(count: int) -> int:
    """The first of so many in a row. Nobody publishes there: the index is told by the tests."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return min(port, 65_535 - count)


def holds(endpoint: Endpoint, fake: FakeEngine, rank: int) -> None:
    """A rank of an engine has computed what `local_counter` makes of any prompt."""
    assert endpoint.app.knowledge is not None
    index = endpoint.app.knowledge._index
    known = index.follow(endpoint.of(fake), rank, complete=True)
    blocks = LETTERS // BLOCK
    index.store(known, list(range(blocks)), None, [7] * BLOCK * blocks, BLOCK)


async def started(start: Start, ranks: int, **engines: int) -> Endpoint:
    places = {
        name: f"kv-events=tcp://127.0.0.1:{free_ports(ranks)},kv-ranks={ranks}" for name in ("p0", "d0", "e0")
    }
    return await start(
        routing_strategy="kvaware",
        local=local_counter(),
        labels=places,
        **{"prefill": 0, "decode": 0, **engines},
    )


@pytest.mark.parametrize(("ranks", "rank", "told"), [(4, 2, "2"), (4, 0, "0"), (1, 0, None)])
async def test_an_engine_that_computes_alone_is_told(start: Start, ranks: int, rank: int, told: str) -> None:
    endpoint = await started(start, ranks, roleless=1)
    (fake,) = endpoint.roleless
    await endpoint.post({"model": "m", "prompt": "x" * LETTERS})
    holds(endpoint, fake, rank)
    await endpoint.post({"model": "m", "prompt": "x" * LETTERS})
    await endpoint.post({"model": "m", "prompt": "x" * (BLOCK - 1)})
    assert [seen.headers.get(HEADER) for seen in fake.requests] == [None, told, None]


async def test_of_a_hand_over_the_prefiller_is_told_alone(start: Start) -> None:
    """Its decoder gets the KV at whichever rank takes it."""
    endpoint = await started(start, 4, prefill=1, decode=1)
    (prefiller,), (decoder,) = endpoint.prefill, endpoint.decode
    holds(endpoint, prefiller, 3)
    holds(endpoint, decoder, 1)
    await endpoint.post({"model": "m", "prompt": "x" * LETTERS})
    assert [seen.headers.get(HEADER) for seen in prefiller.requests] == ["3"]
    assert [seen.headers.get(HEADER) for seen in decoder.requests] == [None]


async def test_a_client_may_not_pick_a_rank(start: Start) -> None:
    endpoint = await started(start, 4, roleless=1)
    answer = await endpoint.post({"model": "m", "prompt": "x"}, x_data_parallel_rank="1")
    assert answer.status_code == 400
