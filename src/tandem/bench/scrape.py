"""What engines and routers tell at /metrics: what an engine computed, found in its cache and received from
another engine; the gauges of what is in hand.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields

import httpx
from prometheus_client.parser import text_string_to_metric_families

ENGINE_IN_HAND = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
ROUTER_IN_HAND = (
    "tandem_requests_in_flight",
    "tandem_tokens_in_flight",
    "tandem_pending_prompt_tokens",
    "tandem_reserved",
    "tandem_requests_running",
    "tandem_requests_waiting",
    "tandem_handoffs_cleaning_up",
)
"""Gauges that are at 0 where there is no work, and nothing is held for any."""


@dataclass(frozen=True)
class EngineCounters:
    """Sums since an engine's start, from vLLM's /metrics. Prompt tokens by where their KV came from."""

    computed_tokens: float = 0.0
    cached_tokens: float = 0.0
    received_tokens: float = 0.0
    kv_bytes: float = 0.0
    kv_seconds: float = 0.0
    kv_transfers: float = 0.0
    lmcache_transfers: float = 0.0
    """Those of them that LMCache has made, which leaves the last token of a prompt to the decoder."""

    @property
    def prompt_tokens(self) -> float:
        return self.computed_tokens + self.cached_tokens + self.received_tokens

    def since(self, before: EngineCounters) -> EngineCounters:
        return EngineCounters(
            **{f.name: getattr(self, f.name) - getattr(before, f.name) for f in fields(self)}
        )


_SOURCES = {
    "local_compute": "computed_tokens",
    "local_cache_hit": "cached_tokens",
    "external_kv_transfer": "received_tokens",
}
_SUMS = {
    "vllm:nixl_bytes_transferred_sum": "kv_bytes",
    "vllm:nixl_xfer_time_seconds_sum": "kv_seconds",
    "vllm:nixl_xfer_time_seconds_count": "kv_transfers",
    "vllm:lmcache_scatter_bytes_total": "kv_bytes",
    "vllm:lmcache_scatter_seconds_sum": "kv_seconds",
    "vllm:lmcache_scatter_seconds_count": "lmcache_transfers",
}


def read_counters(text: str) -> EngineCounters:
    """The counters in a Prometheus text exposition; a metric that is missing counts as 0."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = (
                _SOURCES.get(sample.labels.get("source", ""))
                if sample.name == "vllm:prompt_tokens_by_source_total"
                else _SUMS.get(sample.name)
            )
            if name is not None:
                values[name] = values.get(name, 0.0) + sample.value
    values["kv_transfers"] = values.get("kv_transfers", 0.0) + values.get("lmcache_transfers", 0.0)
    return EngineCounters(**values)


def read_sums(text: str, names: Collection[str]) -> dict[str, float]:
    """Of the metrics so named in a Prometheus text exposition, each one's sum over all its labels."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in names:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


async def scrape(client: httpx.AsyncClient, engine: str) -> EngineCounters:
    """Read an engine's counters now. Raises httpx.HTTPError when it cannot be reached."""
    answer = await client.get(f"{engine}/metrics")
    answer.raise_for_status()
    return read_counters(answer.text)
