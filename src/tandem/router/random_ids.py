"""Random text for ids that nobody may guess, from the system's source: asked for many at a time, as each
question is a system call."""

from __future__ import annotations

import os

_POOL_BYTES = 4096
_pool = b""
_at = 0


def random_hex(size: int) -> str:
    """So many random bytes, as twice as many hexadecimal digits; never the same ones again."""
    global _pool, _at
    if _at + size > len(_pool):
        _pool, _at = os.urandom(max(_POOL_BYTES, size)), 0
    begin, _at = _at, _at + size
    return _pool[begin:_at].hex()
