"""Deterministic answers: every token follows from all tokens before it, as from a model at temperature 0.

So a disaggregated answer equals the same engine's alone, and a prompt that ends with the first tokens of its
answer is continued. A request whose KV is another prompt's (`foreign`) gets another answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True, slots=True)
class Style:
    """What answers are made of."""

    words: Sequence[int]
    """Token ids to choose from; each decodes to whole characters."""
    eos: int
    length: tuple[int, int] = (32, 71)
    """Tokens of an answer that nothing cuts short, end-of-sequence not counted: from, to."""


class Answer:
    """One answer, token by token. Endless: what comes after end-of-sequence is for `ignore_eos`."""

    __slots__ = ("_digest", "_left", "_style")

    def __init__(
        self,
        style: Style,
        tokens: Sequence[int],
        *,
        variant: bytes = b"",
        foreign: bytes = b"",
        at_least: int = 0,
    ) -> None:
        """`tokens`: the prompt. `variant`: of choices and seeds. `foreign`: see `blocks.foreign_kv`.
        `at_least`: tokens before end-of-sequence."""
        digest = blake2b(variant + b"\0" + foreign, digest_size=8)
        digest.update(array("I", tokens).tobytes())
        low, high = style.length
        self._left = max(at_least, low + int.from_bytes(digest.digest()) % (high - low + 1))
        self._digest = digest
        self._style = style

    def next_token(self) -> int:
        if self._left == 0:
            self._left = -1
            return self._style.eos
        self._left -= 1
        words = self._style.words
        token = words[int.from_bytes(self._digest.digest()) % len(words)]
        self._digest.update(token.to_bytes(4, "little"))
        return token


def likelihoods(tokens: Sequence[int], words: Sequence[int], count: int) -> list[tuple[int, float]]:
    """Log probabilities of the last of `tokens` and, falling, of `count` - 1 other tokens. Deterministic."""
    digest = blake2b(array("I", tokens[-8:]).tobytes(), digest_size=8).digest()
    seed = int.from_bytes(digest)
    best = -0.01 - (seed % 997) / 1000
    likely = [(tokens[-1], best)]
    i = 0
    while len(likely) < count and i < len(words):
        other = words[(seed + i) % len(words)]
        i += 1
        if other != tokens[-1]:
            likely.append((other, best - 0.5 - 0.75 * len(likely)))
    return likely
