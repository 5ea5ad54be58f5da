"""What the router reads of an engine's /metrics.

Hundreds of engines are read every few seconds, on the event loop that relays streams. So the page, 60 to 100
KB, is not parsed: the few metrics are looked for in the text, which takes some 50 microseconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tandem.router.reported import MOST_CACHED, MOST_REQUESTS, MOST_TOKENS, count, measure

_MOST_SAMPLES = 4096
"""Of one metric, of which there is one for each data-parallel rank."""

# `name{label="value",…} value [timestamp]`; only in quotes may there be a brace. Never steps back.
_SAMPLE = re.compile(rb'[^{ ]++(?:\{((?:[^"}]++|"(?:[^"\\]++|\\.)*+")*+)\})? +([^ ]+)')

# A label's value that only the label itself can look like: quotes within other values are escaped.
_BLOCK_SIZE = re.compile(rb'(?:^|,)block_size="([0-9]{1,15})"')
_BLOCKS = re.compile(rb'(?:^|,)num_gpu_blocks="([0-9]{1,15})"')
_TOKENS = re.compile(rb'(?:^|,)kv_cache_size_tokens="([0-9]{1,15})"')
_PREFIX_CACHING = re.compile(rb'(?:^|,)enable_prefix_caching="(True|False)"')


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """None stands for what a page does not tell, or not in earnest (a KV use of 7, a NaN)."""

    started: float | None = None
    """When the engine's process started, in seconds since 1970: another value is another process."""
    kv_use: float | None = None
    """Part of the KV cache that requests hold, 0 to 1, of the rank that has least room."""
    running: int | None = None
    """Requests that are computed, of all ranks."""
    waiting: int | None = None
    """Requests that wait for that, of all ranks."""
    block_size: int | None = None
    """Tokens of a KV block."""
    cache_tokens: int | None = None
    """Tokens that the KV cache of a rank holds, of the smallest."""
    prefix_caching: bool | None = None
    """Whether all ranks keep prefixes."""


def read(page: bytes) -> EngineMetrics:
    """What is told in a page of Prometheus' text format. Never raises, whatever the page is."""
    config = [labels for labels, _ in _samples(page, b"vllm:cache_config_info{")]
    caching = [found[1] == b"True" for labels in config if (found := _PREFIX_CACHING.search(labels))]
    return EngineMetrics(
        started=next(iter(_values(page, b"process_start_time_seconds", 1e12)), None),
        kv_use=max(_values(page, b"vllm:kv_cache_usage_perc{", 1), default=None),
        running=_sum(_values(page, b"vllm:num_requests_running{", MOST_REQUESTS)),
        waiting=_sum(_values(page, b"vllm:num_requests_waiting{", MOST_REQUESTS)),
        block_size=min(filter(None, (_block_size(labels) for labels in config)), default=None),
        cache_tokens=min(filter(None, map(_cache_tokens, config)), default=None),
        prefix_caching=all(caching) if caching else None,
    )


def _samples(page: bytes, name: bytes) -> Iterator[tuple[bytes, bytes]]:
    """(labels, value) of each sample of a metric; in a page they stand together. The name may end in the
    brace that always comes after it."""
    at = 0 if page.startswith(name) else page.find(b"\n" + name) + 1
    if at == 0 and not page.startswith(name):
        return
    for _ in range(_MOST_SAMPLES):
        end = page.find(b"\n", at)
        line = page[at:] if end < 0 else page[at:end]
        if sample := _SAMPLE.match(line):
            yield sample[1] or b"", sample[2]
        at = end + 1
        if end < 0 or not page.startswith(name, at):
            return


def _values(page: bytes, name: bytes, most: float) -> list[float]:
    """The values of a metric that lie between 0 and `most`."""
    values = (_float(text) for _, text in _samples(page, name))
    return [value for value in values if measure(value, most) is not None]


def _float(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _sum(values: list[float]) -> int | None:
    return min(int(sum(values)), MOST_REQUESTS) if values else None


def _number(label: re.Pattern[bytes], labels: bytes) -> int | None:
    found = label.search(labels)
    return int(found[1]) if found else None


def _block_size(labels: bytes) -> int | None:
    return count(_number(_BLOCK_SIZE, labels), MOST_TOKENS, least=1)


def _cache_tokens(labels: bytes) -> int | None:
    """By the engine's own count, which knows of models whose layers share blocks; else all blocks' tokens."""
    tokens = count(_number(_TOKENS, labels), MOST_CACHED)
    if tokens is not None:
        return tokens
    size, blocks = _block_size(labels), _number(_BLOCKS, labels)
    return None if size is None or blocks is None else count(size * blocks, MOST_CACHED)
