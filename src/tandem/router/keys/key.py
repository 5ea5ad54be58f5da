"""What is known of one API key. The key itself is not: only a hash of it is kept.

Keys are made by `tandem keys new`: 256 random bits. The hash is SHA-256, unsalted and fast, and that is
enough for them: passwords need salt and slow hashes because they can be guessed, and a random key cannot. So
each request costs one hash and one look-up.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass, field

LONGEST = 512
"""Bytes of a key: what is longer is none, and is not hashed."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_PREFIX = "sk-tandem-"  # what clients and scanners for secrets expect of a key


@dataclass(frozen=True, slots=True)
class Limits:
    """What one key may use. None: as much as it likes."""

    requests_per_second: float | None = None
    burst: int | None = None
    """Requests that may come at once, where those in a second are limited."""
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None


@dataclass(frozen=True, slots=True)
class ApiKey:
    name: str
    """What it is called in the file, in metrics and in the log."""
    digest: bytes = field(repr=False)
    """SHA-256 of the key."""
    limits: Limits = Limits()
    cache_salt: str | None = field(default=None, repr=False)
    """Engines share cached KV only between requests of the same salt. None: what the client says counts."""
    models: frozenset[str] | None = None
    """The names of models that it may use; None: all."""


def name_mistake(name: str) -> str | None:
    """What a name must be, where a text is none."""
    if not _NAME.fullmatch(name):
        return "is not 1 to 63 letters, digits, '.', '_' and '-', the first of them a letter or digit"
    if name.startswith("sk-"):
        return "begins as keys do; it is shown in metrics and in the log, so it must not be one"
    return None


def digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def new_key() -> str:
    return _PREFIX + secrets.token_urlsafe(32)


def new_salt() -> str:
    return secrets.token_urlsafe(24)
