"""A client leaves, in every phase of its request, streamed and not: nothing of it stays on real engines.

SmolLM2 on one core computes some 500 prompt tokens and 25 output tokens a second, so a prefill and a decode
take long enough to leave in the middle of them; the phases between are held open by what stands before the
engines.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import pytest

from tandem.engine import KV_LEASE_SECONDS
from tandem.prompt import PromptCounter

from . import processes
from .answers import fresh_prompt
from .between import Endpoint, Sent, at_rest, behind, is_running, until
from .conftest import Up

AT_ONCE = 10.0
"""Seconds for what ends at once: a step under way, a prefill of a whole prompt, is not cut short."""
LEASED = KV_LEASE_SECONDS + 10.0
"""Seconds for KV blocks, which a prefiller keeps for a decoder that does not come."""
THRESHOLD = 1000

Leaving = Callable[[Endpoint, Sent, bool], Awaitable[None]]
"""Returns in the phase in which the client is to leave; told whether its answer is streamed."""


async def while_counted(endpoint: Endpoint, sent: Sent, stream: bool) -> None:
    await until(lambda: any(each.under_way("count") for each in endpoint.between))


async def in_prefill(endpoint: Endpoint, sent: Sent, stream: bool) -> None:
    (prefiller,) = endpoint.prefill
    engine = processes.with_argument(f"--port\0{urlsplit(prefiller.engine).port}")
    before = processes.cpu_seconds(engine)
    await until(lambda: prefiller.under_way("prefill"))
    # The engine tells of a request after its first step, and this prefill is a single one.
    await until(lambda: processes.cpu_seconds(engine) > before + 0.5)
    assert not prefiller.under_way("prefill")[0].answered


async def before_the_decode_leg(endpoint: Endpoint, sent: Sent, stream: bool) -> None:
    (decoder,) = endpoint.decode
    await until(lambda: decoder.under_way("decode"))


async def before_the_first_token(endpoint: Endpoint, sent: Sent, stream: bool) -> None:
    (decoder,) = endpoint.decode
    await until(lambda: decoder.under_way("decode"))
    await until(lambda: is_running(decoder.engine))
    assert sent.tokens == 0


async def in_decode(endpoint: Endpoint, sent: Sent, stream: bool) -> None:
    (decoder,) = endpoint.decode
    await until(lambda: is_running(decoder.engine))
    if stream:
        await until(lambda: sent.tokens >= 3)


LEFT = ("disaggregated", "threshold", "client_left")
PHASES: dict[str, tuple[Leaving, str, tuple[str, str, str]]] = {
    "while its prompt is counted": (while_counted, "holds count", ("none", "undecided", "client_left")),
    "during the prefill": (in_prefill, "", LEFT),
    "between the legs": (before_the_decode_leg, "holds decode", LEFT),
    "before the first token": (before_the_first_token, "holds_answer decode", LEFT),
    "during the decode": (in_decode, "", LEFT),
}
"""When the client leaves: who waits for that, which legs are held for it, and how the request counts."""

WAITS_FOR_THE_LEASE = "between the legs"


def request(counter: PromptCounter, tokens: int, stream: bool, **more: Any) -> dict[str, Any]:
    return {"prompt": fresh_prompt(counter, tokens), "max_tokens": 400, "stream": stream, **more}


async def nothing_in_hand(endpoint: Endpoint) -> None:
    """Wait for what the router has to let go of at once, and the engines once their step is over."""
    left = ["not asked"]
    with suppress(TimeoutError):
        async with asyncio.timeout(AT_ONCE):
            while left := await endpoint.in_hand():
                await asyncio.sleep(0.05)
    assert left == []
    await at_rest([each.engine for each in endpoint.between], within=AT_ONCE, kv=False)


@pytest.mark.parametrize(
    "phase",
    [pytest.param(p, marks=[pytest.mark.slow] if p == WAITS_FOR_THE_LEASE else []) for p in PHASES],
)
async def test_nothing_stays_of_a_client_that_leaves(smollm2: Up, counter: PromptCounter, phase: str) -> None:
    leaving, held, counts_as = PHASES[phase]
    await at_rest([*smollm2.prefill, *smollm2.decode], within=LEASED)
    # Held while it is counted, a prompt has to be counted by an engine; text, as ids need no counting.
    local = None if held == "holds count" else counter
    async with behind(smollm2.prefill, smollm2.decode, local, routing_threshold=THRESHOLD) as endpoint:
        for each in endpoint.between:
            if held:
                name, kind = held.split()
                getattr(each, name).add(kind)
        for stream in (True, False):
            body = request(counter, THRESHOLD + 100, stream)
            if local is None:
                body["prompt"] = "the river keeps every letter " * (THRESHOLD // 4)
            before = await endpoint.counted()
            async with endpoint.sending(body) as sent:
                await leaving(endpoint, sent, stream)
                assert not sent.task.done()
            await nothing_in_hand(endpoint)
            assert await endpoint.counted() - before == Counter({counts_as: 1})
        await at_rest([each.engine for each in endpoint.between], within=LEASED)


async def test_nothing_stays_of_a_client_that_leaves_the_queue(smollm2: Up, counter: PromptCounter) -> None:
    flags = {"routing_threshold": THRESHOLD, "max_concurrent_requests": 1, "max_queue_size": 1}
    async with behind(smollm2.prefill, smollm2.decode, counter, **flags) as endpoint:
        (decoder,) = endpoint.decode
        async with endpoint.sending(request(counter, 20, True, max_tokens=100)) as first:
            await until(lambda: first.tokens)
            for stream in (True, False):
                async with endpoint.sending(request(counter, 20, stream)) as second:
                    await until(endpoint.queued)
                    assert not second.task.done()
                await until(lambda: endpoint.server.connections == 1)
                assert not await endpoint.queued()
            assert decoder.seen("alone") == 1
            await first.task
        assert first.is_whole
        assert await endpoint.counted() == Counter(
            {("decode_only", "short", "ok"): 1, ("none", "queue", "client_left"): 2}
        )
        await nothing_in_hand(endpoint)
        await at_rest([each.engine for each in endpoint.between], within=AT_ONCE)
