"""From measured times to a cost profile's coefficients, by nonnegative least squares.

Each time is a sum of the coefficients, each so many times; how many times, the cost model itself says
(`CostProfile.step_seconds` of profiles that have one coefficient only), so the fit cannot disagree with it.
Errors count relative to the time: 5 % of a decode step weigh as much as 5 % of a long prefill.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tandem.sim.cost import CostProfile

COEFFICIENTS = (
    "request",
    "step",
    "prefill_token",
    "prefill_attention",
    "decode_sequence",
    "decode_context",
)
"""The fields of CostProfile that a fit finds, in seconds."""

_NOTHING: dict[str, Any] = dict.fromkeys(COEFFICIENTS, 0.0)
_UNITS = [CostProfile(**{**_NOTHING, name: 1.0}) for name in COEFFICIENTS]

# Powers of two, as people set them, from what only a test would use to more than any engine's default.
BUDGETS = tuple(1 << k for k in range(4, 18))


class Kind(StrEnum):
    """What a sample's time is of."""

    PREFILL = "prefill"
    """A prompt alone on the engine: from sending it to its first token."""
    DECODE = "decode"
    """Streams only: one step."""
    MIXED = "mixed"
    """A prompt beside running streams: from sending it, just when a token of theirs came, to its first
    token."""
    STALL = "stall"
    """The longest step that a stream sees while a prompt is computed beside it."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The median of a measurement. `context`: tokens that each of `streams` streams has behind it."""

    kind: Kind
    seconds: float
    tokens: int = 0
    streams: int = 0
    context: float = 0.0


def counts(sample: Sample, budget: int) -> list[float]:
    """How often each of COEFFICIENTS is in a sample's time, on an engine that computes `budget` tokens a step
    (`--max-num-batched-tokens`)."""
    contexts = [sample.context] * sample.streams
    decode = _step([], contexts)
    if sample.kind is Kind.DECODE:
        return decode
    steps = [_step([chunk], contexts) for chunk in _chunks(sample.tokens, budget - sample.streams)]
    if sample.kind is Kind.STALL:
        return max(steps, key=lambda step: step[COEFFICIENTS.index("prefill_attention")])
    if sample.kind is Kind.MIXED:
        # Sent as a token of the streams came: the step that has begun comes first, and hides `request`.
        steps.append(decode)
    total = [sum(column) for column in zip(*steps, strict=True)]
    if sample.kind is Kind.PREFILL:
        total[COEFFICIENTS.index("request")] = 1.0
    return total


def _step(chunks: Sequence[tuple[int, int]], contexts: Sequence[float]) -> list[float]:
    return [unit.step_seconds(chunks, contexts) for unit in _UNITS]


def _chunks(tokens: int, budget: int) -> list[tuple[int, int]]:
    size = max(1, budget)
    return [(min(size, tokens - start), start) for start in range(0, tokens, size)]


@dataclass(frozen=True)
class Fit:
    """`budgets`: for each engine, the step budget that explains its samples best, None where none of its
    prompts was cut. `predicted`: seconds for each sample."""

    coefficients: dict[str, float]
    budgets: list[int | None]
    predicted: list[list[float]]
    error: float
    """Root mean square of the relative errors."""


def fit(engines: Sequence[Sequence[Sample]], budgets: Sequence[int | None]) -> Fit:
    """Fit the samples of engines of one kind together. `budgets`: what is known of each engine's step budget;
    None: try which explains its samples best."""
    best: Fit | None = None
    choices = [
        [known] if known is not None else _possible(samples)
        for samples, known in zip(engines, budgets, strict=True)
    ]
    for chosen in itertools.product(*choices):
        rows = [[counts(s, budget) for s in samples] for samples, budget in zip(engines, chosen, strict=True)]
        flat = [
            (row, s.seconds)
            for r, samples in zip(rows, engines, strict=True)
            for row, s in zip(r, samples, strict=True)
        ]
        solution = nonnegative_least_squares(
            [[value / seconds for value in row] for row, seconds in flat], [1.0] * len(flat)
        )
        predicted = [[_dot(row, solution) for row in r] for r in rows]
        errors = [
            p / s.seconds - 1
            for ps, ss in zip(predicted, engines, strict=True)
            for p, s in zip(ps, ss, strict=True)
        ]
        error = math.sqrt(sum(e * e for e in errors) / len(errors))
        if best is None or error < best.error:
            uncut = [b if b < _longest(samples) else None for b, samples in zip(chosen, engines, strict=True)]
            best = Fit(dict(zip(COEFFICIENTS, solution, strict=True)), uncut, predicted, error)
    assert best is not None
    return best


def _longest(samples: Sequence[Sample]) -> int:
    """Tokens of the largest step that would cut nothing."""
    return max((s.tokens + s.streams for s in samples), default=0)


def _possible(samples: Sequence[Sample]) -> list[int]:
    """Budgets that could be told apart, with one that cuts nothing; above the streams of any sample."""
    longest, streams = _longest(samples), max((s.streams for s in samples), default=0)
    cutting = [b for b in BUDGETS if streams < b < longest]
    return [*cutting, max(longest, 1)]


def nonnegative_least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """The x ≥ 0 that minimizes |rows·x - values|². For a handful of unknowns: every set of them is tried.

    The minimum is the unconstrained one over those of its components that are not zero, so the best
    nonnegative solution over all sets is it.
    """
    width = len(rows[0])
    scale = [math.sqrt(sum(row[j] ** 2 for row in rows)) or 1.0 for j in range(width)]
    scaled = [[row[j] / scale[j] for j in range(width)] for row in rows]
    gram = [[sum(row[i] * row[j] for row in scaled) for j in range(width)] for i in range(width)]
    right = [sum(row[i] * value for row, value in zip(scaled, values, strict=True)) for i in range(width)]
    best, least = [0.0] * width, 0.0
    for size in range(1, width + 1):
        for chosen in itertools.combinations(range(width), size):
            part = _solve([[gram[i][j] for j in chosen] for i in chosen], [right[i] for i in chosen])
            if part is None or min(part) < 0:
                continue
            # |Ax - b|² less |b|², at the minimum over the chosen ones.
            loss = -sum(x * right[i] for x, i in zip(part, chosen, strict=True))
            if loss < least:
                least, best = loss, [0.0] * width
                for x, i in zip(part, chosen, strict=True):
                    best[i] = x / scale[i]
    return best


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Gauss with pivots; None where the unknowns cannot be told apart. The diagonal is of ones and zeros."""
    size = len(right)
    table = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for k in range(size):
        pivot = max(range(k, size), key=lambda i: abs(table[i][k]))
        if abs(table[pivot][k]) < 1e-9:
            return None
        table[k], table[pivot] = table[pivot], table[k]
        for i in range(k + 1, size):
            factor = table[i][k] / table[k][k]
            for j in range(k, size + 1):
                table[i][j] -= factor * table[k][j]
    solution = [0.0] * size
    for k in reversed(range(size)):
        known = sum(table[k][j] * solution[j] for j in range(k + 1, size))
        solution[k] = (table[k][size] - known) / table[k][k]
    return solution


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))
