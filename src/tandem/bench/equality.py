"""When two greedy answers count as the same: equal token for token, or parted only at a tie."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TIE_GAP = 0.375
"""Largest gap (natural log) between the two likeliest tokens that counts as a tie in bfloat16.

bfloat16 keeps 8 significant bits, so logits between 16 and 32 lie on a grid of 0.125. Computed in other
batch shapes, as a whole prompt in one step and in steps of 48 tokens, the difference of two logits can come
out three steps off: of 18 proofs with SmolLM2-135M 8 had a first difference, the largest of 0.312.
"""

_ROUNDING = 1e-4
"""Log probabilities are told in float32: a difference of just two steps may come out a little larger."""


@dataclass(frozen=True)
class Comparison:
    """`first_difference` is an index into the answers, or None when they are equal."""

    equal: bool
    first_difference: int | None
    gap: float | None
    """At the first difference: how much less likely (natural log) the answer's token was to the reference
    than its own; None where one of the answers has ended."""

    @property
    def acceptable(self) -> bool:
        return self.equal or (self.gap is not None and self.gap <= TIE_GAP + _ROUNDING)

    def __str__(self) -> str:
        if self.equal:
            return "equal, token for token"
        if self.gap is None:
            return f"differ from token {self.first_difference} (one answer is shorter)"
        kind = "a tie in bfloat16" if self.acceptable else "no tie"
        return f"differ from token {self.first_difference}, where the two are {self.gap:.3f} apart: {kind}"


def compare(
    answer: Sequence[int], reference: Sequence[int], likely: Sequence[Mapping[int, float]]
) -> Comparison:
    """Compare two greedy answers' token ids by the tie rule.

    `likely` has, for each token of the reference, its likeliest token ids with their log probabilities.
    Only the first difference is judged: after a tie the texts go their own ways.
    """
    if list(answer) == list(reference):
        return Comparison(True, None, None)
    shorter = min(len(answer), len(reference))
    index = next((i for i in range(shorter) if answer[i] != reference[i]), shorter)
    if index == shorter:
        return Comparison(False, index, None)
    here = likely[index] if index < len(likely) else {}
    unlikely = -math.inf  # not even among those told
    gap = here.get(reference[index], math.inf) - here.get(answer[index], unlikely)
    return Comparison(False, index, gap)
