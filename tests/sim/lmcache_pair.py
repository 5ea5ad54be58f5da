"""A simulated LMCache PD pair, and a router of it for tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from tandem.sim.handoff import Network
from tandem.sim.lmcache import Settings

from .helpers import FOX, PROFILE, Answer, Engines, engines, flags

P, D = 0, 1
CHUNK = 64
PROMPT = FOX * 10  # 101 tokens: 2 chunks of 64
TOKENS = 101
SEED = {"PYTHONHASHSEED": "0"}
PAGE = CHUNK * PROFILE.kv_bytes_per_token
PROXY = ("127.0.0.1", 7500)
# Ids whose notification comes after the answer, and before it.
AFTER, BEFORE = "r0", "r1"


def sender(chunks: int = 100, **more: Any) -> Settings:
    return Settings(
        role="sender", buffer_bytes=chunks * PAGE, **{"chunk_size": CHUNK, "proxy": PROXY, **more}
    )


def receiver(chunks: int = 100, *, number: int = 0, **more: Any) -> Settings:
    ports = {"init_ports": (7300 + number,), "alloc_ports": (7400 + number,)}
    return Settings(role="receiver", buffer_bytes=chunks * PAGE, **{"chunk_size": CHUNK, **ports, **more})


def command(settings: Settings, *more: str) -> list[str]:
    """A vLLM command line with these settings; decoders have no prefix cache, as LMCache PD needs."""
    no_cache = ["--no-enable-prefix-caching"] if settings.role == "receiver" else []
    caching = [] if any("prefix-caching" in word for word in more) else no_cache
    return flags("--kv-transfer-config", json.dumps(settings.transfer_config()), *caching, *more)


class Router:
    """What a router does and hears. Notifications are taken where the engine would send them by ZMQ."""

    def __init__(self, e: Engines, told: list[tuple[float, str, str]]) -> None:
        self.e = e
        self.told = told

    def heard(self, req_id: str) -> int:
        return sum(r == req_id for _, _, r in self.told)

    async def prefill(
        self, req_id: str, prompt: str = PROMPT, *, to: Settings | None = None, number: int = P, **more: Any
    ) -> Answer:
        params = {**(to or receiver()).disagg_spec(req_id), **more.pop("spec", {})}
        kv = {"disagg_spec": params, "lmcache.tag.req": req_id, **more.pop("kv", {})}
        return await self.e.complete(number, prompt, **{"max_tokens": 1, "kv_transfer_params": kv, **more})

    async def decode(
        self, req_id: str | None, prompt: str = PROMPT, *, number: int = D, **more: Any
    ) -> Answer:
        kv = None if req_id is None else {"lmcache.tag.req": req_id}
        return await self.e.complete(number, prompt, **{"kv_transfer_params": kv, **more})

    async def handed_over(self, req_id: str, prompt: str = PROMPT, **more: Any) -> None:
        """A prefill leg, and its notification."""
        assert (await self.prefill(req_id, prompt, **more)).status == 200
        await self.hear(req_id)

    async def hear(self, req_id: str, seconds: float = 5.0) -> None:
        async with asyncio.timeout(seconds):
            while not self.heard(req_id):
                await asyncio.sleep(0.001)

    def buffer(self, number: int = D) -> dict[str, int]:
        state: dict[str, int] = self.e[number].engine.state()["receive_buffer"]
        return state

    async def local_text(self, prompt: str = PROMPT, number: int = D) -> str:
        return (await self.e.complete(number, prompt)).text


@asynccontextmanager
async def pair(
    *settings: Settings, network: Network | None = None, more: tuple[str, ...] = (), **options: Any
) -> AsyncIterator[Router]:
    """A prefiller and a decoder, unless other settings are given."""
    told: list[tuple[float, str, str]] = []
    network = network or Network()
    network.notify = lambda url, message: told.append(
        (asyncio.get_running_loop().time(), url, msgspec.msgpack.decode(message)["req_id"])
    )
    lines = [command(s, *more) for s in settings or (sender(), receiver())]
    try:
        async with engines(*lines, **{"environment": SEED, "network": network, **options}) as e:
            yield Router(e, told)
    finally:
        await network.close()
