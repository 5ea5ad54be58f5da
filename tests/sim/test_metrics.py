"""/metrics: vLLM's names and labels, and what one request adds."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from .helpers import FOX, Engines, engines, flags, in_virtual_time, pair

# Of a vLLM 0.32 decoder with NixlConnector; without `vllm:`.
NAMES = """
nixl_xfer_time_seconds nixl_post_time_seconds nixl_bytes_transferred nixl_num_descriptors
nixl_num_failed_transfers nixl_num_failed_notifications nixl_num_kv_expired_reqs
nixl_num_notifications_after_expiry estimated_flops_per_gpu estimated_read_bytes_per_gpu
estimated_write_bytes_per_gpu num_requests_running num_requests_waiting num_requests_waiting_by_reason
num_requests_kv_fetch_by_stage engine_sleep_state kv_cache_usage_perc prefix_cache_queries prefix_cache_hits
external_prefix_cache_queries external_prefix_cache_hits mm_cache_queries mm_cache_hits num_preemptions
prompt_tokens prompt_tokens_by_source prompt_tokens_cached prompt_tokens_cached_by_source generation_tokens
request_success admission_rejections request_prompt_tokens request_generation_tokens iteration_tokens_total
request_max_num_generation_tokens request_params_n request_params_max_tokens time_to_first_token_seconds
inter_token_latency_seconds request_time_per_output_token_seconds e2e_request_latency_seconds
request_queue_time_seconds request_inference_time_seconds request_prefill_time_seconds
request_decode_time_seconds request_num_preemptions request_prefill_kv_computed_tokens cache_config_info
"""


async def samples(e: Engines, number: int) -> dict[str, float]:
    text = (await e.ask(number, "/metrics")).body.decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith(("_bucket", "_created")) and sample.name.startswith("vllm:"):
                labels = {k: v for k, v in sample.labels.items() if k not in ("engine", "model_name")}
                suffix = "".join(f",{v}" for _, v in sorted(labels.items())) if len(labels) < 3 else ""
                found[sample.name.removeprefix("vllm:") + suffix] = sample.value
    return found


@in_virtual_time
async def test_the_names_are_vllms() -> None:
    async with engines(*pair(), flags()) as e:
        text = (await e.ask(1, "/metrics")).body.decode()
        families = [f for f in text_string_to_metric_families(text) if f.name.startswith("vllm:")]
        names = {f.name.removeprefix("vllm:") for f in families if not f.name.endswith("_created")}
        assert names == set(NAMES.split())
        alone = (await e.ask(2, "/metrics")).body.decode()
        assert "nixl" not in alone
        assert "kv_fetch" not in alone


@in_virtual_time
async def test_what_one_request_adds() -> None:
    async with engines(flags()) as e:
        before = await samples(e, 0)
        tokens = (await e.complete(0, FOX * 4, max_tokens=5)).json["usage"]["prompt_tokens"]
        after = await samples(e, 0)
        grown = {k: round(v - before.get(k, 0), 6) for k, v in after.items() if v != before.get(k, 0)}
        times = {k for k in grown if "_seconds_" in k}
        assert {k: v for k, v in grown.items() if k not in times} == {
            "prefix_cache_queries_total": tokens,
            "prompt_tokens_total": tokens,
            "prompt_tokens_by_source_total,local_compute": tokens,
            "generation_tokens_total": 5,
            "request_success_total,length": 1,
            "request_prompt_tokens_count": 1,
            "request_prompt_tokens_sum": tokens,
            "request_generation_tokens_count": 1,
            "request_generation_tokens_sum": 5,
            "iteration_tokens_total_count": 5,
            "iteration_tokens_total_sum": tokens + 5,
            "request_max_num_generation_tokens_count": 1,
            "request_max_num_generation_tokens_sum": 5,
            "request_params_n_count": 1,
            "request_params_n_sum": 1,
            "request_params_max_tokens_count": 1,
            "request_params_max_tokens_sum": 5,
            "request_num_preemptions_count": 1,
            "request_prefill_kv_computed_tokens_count": 1,
            "request_prefill_kv_computed_tokens_sum": tokens,
        }
        counts = {k: v for k, v in grown.items() if k in times and k.endswith("_count")}
        assert counts.pop("inter_token_latency_seconds_count") == 4
        assert set(counts.values()) == {1}
        assert len(counts) == 7


@in_virtual_time
async def test_gauges_show_the_present() -> None:
    import asyncio

    async with engines(flags("--max-num-seqs", "2")) as e:
        tasks = [
            asyncio.create_task(e.complete(0, [i + 1] * 160, max_tokens=200, ignore_eos=True))
            for i in range(3)
        ]
        await asyncio.sleep(1)
        now = await samples(e, 0)
        assert (now["num_requests_running"], now["num_requests_waiting"]) == (2, 1)
        assert now["num_requests_waiting_by_reason,capacity"] == 1
        assert 0.1 < now["kv_cache_usage_perc"] < 0.2
        await asyncio.gather(*tasks)
        after = await samples(e, 0)
        assert (after["num_requests_running"], after["kv_cache_usage_perc"]) == (0, 0)


@in_virtual_time
async def test_choices_of_a_prompt_count_once_where_vllm_counts_the_prompt() -> None:
    async with engines(flags()) as e:
        await e.complete(0, n=3, temperature=1, max_tokens=4)
        now = await samples(e, 0)
        assert (now["request_params_n_count"], now["request_params_n_sum"]) == (1, 3)
        assert now["request_success_total,length"] == 3


@in_virtual_time
async def test_steps_without_a_token_are_not_counted() -> None:
    async with engines(flags("--max-num-batched-tokens", "64", "--max-num-seqs", "8")) as e:
        await e.complete(0, [9] * 300, max_tokens=2)
        now = await samples(e, 0)
        assert (now["iteration_tokens_total_count"], now["iteration_tokens_total_sum"]) == (2, 302)


@in_virtual_time
async def test_a_request_that_fails_before_its_first_token_counts_as_one_in_the_time_to_it() -> None:
    async with engines(*pair()) as e:
        params = await e.prefill(0)
        answer = await e.complete(1, kv_transfer_params={**params, "remote_engine_id": "other"})
        assert answer.status == 500
        now = await samples(e, 1)
        assert now["request_success_total,error"] == 1
        assert now["time_to_first_token_seconds_count"] == now["iteration_tokens_total_count"] == 1
        assert now["iteration_tokens_total_sum"] == now["prompt_tokens_total"] == 0


@in_virtual_time
async def test_blocks_that_lie_together_are_one_piece_of_a_transfer() -> None:
    async with engines(*pair()) as e:
        prompt = [9] * 100  # seven blocks of a fresh cache
        await e.complete(1, prompt, kv_transfer_params=await e.prefill(0, prompt))
        now = await samples(e, 1)
        assert (now["nixl_num_descriptors_count"], now["nixl_num_descriptors_sum"]) == (1, 1)


@in_virtual_time
async def test_the_caches_configuration_is_told() -> None:
    async with engines(flags()) as e:
        for label, value in {
            "block_size": "16",
            "num_gpu_blocks": "200",
            "kv_cache_size_tokens": "3200",
            "kv_cache_max_concurrency": "1.5625",
        }.items():
            assert await e.metric(0, "vllm:cache_config_info", **{label: value}) == 1, label


@in_virtual_time
async def test_http_requests_are_counted_by_handler() -> None:
    async with engines(flags()) as e:
        await e.complete(0)
        await e.ask(0, "/nope")
        await e.ask(0, "/health")
        text = (await e.ask(0, "/metrics")).body.decode()
        assert 'http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 1.0' in text
        assert 'http_requests_total{handler="none",method="GET",status="4xx"} 1.0' in text
        assert 'handler="/health"' not in text
