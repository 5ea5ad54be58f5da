"""Fake engines for the router's tests: vLLM's wire shapes, answers on command, every request recorded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from tandem.http import Request, Responder, Server, serve
from tandem.prompt import PromptCounter, Tokens

JSON = [(b"content-type", b"application/json")]
SSE = [(b"content-type", b"text/event-stream; charset=utf-8")]


@dataclass
class Seen:
    """One generation request as an engine saw it."""

    path: str
    body: dict[str, Any]
    raw: bytes
    headers: dict[str, str]

    @property
    def kv(self) -> dict[str, Any] | None:
        return self.body.get("kv_transfer_params")

    @property
    def is_canary(self) -> bool:
        return self.headers.get("x-tandem-canary") == "1"


@dataclass
class FakeEngine:
    """Answers like vLLM with a NixlConnector. `on_generate` may take over a request that is no canary: it
    returns True when it has answered. `refuses` makes it answer 500, canaries included."""

    name: str
    server: Server | None = None
    seen: list[Seen] = field(default_factory=list)
    tokenized: list[dict[str, Any]] = field(default_factory=list)
    refuses: Callable[[Seen], bool] = lambda seen: False
    tokens: Callable[[dict[str, Any]], int] = lambda body: len(str(body.get("prompt", body.get("messages"))))
    on_generate: Callable[[FakeEngine, Seen, Responder], Any] | None = None
    knows_ids: bool = True
    """Whether /tokenize answers ids, those of `local_counter`; else only their number."""
    max_model_len: int = 100_000
    cards: list[dict[str, Any]] | None = None
    """Its model cards; None: one of `m`."""
    metrics: bytes | None = None
    """Its page of /metrics; None: it has none."""
    elsewhere: Callable[[Request, Responder], Awaitable[None]] | None = None
    """Takes requests for paths that vLLM does not have."""
    cancelled: int = 0
    reads_of: set[str] = field(default_factory=set)
    chunks: tuple[str, ...] = ("Hel", "lo")

    @property
    def url(self) -> str:
        assert self.server is not None
        return f"http://127.0.0.1:{self.server.port}"

    @property
    def requests(self) -> list[Seen]:
        """The requests that clients sent, without canaries."""
        return [s for s in self.seen if not s.is_canary]

    async def __call__(self, request: Request, responder: Responder) -> None:
        try:
            await self._answer(request, responder)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def _answer(self, request: Request, responder: Responder) -> None:
        match request.path:
            case "/health":
                responder.send(200, JSON, b"{}")
            case "/v1/models":
                card = {"id": "m", "object": "model", "max_model_len": self.max_model_len}
                cards = [card] if self.cards is None else self.cards
                responder.send(200, JSON, json.dumps({"object": "list", "data": cards}).encode())
            case "/metrics" if self.metrics is not None:
                responder.send(200, [(b"content-type", b"text/plain")], self.metrics)
            case "/tokenize":
                self.tokenized.append(json.loads(request.body))
                count = self.tokens(self.tokenized[-1])
                responder.send(
                    200,
                    JSON,
                    json.dumps({"count": count, "tokens": [7] * count if self.knows_ids else []}).encode(),
                )
            case "/v1/completions" | "/v1/chat/completions":
                await self._generate(request, responder)
            case _ if self.elsewhere is not None:
                await self.elsewhere(request, responder)
            case _:
                responder.send(404, JSON, b'{"detail":"Not Found"}')

    async def _generate(self, request: Request, responder: Responder) -> None:
        headers = {k.decode(): v.decode("latin-1") for k, v in request.headers}
        seen = Seen(request.path, json.loads(request.body), request.body, headers)
        self.seen.append(seen)
        if self.on_generate is not None and not seen.is_canary:
            taken = self.on_generate(self, seen, responder)
            if asyncio.iscoroutine(taken):
                taken = await taken
            if taken:
                return
        self.answer(seen, responder)

    def answer(self, seen: Seen, responder: Responder) -> None:
        """What a healthy engine answers."""
        if self.refuses(seen):
            responder.send(500, JSON, b'{"error":{"message":"cannot"}}')
            return
        kv = seen.kv or {}
        if kv.get("do_remote_decode"):
            responder.send(200, JSON, json.dumps(self.prefill_reply(seen)).encode())
            return
        if kv.get("do_remote_prefill"):
            if kv["remote_request_id"] in self.reads_of:
                responder.send(500, JSON, b'{"error":{"message":"stale KV"}}')
                return
            self.reads_of.add(kv["remote_request_id"])
        self.say(seen, responder, self.chunks)

    def say(self, seen: Seen, responder: Responder, texts: Sequence[str]) -> None:
        """A whole answer, streamed in these pieces where that is asked for."""
        if seen.body.get("stream"):
            responder.start(200, SSE)
            for text in texts:
                responder.write(chunk(text))
            responder.write(DONE)
            responder.finish()
        else:
            responder.send(200, JSON, json.dumps(completion("".join(texts))).encode())

    def prefill_reply(self, seen: Seen) -> dict[str, Any]:
        reply = completion("x")
        reply["kv_transfer_params"] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1, 2]],
            "remote_engine_id": self.name,
            "remote_request_id": seen.headers["x-request-id"],
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
        }
        return reply


OnGenerate = Callable[[FakeEngine, Seen, Responder], Any]


def kv_metrics(use: float, *, prefix_caching: bool = True, cache_tokens: int = 10_000) -> bytes:
    """What an engine tells of its KV cache."""
    config = f'enable_prefix_caching="{prefix_caching}",engine="0",kv_cache_size_tokens="{cache_tokens}"'
    usage = f'vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} {use}'
    return f"{usage}\nvllm:cache_config_info{{{config}}} 1.0\n".encode()


def reads_kv(seen: Seen) -> bool:
    return bool((seen.kv or {}).get("do_remote_prefill"))


def broken(status: int) -> OnGenerate:
    """An engine that answers every client with an error status."""

    def answer(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        responder.send(status, JSON, json.dumps({"error": {"message": f"engine says {status}"}}).encode())
        return True

    return answer


async def hang(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
    """An engine that never answers."""
    await asyncio.Event().wait()
    return True


def streams(*pieces: bytes, whole: bool = True, then_hangs: bool = False) -> OnGenerate:
    """An engine whose stream comes in these pieces, one read of the router each."""

    async def answer(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        responder.start(200, SSE)
        for piece in pieces:
            responder.write(piece)
            for _ in range(4):  # router and engine share a loop: it reads meanwhile
                await asyncio.sleep(0)
        if then_hangs:
            await asyncio.Event().wait()
        if whole:
            responder.finish()
        else:
            responder.abort()
        return True

    return answer


def streams_slowly(go_on: asyncio.Event) -> OnGenerate:
    """An engine whose stream has a token at once, and its end when it is let go on."""

    async def answer(engine: FakeEngine, seen: Seen, responder: Responder) -> bool:
        responder.start(200, SSE)
        responder.write(chunk("a"))
        await go_on.wait()
        responder.write(DONE)
        responder.finish()
        return True

    return answer


DONE = b"data: [DONE]\n\n"
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
ERROR = b'data: {"error": {"message": "KV load failed", "code": 500}}\n\n'


def chunk(text: str) -> bytes:
    event = {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": text}}]}
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def completion(text: str) -> dict[str, Any]:
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "model": "m",
        "choices": [{"index": 0, "text": text, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 3}},
    }


@asynccontextmanager
async def engines(*fakes: FakeEngine) -> AsyncIterator[None]:
    """Serve the fakes on free ports."""
    try:
        for fake in fakes:
            fake.server = await serve(fake, "127.0.0.1", 0)
        yield
    finally:
        for fake in fakes:
            if fake.server is not None:
                await fake.server.close()


class _LocalCounter:
    def __init__(self, off: int, fails: Exception | None) -> None:
        self.off = off
        self.fails = fails

    def chat(self, body: Mapping[str, Any], most: int = 0) -> Tokens:
        return self._count(body.get("messages"))

    def completion(self, body: Mapping[str, Any]) -> Tokens:
        return self._count(body.get("prompt"))

    def _count(self, prompt: object) -> Tokens:
        if self.fails is not None:
            raise self.fails
        return Tokens([7] * (len(str(prompt)) + self.off))


def local_counter(off: int = 0, fails: Exception | None = None) -> PromptCounter:
    """Stands for a counter that counts as the fake engines do, off by a number, or cannot."""
    return cast(PromptCounter, _LocalCounter(off, fails))


async def eventually(holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait until something holds; the test's own time-out is the limit."""
    while not await holds():
        await asyncio.sleep(0.005)
