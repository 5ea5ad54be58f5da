"""The proof that an endpoint disaggregates: two requests, and what the engines' own counters say of them.

A short prompt must be answered by a decoder alone. A long one must be computed by a prefiller, cross to
the decoder as KV, not be computed there, and give the answer that the decoder alone would have given.
Every prompt carries a fresh nonce, and the reference another cache salt, so that no cache can answer.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import statistics
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tandem.bench.chat import TimedAnswer, timed_chat
from tandem.bench.equality import compare
from tandem.bench.scrape import EngineCounters, scrape
from tandem.bench.stream import served_models

ANSWER_TOKENS = 48
_SETTLE_SECONDS = 15.0
QUESTION = "What is the capital of France, and what is it famous for?"

_SUBJECTS = [
    "river",
    "garden",
    "machine",
    "winter",
    "letter",
    "paper",
    "ocean",
    "road",
    "question",
    "bridge",
    "lantern",
    "market",
]
_VERBS = [
    "crosses",
    "follows",
    "carries",
    "keeps",
    "finds",
    "leaves",
    "meets",
    "holds",
    "paints",
    "measures",
    "opens",
    "answers",
]
_PLACES = [
    "valley",
    "harbour",
    "library",
    "station",
    "forest",
    "kitchen",
    "museum",
    "village",
    "island",
    "meadow",
    "tower",
    "square",
]


class ProofError(Exception):
    """The proof could not be carried out; the message says what is missing."""


@dataclass(frozen=True)
class Check:
    """One claim, whether it held, and what was seen."""

    claim: str
    held: bool
    seen: str


@dataclass
class Shot:
    """One request's figures. Times are milliseconds, `kv_bytes` bytes."""

    name: str
    path: str
    reason: str
    router_tokens: int
    engine_tokens: int
    ttft_ms: float
    itl_p50_ms: float
    itl_max_ms: float
    answer: str
    prefill_ms: float | None = None
    kv_bytes: int | None = None
    kv_ms: float | None = None
    remote_tokens: int | None = None
    cached_tokens: int | None = None
    computed_tokens: int | None = None


@dataclass
class Proof:
    url: str
    shots: list[Shot] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)

    @property
    def held(self) -> bool:
        return all(c.held for c in self.checks)

    def check(self, claim: str, held: bool, seen: str) -> None:
        self.checks.append(Check(claim, held, seen))

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "held": self.held}


