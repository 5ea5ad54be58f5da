"""Times one engine over HTTP: prompts, streams, and a prompt beside streams."""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from prometheus_client.parser import text_string_to_metric_families

from tandem.bench.calibrate_fit import Kind, Sample
from tandem.bench.load import Prompts, Timing, ask, completion, timed
from tandem.http import Client, Origin

T = TypeVar("T")

_SHORT = 16
_LEAST = 512
_DECODE_TOKENS = 24
_STREAMS = (1, 2, 4, 8, 16, 32, 64, 128)
_BESIDE = (1, 4)
LONGEST_PREFILL = 3.0
"""Prompts are doubled until one takes so many seconds."""
_LONGEST_BATCH = 4.0
"""Streams are doubled until their answers take so many seconds."""
LONGEST_PROMPT = 32_768
FULL = 0.9
"""How much of the KV cache a measurement may fill."""

OnStep = Callable[[str], None]


class CalibrationError(Exception):
    """An engine cannot be measured; the message says what is missing."""


@dataclass(frozen=True)
class Facts:
    """What an engine says of itself."""

    model: str
    max_model_len: int
    block_size: int
    blocks: int
    kv_cache_bytes: int | None

    @property
    def tokens(self) -> int:
        """That the KV cache holds."""
        return (self.blocks - 1) * self.block_size


async def read_facts(client: Client, origin: Origin, model: str | None) -> Facts:
    try:
        models = json.loads(await ask(client, origin, "/v1/models"))["data"]
        cards = {str(card["id"]): card for card in models}
    except (ValueError, KeyError, TypeError):
        raise CalibrationError(f"{origin} is no OpenAI server: its /v1/models is not a list") from None
    name = model or next(iter(cards), None)
    if name is None or name not in cards:
        raise CalibrationError(f"{origin} does not serve {name or 'any model'}; it serves {', '.join(cards)}")
    length = cards[name].get("max_model_len")
    text = (await ask(client, origin, "/metrics")).decode("utf-8", "replace")
    try:
        families = list(text_string_to_metric_families(text))
    except ValueError as error:
        raise CalibrationError(f"{origin}/metrics is not in Prometheus' text format: {error}") from None
    for family in families:
        for sample in family.samples:
            if sample.name == "vllm:cache_config_info":
                labels = sample.labels
                try:
                    size, blocks = int(labels["block_size"]), int(labels["num_gpu_blocks"])
                except (KeyError, ValueError):
                    continue
                memory = labels.get("kv_cache_memory_bytes", "")
                return Facts(
                    name,
                    length if isinstance(length, int) else blocks * size,
                    size,
                    blocks,
                    int(memory) if memory.isdecimal() else None,
                )
    raise CalibrationError(
        f"{origin}/metrics has no vllm:cache_config_info with block_size and num_gpu_blocks: "
        "is it a vLLM engine, not a router?"
    )


