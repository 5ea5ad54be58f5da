"""A router and two engines as a proof sees them: their answers, their headers, their counters.

They answer a prompt of N words as one of N tokens. `broken` names one thing that this endpoint does wrong.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tandem.http import Request, Responder, Server, serve

THRESHOLD = 100
TOKENS = {5: "It ", 7: "is ", 9: "Paris."}
JSON = [(b"content-type", b"application/json")]
SSE = [(b"content-type", b"text/event-stream")]


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def token_event(token: int, gap: float, text: str | None = None) -> bytes:
    """One token as vLLM streams it; `gap` is by how much (natural log) it is likelier than the second."""
    own, second = f"token_id:{token}", f"token_id:{token - 1}"
    top = [{"token": second, "logprob": -0.1 - gap}, {"token": own, "logprob": -0.1}]
    choice = {
        "index": 0,
        "delta": {"content": TOKENS.get(token, "?") if text is None else text},
        "token_ids": [token],
        "logprobs": {"content": [{"token": own, "logprob": -0.1, "top_logprobs": top}]},
    }
    return event({"object": "chat.completion.chunk", "choices": [choice], "usage": None})


def stream(responder: Responder, headers: dict[str, Any], tokens: list[int], prompt: int, gap: float) -> None:
    told = [(k.encode(), str(v).encode()) for k, v in headers.items()]
    responder.start(200, [*SSE, *told])
    first = {"index": 0, "delta": {"role": "assistant", "content": ""}}
    responder.write(event({"choices": [first], "usage": None, "prompt_token_ids": [1]}))
    for token in tokens:
        responder.write(token_event(token, gap))
    responder.write(event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": 3}}))
    responder.write(b"data: [DONE]\n\n")
    responder.finish()


COUNTERS = {
    "computed": 'vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"}',
    "cached": 'vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"}',
    "received": 'vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"}',
    "bytes": 'vllm:nixl_bytes_transferred_sum{engine="0"}',
    "seconds": 'vllm:nixl_xfer_time_seconds_sum{engine="0"}',
    "transfers": 'vllm:nixl_xfer_time_seconds_count{engine="0"}',
}


@dataclass
class Engine:
    """Counters, and what happens to a request that is sent to it without a router."""

    endpoint: Endpoint
    server: Server | None = None
    counters: Counter[str] = field(default_factory=Counter)
    asked: list[dict[str, Any]] = field(default_factory=list)

    @property
    def url(self) -> str:
        assert self.server is not None
        return f"http://127.0.0.1:{self.server.port}"

    async def __call__(self, request: Request, responder: Responder) -> None:
        if request.path == "/metrics":
            lines = [f"{name} {self.counters[key]}" for key, name in COUNTERS.items()]
            responder.send(200, [(b"content-type", b"text/plain")], "\n".join([*lines, ""]).encode())
            return
        self.asked.append(json.loads(request.body))
        self.endpoint.answer_alone(self, words(self.asked[-1]), responder)


def words(body: dict[str, Any]) -> int:
    return len(body["messages"][0]["content"].split())


@dataclass
class Endpoint:
    """The router; `broken` is what it or its engines do wrong."""

    broken: str | None = None
    models: tuple[str, ...] = ("m",)
    explains: bool = True
    asked: list[dict[str, Any]] = field(default_factory=list)
    server: Server | None = None
    later: list[Callable[[], None]] | None = None
    """Where counting is put off to, as engines write their counters some time after the answer."""

    def __post_init__(self) -> None:
        self.prefill, self.decode = Engine(self), Engine(self)

    @property
    def url(self) -> str:
        assert self.server is not None
        return f"http://127.0.0.1:{self.server.port}"

    async def __call__(self, request: Request, responder: Responder) -> None:
        match request.path:
            case "/v1/models":
                cards = [{"id": model} for model in self.models]
                responder.send(200, JSON, json.dumps({"data": cards}).encode())
            case "/metrics":
                roles = (("prefill", self.prefill), ("decode", self.decode))
                lines = [f'tandem_engine_ready{{role="{r}",engine="{e.url}"}} 1' for r, e in roles]
                responder.send(200, [(b"content-type", b"text/plain")], "\n".join([*lines, ""]).encode())
            case _:
                self.asked.append(json.loads(request.body))
                self.answer(words(self.asked[-1]), responder)

    def answer(self, tokens: int, responder: Responder) -> None:
        size = "long" if tokens >= THRESHOLD else "short"
        disaggregated = (size == "long") != (self.broken == f"{size} prompts take the other path")
        if disaggregated:
            self.count_hand_off(tokens)
        else:
            self.count(self.decode, computed=tokens)
            if self.broken == "a prefiller works at short prompts":
                self.count(self.prefill, computed=tokens)
        headers: dict[str, Any] = {
            "x-tandem-path": "disaggregated" if disaggregated else "decode_only",
            "x-tandem-reason": "threshold" if disaggregated else "short",
            "x-tandem-threshold": THRESHOLD,
            "x-tandem-prompt-tokens": tokens + (self.broken == f"the router miscounts {size} prompts"),
            "x-tandem-decode-url": self.decode.url,
        }
        if disaggregated:
            headers |= {"x-tandem-prefill-url": self.prefill.url, "x-tandem-prefill-ms": "12.5"}
        answer = [5, 7, 8 if disaggregated and self.broken == "the answer is another" else 9]
        if self.broken == "there is no answer" and disaggregated:
            answer = []
        stream(responder, headers if self.explains else {}, answer, tokens, gap=2.0)

    def count_hand_off(self, tokens: int) -> None:
        cached = 16 if self.broken == "the prefiller finds a part in its cache" else 0
        self.count(self.prefill, computed=tokens - cached, cached=cached)
        computed = 1 if self.broken == "the decoder computes a part" else 0
        moved = self.broken != "no KV crosses"
        self.count(
            self.decode,
            computed=computed,
            cached=32,
            received=tokens - 32 - computed,
            bytes=1000 * tokens * moved,
            seconds=0.25 * moved,
            transfers=int(moved),
        )

    def answer_alone(self, engine: Engine, tokens: int, responder: Responder) -> None:
        source = "cached" if self.broken == "the reference comes from a cache" else "computed"
        self.count(engine, **{source: tokens})
        stream(responder, {}, [5, 7, 9], tokens, gap=0.2 if self.broken == "tie" else 2.0)

    def count(self, engine: Engine, **grown: float) -> None:
        def add() -> None:
            engine.counters.update(grown)  # type: ignore[arg-type]

        add() if self.later is None else self.later.append(add)


@asynccontextmanager
async def answering(status: int, *parts: bytes) -> AsyncIterator[str]:
    """An endpoint that answers everything with these bytes."""

    async def answer(request: Request, responder: Responder) -> None:
        responder.start(status, SSE)
        for part in parts:
            responder.write(part)
        responder.finish()

    running = await serve(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{running.port}"
    finally:
        await running.close()


@asynccontextmanager
async def serving(endpoint: Endpoint) -> AsyncIterator[Endpoint]:
    """Serve a router and its engines on free ports."""
    parts = (endpoint, endpoint.prefill, endpoint.decode)
    try:
        for part in parts:
            part.server = await serve(part, "127.0.0.1", 0)
        yield endpoint
    finally:
        for part in parts:
            if part.server is not None:
                await part.server.close()
