"""Copies of KV between vLLM's cache on CPU and the chunks in which LMCache keeps and sends it.

vLLM's CPU attention keeps a layer as [blocks, KV heads, block size, 2 × head size], and lets each block of
each head hold its keys first and then its values, in an order of its own that depends on the processor (keys
are transposed for AVX-512, and in tiles for AMX). That order is learnt here from vLLM's own write operation,
so a chunk is plain [2, layers, tokens, KV heads × head size] whatever the engines' processors are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Writes keys and values [tokens, KV heads, head size] into a layer's keys and values, at slots."""

_BASE = 256
"""Whole numbers below it are exact in every floating-point type that caches have."""


def learnt_order(
    write: Write, dtype: torch.dtype, block_size: int, head_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where `write` puts the elements of one head of a block: for keys and for values, positions [block size,
    head size] among the head's keys or values. Raises ValueError when it does anything but move them."""
    elements = block_size * head_size
    numbers = torch.arange(elements)
    seen = [torch.zeros(elements, dtype=torch.long) for _ in range(2)]
    weight = 1
    while weight < elements:  # one digit of each element's number at a time
        digits = (numbers // weight % _BASE).to(dtype).view(block_size, 1, head_size)
        cache = torch.zeros(1, 1, 2 * block_size, head_size, dtype=dtype)
        areas = cache.chunk(2, dim=2)
        write(digits, digits.clone(), areas[0], areas[1], torch.arange(block_size))
        for area, found in zip(areas, seen, strict=True):
            found += weight * area.reshape(-1).long()
        weight *= _BASE
    if not all(torch.equal(found.sort().values, numbers) for found in seen):
        raise ValueError("vLLM's KV cache on this processor is no permutation of keys and values")
    keys, values = (found.argsort().view(block_size, head_size) for found in seen)
    return keys, values


class KvCopies:
    """Of all layers of a cache, for tokens at slots (block × block size + position in the block)."""

    def __init__(
        self, caches: Sequence[torch.Tensor], order: Callable[[torch.dtype, int, int], Any], heads: int
    ) -> None:
        """`caches`: one tensor a layer. `order`: `learnt_order` by type, block size and head size. `heads`:
        KV heads of this rank. Raises ValueError for caches of another form."""
        first = caches[0]
        alike = all(c.shape == first.shape and c.dtype == first.dtype and c.is_contiguous() for c in caches)
        if not alike or first.dim() != 4 or first.shape[1] != heads or first.shape[3] % 2:
            shapes = ", ".join(sorted({f"{list(c.shape)} {c.dtype}" for c in caches}))
            raise ValueError(
                f"the layers of the KV cache are {shapes}; known are only layers that are alike, of "
                f"[blocks, {heads}, block size, 2 × head size]"
            )
        self._layers = [cache.view(-1) for cache in caches]
        _, _, self._block_size, both = first.shape
        head_size = both // 2
        area = self._block_size * head_size
        self._block = heads * 2 * area
        starts = torch.arange(heads).view(1, -1, 1) * 2 * area
        orders = order(first.dtype, self._block_size, head_size)
        in_block = [o.view(-1, 1, head_size) + starts + kind * area for kind, o in enumerate(orders)]
        self._of_token = [each.reshape(self._block_size, -1) for each in in_block]
        """Of keys, and of values: the elements of each token of a block, counted from the block's first."""

    def gather(self, chunk: torch.Tensor, slots: torch.Tensor) -> None:
        """Fill a chunk [2, layers, tokens, KV heads × head size] with the KV of the tokens at `slots`."""
        for kind, elements in enumerate(self._elements(slots)):
            for layer, cache in enumerate(self._layers):
                torch.index_select(cache, 0, elements, out=chunk[kind, layer].view(-1))

    def scatter(self, chunk: torch.Tensor, slots: torch.Tensor) -> None:
        """Write a chunk's KV to `slots`, and nothing else of the cache."""
        for kind, elements in enumerate(self._elements(slots)):
            for layer, cache in enumerate(self._layers):
                cache.index_copy_(0, elements, chunk[kind, layer].reshape(-1))

    def _elements(self, slots: torch.Tensor) -> list[torch.Tensor]:
        starts = (slots // self._block_size * self._block).view(-1, 1)
        within = slots % self._block_size
        return [(starts + of_token[within]).view(-1) for of_token in self._of_token]
