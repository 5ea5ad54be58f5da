"""A list of API keys as text (see `listing`). What is said of mistakes repeats neither hashes nor salts:
somebody may have put a key in their place."""

from __future__ import annotations

import math
import re
from typing import Any

from tandem.router.keys.key import ApiKey, Limits, name_mistake
from tandem.router.listing import Mistake, Node, decoded, each, items, mapping, sequence, text_of

KEYS_LIMIT = 1000
"""Keys that one list may have."""
SIZE_LIMIT = 1 << 20
"""Bytes of a file."""
MODELS_LIMIT = 100
"""Models that one key may name."""

_FIELDS = ("requestsPerSecond", "burst", "tokensPerMinute", "concurrentRequests", "cacheSalt", "models")
_HASH = re.compile(r"[0-9A-Fa-f]{64}")
_SALT = re.compile(r"[^@/\\\0]{1,128}")  # as vLLM has it
_WHOLE = re.compile(r"[0-9]{1,13}")
_NUMBER = re.compile(r"[0-9]{1,13}(\.[0-9]{1,13})?")
_LEAST_RATE = 0.001
_MOST_REQUESTS = 1_000_000
_MOST_TOKENS = 10**12


def read_keys(content: bytes) -> tuple[ApiKey, ...]:
    """The keys of a file, in their order. Raises BadList."""
    nodes = items(decoded(content), "keys", KEYS_LIMIT)
    names: dict[str, int] = {}
    digests: dict[bytes, int] = {}

    def read(i: int, node: Node) -> ApiKey:
        path = f"keys[{i}]"
        key = _key(node, path)
        if (first := names.setdefault(key.name, i)) != i:
            raise Mistake(node, f"{path}.name", f"{key.name} is that of keys[{first}] already")
        if (first := digests.setdefault(key.digest, i)) != i:
            raise Mistake(node, f"{path}.sha256", f"is that of keys[{first}] already: one key has one entry")
        return key

    return tuple(each(nodes, read))


def entry(key: ApiKey) -> dict[str, Any]:
    """What stands in a file for a key without limits."""
    salt = {} if key.cache_salt is None else {"cacheSalt": key.cache_salt}
    return {"name": key.name, "sha256": key.digest.hex(), **salt}


def _key(node: Node, path: str) -> ApiKey:
    fields = mapping(node, path, ("name", "sha256"), _FIELDS)
    name = text_of(fields["name"], f"{path}.name")
    if (mistake := name_mistake(name)) is not None:
        raise Mistake(fields["name"], f"{path}.name", mistake)
    digest = text_of(fields["sha256"], f"{path}.sha256")
    if not _HASH.fullmatch(digest):
        what = (
            "is not the 64 hexadecimal digits of a SHA-256. The hash stands here, never the key itself: "
            "`tandem keys new` prints both"
        )
        raise Mistake(fields["sha256"], f"{path}.sha256", what)
    return ApiKey(
        name,
        bytes.fromhex(digest),
        _limits(fields, path),
        _salt(fields.get("cacheSalt"), f"{path}.cacheSalt"),
        _models(fields.get("models"), f"{path}.models"),
    )


def _limits(fields: dict[str, Node], path: str) -> Limits:
    def whole(name: str, most: int = _MOST_REQUESTS) -> int | None:
        if name not in fields:
            return None
        given = text_of(fields[name], f"{path}.{name}")
        if not _WHOLE.fullmatch(given) or not 1 <= int(given) <= most:
            what = f"{given[:20]!r} is not a whole number from 1 to {most:,}; leave it out for no limit"
            raise Mistake(fields[name], f"{path}.{name}", what)
        return int(given)

    rate, burst = _rate(fields.get("requestsPerSecond"), f"{path}.requestsPerSecond"), whole("burst")
    if burst is None and rate is not None:
        burst = math.ceil(rate)
    elif rate is None and burst is not None:
        raise Mistake(fields["burst"], f"{path}.burst", "goes with requestsPerSecond, which is missing")
    return Limits(rate, burst, whole("tokensPerMinute", _MOST_TOKENS), whole("concurrentRequests"))


def _rate(node: Node | None, path: str) -> float | None:
    if node is None:
        return None
    given = text_of(node, path)
    if not _NUMBER.fullmatch(given) or not _LEAST_RATE <= float(given) <= _MOST_REQUESTS:
        what = f"{given[:20]!r} is not a number from {_LEAST_RATE} to {_MOST_REQUESTS:,}, as 0.5 or 20"
        raise Mistake(node, path, f"{what}; leave it out for no limit")
    return float(given)


def _salt(node: Node | None, path: str) -> str | None:
    if node is None:
        return None
    salt = text_of(node, path)
    if not _SALT.fullmatch(salt) or not salt.isprintable():
        raise Mistake(node, path, "is not 1 to 128 printable characters without '@', '/' and '\\'")
    return salt


def _models(node: Node | None, path: str) -> frozenset[str] | None:
    if node is None:
        return None
    nodes = sequence(node, path)
    if not nodes:
        raise Mistake(node, path, "names no model; leave it out where all may be used")
    if len(nodes) > MODELS_LIMIT:
        raise Mistake(node, path, f"{len(nodes):,} are more than {MODELS_LIMIT}")
    models = frozenset(text_of(each, f"{path}[{i}]") for i, each in enumerate(nodes))
    if not all(0 < len(name.strip()) <= len(name) <= 256 for name in models):
        raise Mistake(node, path, "the name of a model has 1 to 256 characters")
    return models