async def prove(
    url: str,
    *,
    nonce: str | None = None,
    on_step: Callable[[str], None] = lambda step: None,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Proof:
    """Run the proof against a router. Raises ProofError, RequestFailed or httpx.HTTPError when it cannot be
    carried out; a claim that does not hold is a failed Check of the result."""
    nonce = nonce or secrets.token_hex(8)
    proof = Proof(url)
    # Connections are given up sooner than vLLM closes them (5 s), so that no request meets a closing one.
    kept = httpx.Limits(keepalive_expiry=2.0)
    patience = httpx.Timeout(600.0, connect=5.0)
    async with httpx.AsyncClient(timeout=patience, limits=kept, trust_env=False) as client:
        model = (await served_models(client, url))[0]
        run = _Run(client, url, model, nonce, proof, sleep)
        on_step("a short prompt")
        threshold = await run.short()
        on_step("a long prompt, and the same on the decoder alone")
        await run.long(threshold)
    return proof


@dataclass
class _Run:
    client: httpx.AsyncClient
    url: str
    model: str
    nonce: str
    proof: Proof
    sleep: Callable[[float], Awaitable[None]]

    async def short(self) -> int:
        """The short prompt's checks. Returns the router's threshold in tokens."""
        engines = await self._engines()
        before = {e: await scrape(self.client, e) for e in engines}
        answer = await self._ask(f"{QUESTION} ({self.nonce})")
        shot = self._shot("short", answer)
        threshold = int(_told(answer, "threshold"))
        self.proof.check(
            "short: a decoder alone answered",
            shot.path == "decode_only" and shot.router_tokens < threshold,
            f"{shot.path}, {shot.router_tokens} tokens < {threshold}",
        )
        self._check_count(shot)
        # Also lets the counters come to rest, so that the long prompt's are its own.
        await self._settled(_told(answer, "decode-url"), before, shot.engine_tokens)
        if shot.path == "decode_only":
            asked = [
                e
                for e, role in engines.items()
                if role == "prefill" and (await scrape(self.client, e)) != before[e]
            ]
            self.proof.check(
                "short: no prefiller took part", not asked, ", ".join(asked) or "no counter of one moved"
            )
        return threshold

    async def long(self, threshold: int) -> None:
        """The long prompt's checks."""
        prompt = long_prompt(self.nonce, tokens=max(threshold + threshold // 2, 256))
        engines = await self._engines()
        before = {e: await scrape(self.client, e) for e in engines}
        answer = await self._ask(prompt)
        shot = self._shot("long", answer)
        self.proof.check(
            "long: a prefiller and a decoder answered",
            shot.path == "disaggregated" and shot.router_tokens >= threshold,
            f"{shot.path}, {shot.router_tokens} tokens >= {threshold}",
        )
        self._check_count(shot)
        if shot.path != "disaggregated":
            return
        prefiller, decoder = _told(answer, "prefill-url"), _told(answer, "decode-url")
        await self._check_transfer(
            shot,
            await self._settled(prefiller, before, shot.engine_tokens),
            await self._settled(decoder, before, shot.engine_tokens, transfers=1),
        )
        await self._check_reference(prompt, answer, decoder)

    async def _engines(self) -> dict[str, str]:
        """URL → role of the engines behind the router, from its own metrics."""
        text = (await self.client.get(f"{self.url}/metrics")).text
        return engines_of(text)

    async def _check_transfer(self, shot: Shot, prefill: EngineCounters, decode: EngineCounters) -> None:
        tokens = shot.engine_tokens
        shot.kv_bytes, shot.kv_ms = round(decode.kv_bytes), decode.kv_seconds * 1000
        shot.remote_tokens = round(decode.received_tokens)
        shot.cached_tokens = round(decode.cached_tokens)
        shot.computed_tokens = round(decode.computed_tokens)
        self.proof.check(
            "long: the prefiller computed the prompt",
            prefill.computed_tokens == tokens,
            f"{prefill.computed_tokens:.0f} of {tokens} tokens computed",
        )
        self.proof.check(
            "long: the KV cache crossed to the decoder",
            decode.kv_bytes > 0 and decode.kv_transfers >= 1,
            f"{decode.kv_bytes / 1e6:.1f} MB in {decode.kv_seconds * 1000:.1f} ms",
        )
        own = 1 if decode.lmcache_transfers else 0
        others = decode.received_tokens + decode.cached_tokens
        self.proof.check(
            f"long: the decoder computed {'the last token' if own else 'none'} of the prompt",
            others == tokens - own and decode.computed_tokens == own,
            f"{decode.received_tokens:.0f} remote + {decode.cached_tokens:.0f} cached = {others:.0f}, "
            f"{decode.computed_tokens:.0f} computed",
        )

    async def _check_reference(self, prompt: str, answer: TimedAnswer, decoder: str) -> None:
        before = {decoder: await scrape(self.client, decoder)}
        body = {**self._body(prompt), "cache_salt": f"reference-{self.nonce}"}
        reference = await timed_chat(self.client, decoder, body)
        grown = await self._settled(decoder, before, reference.prompt_tokens)
        self.proof.check(
            "long: the reference was computed by the decoder alone",
            grown.computed_tokens == reference.prompt_tokens == answer.prompt_tokens,
            f"{grown.computed_tokens:.0f} of {reference.prompt_tokens} tokens computed",
        )
        same = compare(answer.token_ids, reference.token_ids, reference.likely)
        self.proof.check(
            "long: the answer is the decoder's own",
            same.acceptable and len(answer.token_ids) > 0,
            f"{len(answer.token_ids)} tokens: {same}",
        )

    def _check_count(self, shot: Shot) -> None:
        self.proof.check(
            f"{shot.name}: the router counted what the engine counted",
            shot.router_tokens == shot.engine_tokens,
            f"{shot.router_tokens} = {shot.engine_tokens}"
            if shot.router_tokens == shot.engine_tokens
            else f"{shot.router_tokens}, the engine {shot.engine_tokens}",
        )

    async def _settled(
        self, engine: str, before: dict[str, EngineCounters], tokens: int, *, transfers: int = 0
    ) -> EngineCounters:
        """How far an engine's counters grew: they are written some time after the answer."""
        grown = EngineCounters()
        for _ in range(int(_SETTLE_SECONDS / 0.25)):
            grown = (await scrape(self.client, engine)).since(before.get(engine, EngineCounters()))
            if grown.prompt_tokens >= tokens and grown.kv_transfers >= transfers:
                break
            await self.sleep(0.25)
        return grown

    async def _ask(self, prompt: str) -> TimedAnswer:
        return await timed_chat(self.client, self.url, self._body(prompt), headers={"x-tandem-explain": "1"})

    def _body(self, prompt: str) -> dict[str, Any]:
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": ANSWER_TOKENS,
        }

    def _shot(self, name: str, answer: TimedAnswer) -> Shot:
        prefill = answer.headers.get("x-tandem-prefill-ms")
        shot = Shot(
            name=name,
            path=_told(answer, "path"),
            reason=_told(answer, "reason"),
            router_tokens=int(_told(answer, "prompt-tokens")),
            engine_tokens=answer.prompt_tokens,
            ttft_ms=answer.ttft * 1000,
            itl_p50_ms=statistics.median(answer.gaps or [0.0]) * 1000,
            itl_max_ms=max(answer.gaps, default=0.0) * 1000,
            answer=answer.text,
            prefill_ms=float(prefill) if prefill else None,
        )
        self.proof.shots.append(shot)
        return shot


def _told(answer: TimedAnswer, name: str) -> str:
    value = answer.headers.get(f"x-tandem-{name}")
    if value is None:
        raise ProofError(
            "The router does not tell the path it took; start it with --explain (as `tandem up` does)."
        )
    return value


def engines_of(metrics: str) -> dict[str, str]:
    """URL → role of the engines in a router's /metrics."""
    return {
        sample.labels["engine"]: sample.labels["role"]
        for family in text_string_to_metric_families(metrics)
        if family.name == "tandem_engine_ready"
        for sample in family.samples
    }


def long_prompt(nonce: str, *, tokens: int) -> str:
    """Plain English of at least about `tokens` tokens that no cache has seen, ending in a question."""
    rnd = random.Random(nonce)
    sentences = [f"Notes of {nonce}."]
    words = 0
    while words < tokens:
        sentence = f"The {rnd.choice(_SUBJECTS)} {rnd.choice(_VERBS)} the {rnd.choice(_PLACES)}."
        sentences.append(sentence)
        words += 6  # five words and the full stop: one token each for a tokenizer that knows English
    sentences.append(f"The notes end here. Question: {QUESTION}")
    return " ".join(sentences)
