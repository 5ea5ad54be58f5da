"""LMCache's receive buffer on a decoder: how large, and what fits into it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import ceil

from tandem.engine.kv_size import TokenSize

VARIABLE = "PD_BUFFER_SIZE"
"""The environment variable with its size, in bytes on each tensor-parallel rank."""

CHUNK_TOKENS = 256
"""Of an LMCache chunk: the unit in which KV is sent and buffers are filled."""

_GIB = 1 << 30
_CHOICES = (8 * _GIB, 16 * _GIB, 32 * _GIB)


@dataclass(frozen=True)
class PdBuffer:
    bytes: int
    chunks: int
    """Whole chunks of KV that fit."""
    reason: str

    def complaint(self, longest: int | None) -> str | None:
        """What is wrong with its size where the longest prompt has so many tokens (None: is not known)."""
        needed = ceil((longest or 0) / CHUNK_TOKENS)
        if needed <= self.chunks:
            return None
        return (
            f"holds {self.chunks:,} chunks of {CHUNK_TOKENS} tokens and the longest prompt takes {needed:,}: "
            "prompts beyond the buffer are computed by decoders alone"
        )


def given_bytes(text: str) -> int:
    """The variable's value. Raises ValueError for what is no size."""
    if not re.fullmatch(r"[0-9]{1,18}", text, re.ASCII) or not int(text):
        raise ValueError(f"must be a number of bytes in digits, as 8589934592 (it is {text!r})")
    return int(text)


def pd_buffer(
    token: TokenSize, *, longest: int | None, given: int | None, room: int | None = None
) -> PdBuffer:
    """`given` bytes, or what holds four prompts of `longest` tokens: the smallest of 8, 16 and 32 GiB; of
    `room` bytes, where that is all there is, as many as that takes.

    Raises ValueError where it does not hold one chunk.
    """
    chunk = token.bytes * CHUNK_TOKENS
    per_prompt = ceil((longest or CHUNK_TOKENS) / CHUNK_TOKENS) * chunk
    if given:
        size = given
    elif room is None:
        size = next((c for c in _CHOICES if c >= 4 * per_prompt), _CHOICES[-1])
    else:
        size = min(4 * per_prompt, room // chunk * chunk)
    chunks = size // chunk
    takes = f"KV takes {token.bytes:,} bytes a token and rank ({token.source})"
    if chunks < 1:
        raise ValueError(f"{size:,} bytes do not hold one chunk of {CHUNK_TOKENS} tokens: {takes}")
    why = "as the resource says" if given else "computed"
    at_once = f": {size / per_prompt:.1f} prompts of {longest:,} tokens at once" if longest else ""
    reason = (
        f"{VARIABLE}: {size:,} bytes a rank, {why}. {takes}, so {chunks:,} chunks of {CHUNK_TOKENS} tokens "
        f"fit{at_once}"
    )
    return PdBuffer(size, chunks, reason)
