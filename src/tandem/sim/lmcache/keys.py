"""Names of chunks of KV: a hash over the prompt up to the chunk's end, and the request's tags.

A key goes over the wire as text, and the other side reads it back from there: what the text cannot say
is lost, as with the real one.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any
from uuid import uuid4

_TAG = "lmcache.tag."
_DTYPE = "bfloat16"

Tags = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Key:
    base: str
    """`model@ranks@rank@hash@dtype`."""
    tags: Tags = ()

    def __str__(self) -> str:
        return "@".join([self.base, *(f"{name}%{value}" for name, value in self.tags)])


def parse(text: str) -> Key:
    """Raises ValueError: an "@" in a model's name or in a tag is more than the format can hold."""
    parts = text.split("@")
    tags = [tuple(part.split("%", 1)) for part in parts[5:]]
    if len(parts) < 5 or any(len(tag) != 2 for tag in tags) or not parts[1].isdigit():
        raise ValueError(f"Invalid key string: {text}")
    return Key("@".join(parts[:5]), tuple((name, value) for name, value in tags))


def tags_of(kv_params: Mapping[str, Any] | None) -> Tags:
    """In the order in which they stand in the request, which counts."""
    return tuple((k.removeprefix(_TAG), v) for k, v in (kv_params or {}).items() if k.startswith(_TAG))


class Keys:
    """Makes the keys of one engine's requests. Only engines with the same model name, ranks, chunk size and
    seed make the same ones."""

    def __init__(self, model: str, *, ranks: int, chunk_size: int, seed: str | None) -> None:
        self.chunk_size = chunk_size
        self._scope = f"{model}@{ranks}@0"
        self._root = uuid4().bytes if seed is None else seed.encode()

    def of(self, tokens: Sequence[int], tags: Tags = ()) -> list[Key]:
        """One for each chunk of `tokens`; the last chunk may be a partial one."""
        keys, prefix = [], self._root
        for start in range(0, len(tokens), self.chunk_size):
            chunk = array("I", tokens[start : start + self.chunk_size]).tobytes()
            prefix = blake2b(prefix + chunk, digest_size=8).digest()
            keys.append(Key(f"{self._scope}@{prefix.hex()}@{_DTYPE}", tags))
        return keys
