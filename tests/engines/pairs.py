"""A pair of engines as a client sees it: the real one, and the simulated one to compare it with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import httpx

from . import contract
from .cases import COMPLETION, Case, completion, send
from .contract import Seen

REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True)
class EventSource:
    """Where an engine publishes its KV events, and replays them."""

    endpoint: str
    replay: str


@dataclass
class Pair:
    """A prefiller and a decoder, by their URLs."""

    client: httpx.AsyncClient
    prefill: str
    decode: str
    events: dict[str, EventSource]
    """By URL."""

    async def post(self, engine: str, body: dict[str, Any], path: str = COMPLETION) -> httpx.Response:
        return await send(self.client, engine, Case("", "POST", path, body))

    async def metrics(self, engine: str) -> str:
        return (await self.client.get(f"{engine}/metrics")).text

    async def prefill_leg(
        self, body: dict[str, Any], path: str = COMPLETION
    ) -> tuple[httpx.Response, dict[str, Any]]:
        """The answer, and the kv_transfer_params in it."""
        answer = await self.post(
            self.prefill, {**body, "max_tokens": 1, "kv_transfer_params": REMOTE_DECODE}, path
        )
        return answer, answer.json()["kv_transfer_params"]

    async def hand_off(self, prompt: list[int]) -> list[httpx.Response]:
        """The answers of both legs."""
        prefill, params = await self.prefill_leg(completion(prompt))
        decode = await self.post(self.decode, completion(prompt, max_tokens=8, kv_transfer_params=params))
        return [prefill, decode]


@dataclass
class Both:
    """The real pair, the simulated one, and what was seen of them."""

    real: Pair
    simulated: Pair
    covered: set[tuple[str, str]] = field(default_factory=set)
    """The patterns of `DIFFERENCES` that were needed."""
    answered: dict[str, tuple[Seen, Seen]] = field(default_factory=dict)

    @property
    def pairs(self) -> tuple[Pair, Pair]:
        return self.real, self.simulated

    @property
    def roles(self) -> dict[str, tuple[str, str]]:
        """Role → the URLs of (real, simulated)."""
        return {
            "prefill": (self.real.prefill, self.simulated.prefill),
            "decode": (self.real.decode, self.simulated.decode),
        }

    async def answers(self, case: Case) -> tuple[Seen, Seen]:
        """(real, simulated) to the case, which is sent once."""
        if case.name not in self.answered:
            answers = [await send(pair.client, pair.decode, case) for pair in self.pairs]
            self.answered[case.name] = self.seen(*answers, case=case.name)
        return self.answered[case.name]

    def seen(self, real: httpx.Response, simulated: httpx.Response, case: str = "") -> tuple[Seen, Seen]:
        return contract.seen(real, self.covered, case), contract.seen(simulated, set(), case)
