"""Measures a vLLM engine over HTTP and makes a cost profile for simulated ones.

What is timed, each several times over: prompts alone, from short ones to such as take seconds; a step of so
many streams with so much context; a prompt beside running streams, for it and for them. `calibrate_fit` finds
the coefficients. How KV crosses between the engines of a pair is read from the decoder's own metrics.
Nothing else should use the engines meanwhile.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from tandem.bench.calibrate_engine import Bench, OnStep, read_facts
from tandem.bench.calibrate_fit import COEFFICIENTS, Sample, fit
from tandem.bench.calibrate_kv import Transfers, measure_transfers
from tandem.bench.load import Prompts
from tandem.http import Client, Origin
from tandem.sim.cost import CostProfile


@dataclass(frozen=True)
class Measured:
    """A sample and what the fitted profile says in its place, in seconds."""

    engine: str
    sample: Sample
    predicted: float

    @property
    def error(self) -> float:
        """Relative."""
        return self.predicted / self.sample.seconds - 1


@dataclass
class Calibration:
    """A profile, how well it explains what was measured, and what was not measured."""

    profile: CostProfile
    error: float
    """Root mean square of the samples' relative errors."""
    measured: list[Measured]
    transfers: list[tuple[int, float]]
    """(bytes, seconds) of the KV transfers, the medians of each size."""
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        samples = [
            {"engine": m.engine, **asdict(m.sample), "predicted": m.predicted, "error": m.error}
            for m in self.measured
        ]
        return {
            "profile": asdict(self.profile),
            "coefficients": {name: getattr(self.profile, name) for name in COEFFICIENTS},
            "error": self.error,
            "samples": samples,
            "transfers": [{"bytes": size, "seconds": seconds} for size, seconds in self.transfers],
            "notes": self.notes,
        }


async def calibrate(
    engine: str | None = None,
    *,
    prefill: str | None = None,
    decode: str | None = None,
    model: str | None = None,
    budget: int | None = None,
    repeats: int = 3,
    seed: int | None = None,
    on_step: OnStep = lambda step: None,
) -> Calibration:
    """Measure one engine, or a pair, or one engine and the KV transfer of a pair of its kind.

    URLs are `http://host:port`. With a pair and no `engine`, prompts are timed on the prefiller and streams
    on the decoder. `model`: a served name, else the engine's first; `budget`: its `--max-num-batched-tokens`
    where it is known. Raises CalibrationError, LoadError (Unreachable: nobody answers) or ValueError (a URL).
    """
    prompts = Prompts(seed)
    client = Client()
    try:
        benches: dict[str, Bench] = {}
        for url in dict.fromkeys(u for u in (engine, prefill, decode) if u is not None):
            on_step(f"asking {url} what it is")
            origin = Origin.parse(url)
            facts = await read_facts(client, origin, model)
            benches[url] = Bench(client, origin, facts, prompts, repeats, on_step)
        prefiller, streamer = engine or prefill, engine or decode
        if prefiller is None or streamer is None:
            raise ValueError("calibrate needs an engine, or a prefiller and a decoder")
        return await _calibrate(benches, prefiller, streamer, (prefill, decode), budget)
    finally:
        await client.aclose()


async def _calibrate(
    benches: dict[str, Bench],
    prefiller: str,
    streamer: str,
    pair: tuple[str | None, str | None],
    budget: int | None,
) -> Calibration:
    notes: list[str] = []
    kv = Transfers()
    if pair[0] is not None and pair[1] is not None:
        # First of all: the first transfer shows the handshake.
        kv = await measure_transfers(benches[pair[0]], benches[pair[1]], notes)
    await benches[prefiller].warm_up()
    samples = {prefiller: await benches[prefiller].prefills()}
    longest = samples[prefiller][-1].tokens
    if streamer != prefiller:
        await benches[streamer].warm_up()
    decodes = await benches[streamer].decodes(longest)
    together = max((sample.streams for sample in decodes), default=0)
    mixes = await benches[streamer].mixes(longest, together)
    samples[streamer] = [*samples.get(streamer, ()), *decodes, *mixes]
    fitted = fit(list(samples.values()), [*[None] * (len(samples) - 1), budget])
    facts = benches[streamer].facts
    values: dict[str, Any] = {**fitted.coefficients, "block_size": facts.block_size}
    if (seen := budget or fitted.budgets[-1]) is not None:
        values["max_num_batched_tokens"] = seen
    else:
        values["max_num_batched_tokens"] = max(CostProfile().max_num_batched_tokens, longest)
        notes.append(
            f"no prompt of up to {longest} tokens was cut into chunks, so max_num_batched_tokens is a guess: "
            "give --max-num-batched-tokens"
        )
    if kv.bytes_per_token:
        values["kv_bytes_per_token"] = kv.bytes_per_token
    elif facts.kv_cache_bytes:
        values["kv_bytes_per_token"] = facts.kv_cache_bytes // (facts.blocks * facts.block_size)
    else:
        notes.append("kv_bytes_per_token is the default's: only a pair's transfers tell it")
    values["kv_cache_bytes"] = (
        facts.blocks * facts.block_size * values.get("kv_bytes_per_token", CostProfile().kv_bytes_per_token)
    )
    profile = CostProfile(name=f"{facts.model}, calibrated", **(values | kv.values))
    measured = [
        Measured(url, sample, seconds)
        for url, predicted in zip(samples, fitted.predicted, strict=True)
        for sample, seconds in zip(samples[url], predicted, strict=True)
    ]
    return Calibration(profile, fitted.error, measured, kv.seen, notes)
