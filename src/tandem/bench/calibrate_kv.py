"""How KV crosses between the engines of a pair, by the decoder's own metrics."""

from __future__ import annotations

import asyncio
import json
import statistics
from dataclasses import dataclass, field

from tandem.bench.calibrate_engine import FULL, LONGEST_PREFILL, LONGEST_PROMPT, Bench, CalibrationError
from tandem.bench.calibrate_fit import nonnegative_least_squares
from tandem.bench.load import ask, timed
from tandem.bench.scrape import EngineCounters, read_counters

_SETTLE_SECONDS = 15.0


@dataclass
class Transfers:
    """`values`: what of a CostProfile the transfers tell."""

    bytes_per_token: int = 0
    values: dict[str, float] = field(default_factory=dict)
    seen: list[tuple[int, float]] = field(default_factory=list)


async def measure_transfers(prefill: Bench, decode: Bench, notes: list[str]) -> Transfers:
    """Hand prompts of several lengths over."""
    met = (await _counters(decode)).kv_transfers > 0
    most = min(prefill.facts.tokens, decode.facts.tokens) * FULL
    most = min(most, LONGEST_PROMPT, prefill.facts.max_model_len - 8, decode.facts.max_model_len - 8)
    block = decode.facts.block_size
    if block > most:
        raise CalibrationError(f"{decode.origin}: its KV cache is too small to hand anything over")
    decode.on_step(f"{decode.origin}: its first KV from {prefill.origin}")
    first = await _hand_over(prefill, decode, block)
    seen, per_token = [], set()
    again: list[float] = []
    tokens = block
    while tokens <= most:
        decode.on_step(f"{decode.origin}: KV of {tokens} tokens from {prefill.origin}")
        runs = [await _hand_over(prefill, decode, tokens) for _ in range(prefill.repeats)]
        seen.append((runs[0].size, statistics.median(run.seconds for run in runs)))
        per_token.add(runs[0].size // tokens)
        again = again or [run.ttft for run in runs]
        if runs[0].prefill > LONGEST_PREFILL:
            break
        tokens *= 2
    rows = [[1 / seconds, size / seconds] for size, seconds in seen]
    latency, per_byte = nonnegative_least_squares(rows, [1.0] * len(rows))
    values = {"kv_latency": latency, "kv_bandwidth": 1 / max(per_byte, 1e-15)}
    if met:
        notes.append("kv_handshake is the default's: these engines had met before")
    else:
        values["kv_handshake"] = max(0.0, first.ttft - statistics.median(again))
    return Transfers(max(per_token), values, seen)


@dataclass(frozen=True)
class _HandOff:
    size: int
    seconds: float
    prefill: float
    ttft: float
    """Of the decoder."""


async def _hand_over(prefill: Bench, decode: Bench, tokens: int) -> _HandOff:
    before = await _counters(decode)
    remote = {"do_remote_decode": True, "do_remote_prefill": False}
    body = prefill.body(tokens, 1, kv_transfer_params=remote)
    started = asyncio.get_running_loop().time()
    reply = json.loads(await ask(prefill.client, prefill.origin, "/v1/completions", body))
    spent = asyncio.get_running_loop().time() - started
    params = reply.get("kv_transfer_params")
    if not params:
        raise CalibrationError(
            f"{prefill.origin} does not hand KV over: its answer has no kv_transfer_params; start it with a "
            "--kv-transfer-config for NixlConnector"
        )
    body = {
        **body,
        "max_tokens": 4,
        "min_tokens": 4,
        "model": decode.facts.model,
        "kv_transfer_params": params,
    }
    timing = await timed(decode.client, decode.origin, body)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _SETTLE_SECONDS
    while (grown := (await _counters(decode)).since(before)).kv_transfers < 1:
        if loop.time() > deadline:
            raise CalibrationError(
                f"{decode.origin} counted no KV transfer (vllm:nixl_xfer_time_seconds, "
                f"vllm:nixl_bytes_transferred) when it took a prompt over from {prefill.origin}"
            )
        await asyncio.sleep(0.1)
    return _HandOff(round(grown.kv_bytes), grown.kv_seconds, spent, timing.ttft)


async def _counters(bench: Bench) -> EngineCounters:
    return read_counters((await ask(bench.client, bench.origin, "/metrics")).decode("utf-8", "replace"))
