"""Calibration: what it finds of simulated engines is the profile that they run with."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.bench.calibrate import Calibration, calibrate
from tandem.bench.calibrate_engine import CalibrationError
from tandem.bench.calibrate_fit import (
    COEFFICIENTS,
    Kind,
    Sample,
    counts,
    fit,
    nonnegative_least_squares,
)
from tandem.bench.load import LoadError, Unreachable
from tandem.http import Request, Responder, serve
from tandem.sim import CostProfile, EngineSpec, Fleet, parse, virtual

from ..sim.helpers import engines, flags, in_virtual_time, pair

CPU = CostProfile(
    request=0.004,
    step=0.05,
    prefill_token=0.001,
    prefill_attention=1.2e-6,
    decode_sequence=0.0015,
    decode_context=4e-6,
    kv_bytes_per_token=12_288,
    kv_bandwidth=1e9,
    kv_latency=0.005,
    kv_handshake=0.25,
)
GPU = replace(
    CPU,
    request=0.003,
    step=0.008,
    prefill_token=5e-5,
    prefill_attention=2e-9,
    decode_sequence=2e-5,
    decode_context=6e-9,
)


def found(calibration: Calibration) -> dict[str, float]:
    return {name: getattr(calibration.profile, name) for name in COEFFICIENTS}


def known(profile: CostProfile) -> dict[str, float]:
    return {name: getattr(profile, name) for name in COEFFICIENTS}


async def measured(*lines: list[str], profile: CostProfile = CPU, **options: Any) -> Calibration:
    """Of an engine with these flags, or of a pair."""
    specs = [EngineSpec(parse(line)) for line in lines]
    async with Fleet(specs, profile=profile, environment={}) as fleet:
        if len(specs) == 1:
            return await calibrate(fleet.urls[0], seed=1, **options)
        return await calibrate(prefill=fleet.urls[0], decode=fleet.urls[1], seed=1, **options)


BIG = ["--model", "m", "--max-model-len", "16384", "--num-gpu-blocks-override", "4096", "--block-size", "16"]


@pytest.mark.parametrize("profile", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("budget", [256, 2048])
def test_it_finds_the_profile_of_an_engine(profile: CostProfile, budget: int) -> None:
    line = [*BIG, "--max-num-batched-tokens", str(budget)]
    calibration = virtual.run(measured(line, profile=profile))
    assert found(calibration) == pytest.approx(known(profile), rel=0.02)
    assert calibration.error < 0.005
    assert calibration.profile.block_size == 16
    cut = max(m.sample.tokens + m.sample.streams for m in calibration.measured) > budget
    assert calibration.profile.max_num_batched_tokens == (budget if cut else 2048)
    assert any("max_num_batched_tokens is a guess" in note for note in calibration.notes) is not cut


def test_it_finds_the_profile_of_a_pair_and_how_its_kv_crosses() -> None:
    prefill, decode = pair("--num-gpu-blocks-override", "600", "--max-num-batched-tokens", "512")
    calibration = virtual.run(measured(prefill, decode))
    assert found(calibration) == pytest.approx(known(CPU), rel=0.02)
    p = calibration.profile
    assert p.kv_bytes_per_token == CPU.kv_bytes_per_token
    assert p.kv_bandwidth == pytest.approx(CPU.kv_bandwidth, rel=0.01)
    assert p.kv_latency == pytest.approx(CPU.kv_latency, rel=0.01)
    assert p.kv_handshake == pytest.approx(CPU.kv_handshake, rel=0.05)
    assert p.max_num_batched_tokens == 512
    assert p.kv_cache_bytes == 600 * 16 * CPU.kv_bytes_per_token


@in_virtual_time
async def test_simulated_engines_with_the_profile_found_measure_the_same() -> None:
    first = await measured([*BIG, "--max-num-batched-tokens", "512"])
    again = await measured(BIG, profile=first.profile)
    assert found(again) == pytest.approx(found(first), rel=0.02)
    assert again.profile.max_num_batched_tokens == 512


@in_virtual_time
async def test_a_step_budget_that_is_told_is_taken() -> None:
    calibration = await measured([*BIG, "--max-num-batched-tokens", "600"], budget=600)
    assert calibration.profile.max_num_batched_tokens == 600
    assert found(calibration) == pytest.approx(known(CPU), rel=0.02)


@in_virtual_time
async def test_an_engine_that_runs_few_requests_together_is_measured_with_few() -> None:
    calibration = await measured([*BIG, "--max-num-seqs", "2", "--max-num-batched-tokens", "512"])
    assert max(m.sample.streams for m in calibration.measured) == 2
    assert found(calibration) == pytest.approx(known(CPU), rel=0.05)


@in_virtual_time
async def test_cached_prefixes_do_no_harm_and_nothing_is_left_on_the_engine() -> None:
    async with engines(flags("--num-gpu-blocks-override", "600"), profile=CPU) as e:
        first = await calibrate(e.fleet.urls[0])
        second = await calibrate(e.fleet.urls[0])
        assert found(second) == pytest.approx(found(first), rel=0.01)
        assert e.idle(0)


@in_virtual_time
async def test_a_pair_that_has_met_does_not_show_its_handshake() -> None:
    async with engines(*pair("--num-gpu-blocks-override", "600"), profile=CPU) as e:
        urls = dict(zip(("prefill", "decode"), e.fleet.urls, strict=True))
        await calibrate(**urls)
        again = await calibrate(**urls)
        assert again.profile.kv_handshake == CostProfile().kv_handshake
        assert any("kv_handshake is the default's" in note for note in again.notes)
        assert all(e.idle(i) for i in (0, 1))


@in_virtual_time
async def test_its_result_as_data_has_every_sample_with_its_error() -> None:
    told: list[str] = []
    data = (await measured(flags("--num-gpu-blocks-override", "600"), on_step=told.append)).as_dict()
    assert data["coefficients"].keys() == set(COEFFICIENTS)
    assert {s["kind"] for s in data["samples"]} == {"prefill", "decode", "mixed", "stall"}
    for sample in data["samples"]:
        assert sample["predicted"] == pytest.approx(sample["seconds"] * (1 + sample["error"]))
    assert any("a prompt of 512 tokens" in step for step in told)


# What keeps it from measuring


async def fails(*lines: list[str], **options: Any) -> str:
    with pytest.raises((CalibrationError, LoadError)) as error:
        await measured(*lines, **options)
    return str(error.value)


@in_virtual_time
async def test_a_model_that_is_not_served_is_told() -> None:
    assert "does not serve other; it serves m" in await fails(flags(), model="other")


@in_virtual_time
async def test_engines_that_hand_nothing_over_are_told() -> None:
    assert "has no kv_transfer_params" in await fails(flags(), flags())


@in_virtual_time
async def test_a_context_too_short_to_measure_is_told() -> None:
    line = ["--model", "m", "--max-model-len", "256", "--block-size", "16"]
    assert "takes prompts of 255 tokens; 512 are needed" in await fails(line)


async def test_nobody_at_the_address_is_told() -> None:
    with pytest.raises(Unreachable, match=r"http://127\.0\.0\.1:9"):
        await calibrate("http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("models", "said"),
    [
        (b'{"data": [{"id": "m"}]}', "has no vllm:cache_config_info"),
        (b'{"data": []}', "does not serve any model"),
        (b"<html>", "is no OpenAI server"),
    ],
)
async def test_what_is_no_engine_is_told(models: bytes, said: str) -> None:
    async def handler(request: Request, responder: Responder) -> None:
        responder.start(200, [])
        responder.write(models if request.target == b"/v1/models" else b"up 1\n")
        responder.finish()

    server = await serve(handler, "127.0.0.1", 0)
    try:
        with pytest.raises(CalibrationError, match=said):
            await calibrate(f"http://127.0.0.1:{server.port}")
    finally:
        await server.close()


# The fit

positive = st.floats(0.01, 10)


@st.composite
def systems(draw: st.DrawFn) -> tuple[list[list[float]], list[float]]:
    width = draw(st.integers(1, 4))
    rows = draw(st.lists(st.lists(positive, min_size=width, max_size=width), min_size=width, max_size=8))
    return rows, draw(st.lists(st.floats(-10, 10), min_size=len(rows), max_size=len(rows)))


def loss(rows: list[list[float]], x: list[float], values: list[float]) -> float:
    return sum(
        (sum(a * b for a, b in zip(row, x, strict=True)) - v) ** 2
        for row, v in zip(rows, values, strict=True)
    )


@given(systems())
@settings(max_examples=150, deadline=None)
def test_no_nonnegative_neighbour_fits_better(system: tuple[list[list[float]], list[float]]) -> None:
    rows, values = system
    x = nonnegative_least_squares(rows, values)
    assert min(x) >= 0
    least = loss(rows, x, values)
    for signs in itertools.product((-1e-3, 0, 1e-3), repeat=len(x)):
        neighbour = [max(0.0, a + s) for a, s in zip(x, signs, strict=True)]
        assert loss(rows, neighbour, values) >= least - 1e-6 * (1 + least)


SAMPLES = [
    *(Sample(Kind.PREFILL, 1.0, n) for n in (16, 64, 256, 1024, 4096)),
    *(Sample(Kind.DECODE, 1.0, 0, s, c) for s in (1, 4, 16) for c in (16.0, 512.0)),
    *(Sample(kind, 1.0, 2048, 4, 20.0) for kind in (Kind.MIXED, Kind.STALL)),
]


def timed_by(profile: CostProfile, budget: int, noise: float = 0.0) -> list[Sample]:
    """The samples with the seconds that an engine with this profile takes."""
    rng = random.Random(1)
    coefficients = list(known(profile).values())
    return [
        replace(
            s,
            seconds=sum(a * b for a, b in zip(counts(s, budget), coefficients, strict=True))
            * (1 + rng.uniform(-noise, noise)),
        )
        for s in SAMPLES
    ]


@given(
    st.fixed_dictionaries(
        {
            "request": st.floats(0, 0.01),
            "step": st.floats(0.002, 0.1),
            "prefill_token": st.floats(1e-5, 2e-3),
            "prefill_attention": st.floats(1e-9, 1e-6),
            "decode_sequence": st.floats(1e-5, 2e-3),
            "decode_context": st.floats(1e-8, 1e-5),
        }
    ),
    st.sampled_from([256, 512, 1024]),
)
@settings(max_examples=40, deadline=None)
def test_times_without_noise_give_the_coefficients_back(values: dict[str, Any], budget: int) -> None:
    profile = CostProfile(**values)
    samples = timed_by(profile, budget)
    fitted = fit([samples], [budget])
    assert fitted.error < 1e-6
    for predicted, sample in zip(fitted.predicted[0], samples, strict=True):
        assert predicted == pytest.approx(sample.seconds, rel=1e-5)
    assert fitted.coefficients["step"] == pytest.approx(profile.step, rel=1e-3)
    assert fitted.coefficients["prefill_token"] == pytest.approx(profile.prefill_token, rel=1e-3)


@pytest.mark.parametrize("budget", [256, 512, 1024])
def test_a_noise_of_five_percent_hides_neither_the_budget_nor_the_times(budget: int) -> None:
    fitted = fit([timed_by(CPU, budget, noise=0.05)], [None])
    assert fitted.budgets == [budget]
    for predicted, true in zip(fitted.predicted[0], timed_by(CPU, budget), strict=True):
        assert predicted == pytest.approx(true.seconds, rel=0.06)


def test_a_budget_that_cut_no_prompt_is_not_made_up() -> None:
    assert fit([timed_by(CPU, 8192)], [None]).budgets == [None]


def test_engines_of_one_kind_are_fitted_together_each_with_its_budget() -> None:
    fitted = fit([timed_by(CPU, 1024), timed_by(CPU, 256)], [None, None])
    assert fitted.budgets == [1024, 256]
    assert fitted.coefficients == pytest.approx(known(CPU), rel=1e-3)


def test_a_samples_time_is_the_cost_models() -> None:
    """A prompt of 600 tokens in chunks of 250, beside two streams of 100 tokens."""
    coefficients = list(known(CPU).values())

    def seconds(kind: Kind) -> float:
        row = counts(Sample(kind, 1.0, 600, 2, 100), 252)
        return sum(a * b for a, b in zip(row, coefficients, strict=True))

    chunks = [CPU.step_seconds([c], [100, 100]) for c in ((250, 0), (250, 250), (100, 500))]
    waited = CPU.step_seconds([], [100, 100])
    assert seconds(Kind.DECODE) == pytest.approx(waited)
    assert seconds(Kind.MIXED) == pytest.approx(sum(chunks) + waited)
    assert seconds(Kind.STALL) == pytest.approx(chunks[1])