@dataclass
class Bench:
    """Measures one engine."""

    client: Client
    origin: Origin
    facts: Facts
    prompts: Prompts
    repeats: int
    on_step: OnStep

    def body(self, tokens: int, answer: int, **more: Any) -> dict[str, Any]:
        return completion(self.facts.model, self.prompts(tokens), answer, **more)

    async def one(self, tokens: int, answer: int = 1) -> Timing:
        return await timed(self.client, self.origin, self.body(tokens, answer))

    async def warm_up(self) -> None:
        self.on_step(f"{self.origin}: warming up")
        await self.one(_SHORT, 4)
        await self.one(4 * _SHORT, 4)

    async def prefills(self) -> list[Sample]:
        """Prompts alone, doubled until one takes long."""
        most = min(self.facts.max_model_len - 1, int(self.facts.tokens * FULL), LONGEST_PROMPT)
        if most < _LEAST:
            raise CalibrationError(f"{self.origin} takes prompts of {most} tokens; {_LEAST} are needed")
        samples: list[Sample] = []
        tokens = _SHORT
        while tokens <= most:
            self.on_step(f"{self.origin}: a prompt of {tokens} tokens")
            seconds = statistics.median([(await self.one(tokens)).ttft for _ in range(self.repeats)])
            samples.append(Sample(Kind.PREFILL, seconds, tokens))
            if seconds > LONGEST_PREFILL:
                break
            tokens *= 2
        return samples

    async def decodes(self, longest: int) -> list[Sample]:
        """Steps of streams: more and more of them, with little context and with some."""
        samples = []
        patience = _LONGEST_BATCH * self.repeats
        with_context = True
        for streams in _STREAMS:
            short, seconds = await self._decode(streams, _SHORT)
            if short is None:
                break
            samples.append(short)
            for context in (longest // 8,) if streams > 1 else (longest // 4, longest):
                if with_context:
                    sample, spent = await self._decode(streams, context)
                    samples += [sample] if sample is not None else []
                    with_context = streams == 1 or spent < patience
            if seconds > patience:
                break
        return samples

    async def mixes(self, longest: int, most: int) -> list[Sample]:
        """A prompt beside streams; the engine runs `most` requests together."""
        samples = []
        for streams in (count for count in _BESIDE if count < most):
            tokens = longest // 2
            self.on_step(f"{self.origin}: a prompt of {tokens} tokens beside {_streams(streams)}")
            runs = [await self._mix(streams, tokens) for _ in range(self.repeats)]
            context = statistics.fmean(run[2] for run in runs)
            for kind, which in ((Kind.MIXED, 0), (Kind.STALL, 1)):
                seconds = statistics.median(run[which] for run in runs)
                samples.append(Sample(kind, seconds, tokens, streams, context))
        return samples

    async def _decode(self, streams: int, tokens: int) -> tuple[Sample | None, float]:
        """With the seconds it took; None where so many do not run together."""
        # Those that start first must go on until the last one has started and been seen for a while.
        answer = _DECODE_TOKENS + streams * (1 + tokens // 256)
        room = min(self.facts.tokens * FULL / streams, self.facts.max_model_len)
        if tokens + answer > room:
            return None, 0.0
        self.on_step(f"{self.origin}: {_streams(streams)} with a context of {tokens} tokens")
        started = asyncio.get_running_loop().time()
        gaps, contexts = [], []
        for _ in range(self.repeats):
            answers = await asyncio.gather(*(self.one(tokens, answer) for _ in range(streams)))
            together = _together(answers)
            if len(together) < 4 * streams:
                return None, 0.0
            gaps.append(statistics.median(gap for gap, _ in together))
            contexts.append(statistics.fmean(context for _, context in together))
        context = statistics.fmean(contexts)
        spent = asyncio.get_running_loop().time() - started
        return Sample(Kind.DECODE, statistics.median(gaps), 0, streams, context), spent

    async def _mix(self, streams: int, tokens: int) -> tuple[float, float, float]:
        """The prompt's seconds to its first token, the longest step of a stream, the streams' context."""
        answer = min(self.facts.max_model_len - _SHORT, int(self.facts.tokens * FULL - tokens) // streams) - 1
        running = [_Running() for _ in range(streams)]
        tasks = [
            asyncio.create_task(
                timed(self.client, self.origin, self.body(_SHORT, answer), on_token=stream.token)
            )
            for stream in running
        ]
        try:
            for stream in running:
                await _or_failure(stream.reaches(4), tasks)
            prompt = await _or_failure(self.one(tokens), tasks)
            before = running[0].count
            await _or_failure(running[0].reaches(before + 1), tasks)
        finally:
            for task in tasks:  # the client leaves: the engine ends them
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self.one(_SHORT)  # by its end, they are gone
        begin, end = prompt.sent, prompt.times[0]
        times = running[0].times
        stalls = [b - a for a, b in itertools.pairwise(times) if b > begin and a < end]
        return prompt.ttft, max(stalls), _SHORT + len([t for t in times if t < begin])


def _together(answers: Sequence[Timing]) -> list[tuple[float, int]]:
    """(gap, tokens of context) of every step in which all of the streams ran and none began or ended."""
    begin, end = max(a.times[0] for a in answers), min(a.times[-1] for a in answers)
    return [
        (gap, a.prompt_tokens + i)
        for a in answers
        for i, (gap, time) in enumerate(zip(a.gaps, a.times, strict=False))
        if time >= begin and time + gap <= end
    ]


class _Running:
    """A stream's tokens as they come, and someone who waits for them."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._wanted = 0
        self._reached = asyncio.Event()

    @property
    def count(self) -> int:
        return len(self.times)

    def token(self, time: float) -> None:
        self.times.append(time)
        if len(self.times) >= self._wanted:
            self._reached.set()

    async def reaches(self, count: int) -> None:
        self._wanted = count
        self._reached.clear()
        if self.count < count:
            await self._reached.wait()


async def _or_failure(work: Awaitable[T], tasks: Sequence[asyncio.Task[Timing]]) -> T:
    """The result of `work`; the failure of a task that ends before it."""
    waiting = asyncio.ensure_future(work)
    done, _ = await asyncio.wait({waiting, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    if waiting in done:
        return waiting.result()
    waiting.cancel()
    for task in done:
        task.result()
    raise CalibrationError("the streams ended before the prompt beside them had its first token")


def _streams(count: int) -> str:
    return f"{count} stream{'s' if count > 1 else ''}"
