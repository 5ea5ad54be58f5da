"""When two greedy answers count as the same: equal token for token, or parted only at a tie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TIE_GAP = 0.25
"""Largest gap (natural log) between the two likeliest tokens that counts as a tie in bfloat16.

bfloat16 keeps 8 significant bits, so logits between 16 and 32 lie on a grid of 0.125. Computed in other
batch shapes, each of two logits can come out one step off, and so their difference two.
"""


@dataclass(frozen=True)
class Comparison:
    """`first_difference` is an index into the answers, or None when they are equal."""

    equal: bool
    first_difference: int | None
    gap: float | None
    """At the first difference, the reference's gap between its two likeliest tokens."""

    @property
    def acceptable(self) -> bool:
        return self.equal or (self.gap is not None and self.gap <= TIE_GAP)

    def __str__(self) -> str:
        if self.equal:
            return "equal, token for token"
        if self.gap is None:
            return f"differ from token {self.first_difference} (one answer is shorter)"
        kind = "a tie in bfloat16" if self.acceptable else "no tie"
        return (
            f"differ from token {self.first_difference}, where the top two are {self.gap:.3f} apart: {kind}"
        )


def compare(answer: Sequence[int], reference: Sequence[int], reference_gaps: Sequence[float]) -> Comparison:
    """Compare two greedy answers' token ids by the tie rule. Only the first difference is judged: after
    a tie the texts go their own ways."""
    if list(answer) == list(reference):
        return Comparison(True, None, None)
    index = next(
        (i for i, (a, b) in enumerate(zip(answer, reference, strict=False)) if a != b),
        min(len(answer), len(reference)),
    )
    gap = reference_gaps[index] if index < min(len(answer), len(reference), len(reference_gaps)) else None
    return Comparison(False, index, gap)
