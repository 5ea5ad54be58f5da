"""Counters read from what vLLM serves at /metrics."""

from __future__ import annotations

import httpx
import pytest

from tandem.bench.scrape import EngineCounters, read_counters, read_sums, scrape
from tandem.http import Request, Responder, serve

EXPOSITION = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 1.0
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 1646.0
# HELP vllm:prompt_tokens_by_source_total Number of prompt tokens by source.
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 60.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_cache_hit"} 40.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="external_kv_transfer"} 1546.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="something_new"} 5.0
# HELP vllm:prompt_tokens_by_source_created Number of prompt tokens by source.
# TYPE vllm:prompt_tokens_by_source_created gauge
vllm:prompt_tokens_by_source_created{engine="0",model_name="m",source="local_compute"} 1.7669e+09
# HELP vllm:nixl_xfer_time_seconds Histogram of transfer duration for NIXL KV Cache transfers.
# TYPE vllm:nixl_xfer_time_seconds histogram
vllm:nixl_xfer_time_seconds_bucket{engine="0",le="0.01",model_name="m"} 0.0
vllm:nixl_xfer_time_seconds_bucket{engine="0",le="+Inf",model_name="m"} 2.0
vllm:nixl_xfer_time_seconds_count{engine="0",model_name="m"} 2.0
vllm:nixl_xfer_time_seconds_sum{engine="0",model_name="m"} 0.0265
# HELP vllm:nixl_bytes_transferred Histogram of bytes transferred per NIXL KV Cache transfers.
# TYPE vllm:nixl_bytes_transferred histogram
vllm:nixl_bytes_transferred_bucket{engine="0",le="+Inf",model_name="m"} 2.0
vllm:nixl_bytes_transferred_count{engine="0",model_name="m"} 2.0
vllm:nixl_bytes_transferred_sum{engine="0",model_name="m"} 3.83e+07
"""


def test_prompt_tokens_by_source_and_transfers_are_read() -> None:
    counters = read_counters(EXPOSITION)
    assert counters == EngineCounters(
        computed_tokens=60,
        cached_tokens=40,
        received_tokens=1546,
        kv_bytes=3.83e7,
        kv_seconds=0.0265,
        kv_transfers=2,
    )
    assert counters.prompt_tokens == 1646


def test_metrics_asked_for_by_name_are_summed_over_their_labels() -> None:
    names = ("vllm:num_requests_running", "vllm:prompt_tokens_by_source_total", "vllm:none")
    assert read_sums(EXPOSITION, names) == {
        "vllm:num_requests_running": 1,
        "vllm:prompt_tokens_by_source_total": 60 + 40 + 1546 + 5,
    }


def test_ranks_of_one_engine_are_summed() -> None:
    second = "\n".join(
        line.replace('engine="0"', 'engine="1"') for line in EXPOSITION.splitlines() if line[0] != "#"
    )
    assert read_counters(EXPOSITION + second + "\n").received_tokens == 2 * 1546


def test_what_is_not_there_is_zero() -> None:
    assert read_counters("") == EngineCounters()


def test_growth_is_a_difference_of_each() -> None:
    before = EngineCounters(computed_tokens=10, kv_bytes=100)
    after = EngineCounters(computed_tokens=15, kv_bytes=100, received_tokens=3)
    assert after.since(before) == EngineCounters(computed_tokens=5, received_tokens=3)


async def test_an_engine_is_scraped_and_an_error_is_no_zero() -> None:
    async def metrics(request: Request, responder: Responder) -> None:
        responder.send(200 if request.path == "/metrics" else 404, [], EXPOSITION.encode())

    server = await serve(metrics, "127.0.0.1", 0)
    try:
        async with httpx.AsyncClient(trust_env=False) as client:
            url = f"http://127.0.0.1:{server.port}"
            assert (await scrape(client, url)).cached_tokens == 40
            with pytest.raises(httpx.HTTPStatusError):
                await scrape(client, url + "/else")
    finally:
        await server.close()
