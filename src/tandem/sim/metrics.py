"""An engine's /metrics: vLLM 0.32's names, labels and buckets, filled from what the simulator does."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from functools import lru_cache

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from tandem.sim.exposition import Histogram, Page, Value
from tandem.sim.request import Finish, SimRequest
from tandem.sim.scheduler import CacheCounters

_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TTFT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_CHOICES = (1, 2, 5, 10, 20)
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
_TRANSFER = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 5)
_BYTES = tuple(2 ** (10 + i) for i in range(1, 25, 2))
_DESCRIPTORS = (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000)
_HTTP_FINE = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    1.5,
    2,
    2.5,
    3,
    3.5,
    4,
    4.5,
    5,
    7.5,
    10,
    30,
    60,
)

_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "iteration_tokens_total": ("Histogram of number of tokens per engine_step.", _STEP_TOKENS),
    "request_params_n": ("Histogram of the n request parameter.", _CHOICES),
    "time_to_first_token_seconds": ("Histogram of time to first token in seconds.", _TTFT),
    "inter_token_latency_seconds": ("Histogram of inter-token latency in seconds.", _ITL),
    "request_time_per_output_token_seconds": (
        "Histogram of time_per_output_token_seconds per request.",
        _ITL,
    ),
    "e2e_request_latency_seconds": ("Histogram of e2e request latency in seconds.", _LATENCY),
    "request_queue_time_seconds": ("Histogram of time spent in WAITING phase for request.", _LATENCY),
    "request_inference_time_seconds": ("Histogram of time spent in RUNNING phase for request.", _LATENCY),
    "request_prefill_time_seconds": ("Histogram of time spent in PREFILL phase for request.", _LATENCY),
    "request_decode_time_seconds": ("Histogram of time spent in DECODE phase for request.", _LATENCY),
    "request_num_preemptions": ("Histogram of the number of times a request was preempted.", _PREEMPTIONS),
}
# Their buckets grow with the model's context.
_TOKEN_HISTOGRAMS = {
    "request_prompt_tokens": "Number of prefill tokens processed.",
    "request_generation_tokens": "Number of generation tokens processed.",
    "request_max_num_generation_tokens": "Histogram of maximum number of requested generation tokens.",
    "request_params_max_tokens": "Histogram of the max_tokens request parameter.",
    "request_prefill_kv_computed_tokens": (
        "Histogram of new KV tokens computed during prefill (excluding cached tokens)."
    ),
}
_COUNTERS = {
    "prefix_cache_queries": "Prefix cache queries, in terms of number of queried tokens.",
    "prefix_cache_hits": "Prefix cache hits, in terms of number of cached tokens.",
    "external_prefix_cache_queries": (
        "External prefix cache queries from KV connector cross-instance cache sharing, in terms of number of "
        "queried tokens."
    ),
    "external_prefix_cache_hits": (
        "External prefix cache hits from KV connector cross-instance cache sharing, in terms of number of "
        "cached tokens."
    ),
    "mm_cache_queries": "Multi-modal cache queries, in terms of number of queried items.",
    "mm_cache_hits": "Multi-modal cache hits, in terms of number of cached items.",
    "num_preemptions": "Cumulative number of preemption from the engine.",
    "prompt_tokens": "Number of prefill tokens processed.",
    "prompt_tokens_cached": "Number of cached prompt tokens (local + external).",
    "generation_tokens": "Number of generation tokens processed.",
    "estimated_flops_per_gpu": "Estimated number of floating point operations per GPU.",
    "estimated_read_bytes_per_gpu": "Estimated number of bytes read from memory per GPU.",
    "estimated_write_bytes_per_gpu": "Estimated number of bytes written to memory per GPU.",
}
_STARTED = "process_start_time_seconds"
_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
_TIERS = ("device", "host", "p2p", "disk", "external_unspecified")
_FINISHES = ("stop", "length", "abort", "error", "repetition")
_NIXL_FAILURES = {
    "num_failed_transfers": "Number of failed NIXL KV Cache transfers.",
    "num_failed_notifications": "Number of failed NIXL KV Cache notifications.",
    "num_kv_expired_reqs": "Number of requests that had their KV expire.",
    "num_notifications_after_expiry": "Number of completion notifications for requests no longer tracked.",
}


def token_buckets(longest: int) -> list[float]:
    """1, 2, 5, 10, … up to `longest`."""
    buckets: list[float] = []
    scale = 1
    while scale <= longest:
        buckets += [m * scale for m in (1, 2, 5) if m * scale <= longest]
        scale *= 10
    return buckets


class Metrics:
    """One engine's metrics. Engines of one process have one each."""

    def __init__(
        self,
        model_name: str,
        max_model_len: int,
        *,
        nixl: bool,
        consumer: bool,
        cache_info: Mapping[str, str],
        layers: int = 1,
    ) -> None:
        """`layers` of the model: KV of each is transferred as a piece of its own."""
        self._page = page = Page()
        self._labels = {"model_name": model_name, "engine": "0"}
        # To others each engine is a process of its own.
        started = page.gauge(_STARTED, "Start time of the process since unix epoch in seconds.")
        started.labels().set(time.time())
        self._nixl = _Nixl(self, layers) if nixl else None
        self._counters = {name: self._counter(name, text) for name, text in _COUNTERS.items()}
        buckets = token_buckets(max_model_len)
        self._histograms = {name: self._histogram(name, *spec) for name, spec in _HISTOGRAMS.items()}
        self._histograms |= {name: self._histogram(name, t, buckets) for name, t in _TOKEN_HISTOGRAMS.items()}
        self._finished = self._labelled(
            "request_success", "Count of successfully processed requests.", "finished_reason", _FINISHES
        )
        self._by_source = self._labelled(
            "prompt_tokens_by_source", "Number of prompt tokens by source.", "source", _SOURCES
        )
        self._by_tier = self._labelled(
            "prompt_tokens_cached_by_source", "Prefix-cache hit tokens by the cache tier.", "source", _TIERS
        )
        self._running = self._gauge("num_requests_running", "Number of requests in model execution batches.")
        self._waiting = self._gauge("num_requests_waiting", "Number of requests waiting to be processed.")
        reasons = page.gauge("vllm:num_requests_waiting_by_reason", "Number of waiting requests by reason.")
        self._waiting_for = {r: reasons.labels(**self._labels, reason=r) for r in ("capacity", "deferred")}
        self._fetching = self._fetch_stages() if consumer else {}
        self._usage = self._gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.")
        sleep = page.gauge("vllm:engine_sleep_state", "Engine sleep state.")
        for state, value in (("awake", 1), ("weights_offloaded", 0), ("discard_all", 0)):
            sleep.labels(**self._labels, sleep_state=state).set(value)
        rejections = page.counter(
            "vllm:admission_rejections",
            "Number of admission attempts rejected by a queue limit, by reason.",
        )
        for reason in ("max_num_queued_reqs", "max_num_queued_tokens"):
            rejections.labels(model_name=model_name, reason=reason)
        cache = page.gauge("vllm:cache_config_info", "Information of the LLMEngine CacheConfig")
        cache.labels(**cache_info, engine="0").set(1)
        self._http = _Http(page)
        self._ttft = self._histograms["time_to_first_token_seconds"]
        self._itl = self._histograms["inter_token_latency_seconds"]
        self._generated = self._counters["generation_tokens"]
        self._seen = CacheCounters()

    def render(self) -> bytes:
        """The text exposition format."""
        return _of_process(int(time.monotonic())) + self._page.text().encode()

    # What the engine reports

    def first_token(self, request: SimRequest, now: float) -> None:
        self._ttft.observe(now - request.arrival)
        local, external = request.local_hit, request.external
        self._counters["prompt_tokens"].inc(request.prompt_length)
        self._counters["prompt_tokens_cached"].inc(local + external)
        self._by_source["local_compute"].inc(request.prompt_length - local - external)
        self._by_source["local_cache_hit"].inc(local)
        self._by_source["external_kv_transfer"].inc(external)

    def next_token(self, gap: float) -> None:
        self._itl.observe(gap)

    def step(self, tokens: int, generated: int, preempted: int) -> None:
        """`tokens`: prompt tokens finished and tokens generated. vLLM does not count a step without a token,
        such as the first part of a long prompt."""
        if generated:
            self._histograms["iteration_tokens_total"].observe(tokens)
            self._generated.inc(generated)
        if preempted:
            self._counters["num_preemptions"].inc(preempted)

    def failed(self, request: SimRequest, now: float) -> None:
        """A request ends with an error instead of a token: vLLM counts that as a step, and as its first token
        if none came before."""
        self._histograms["iteration_tokens_total"].observe(0)
        if request.first_token is None:
            self._ttft.observe(now - request.arrival)

    def scheduler(self, running: int, waiting: int, loading: int, usage: float, cache: CacheCounters) -> None:
        self._running.set(running)
        self._waiting.set(waiting + loading)
        self._waiting_for["capacity"].set(waiting)
        self._waiting_for["deferred"].set(loading)
        if self._fetching:
            self._fetching["in_progress"].set(loading)
        self._usage.set(usage)
        seen = self._seen
        if cache.queries != seen.queries:
            self._counters["prefix_cache_queries"].inc(cache.queries - seen.queries)
            self._counters["prefix_cache_hits"].inc(cache.hits - seen.hits)
            self._by_tier["device"].inc(cache.hits - seen.hits)
        if cache.external_queries != seen.external_queries:
            hits = cache.external_hits - seen.external_hits
            self._counters["external_prefix_cache_queries"].inc(
                cache.external_queries - seen.external_queries
            )
            self._counters["external_prefix_cache_hits"].inc(hits)
            self._by_tier["p2p"].inc(hits)
        self._seen = CacheCounters(cache.queries, cache.hits, cache.external_queries, cache.external_hits)

    def finished(self, request: SimRequest, finish: Finish, now: float) -> None:
        """A request that ended by itself or failed; vLLM does not count aborted ones."""
        observe = {name: histogram.observe for name, histogram in self._histograms.items()}
        generated = request.generated
        first, last = request.first_token, request.last_token
        scheduled = request.scheduled if request.scheduled is not None else now
        self._finished[finish.value].inc()
        observe["request_prompt_tokens"](request.prompt_length)
        observe["request_generation_tokens"](generated)
        group = request.group
        group.finished += 1
        group.longest = max(group.longest, generated)
        if group.finished == group.n:
            observe["request_max_num_generation_tokens"](group.longest)
            observe["request_params_n"](group.n)
        observe["request_params_max_tokens"](request.sampling.max_tokens)
        observe["request_num_preemptions"](request.preemptions)
        observe["request_prefill_kv_computed_tokens"](request.prompt_length - (request.reported_cached or 0))
        observe["e2e_request_latency_seconds"](now - request.arrival)
        observe["request_queue_time_seconds"](scheduled - request.queued)
        decode = last - first if first is not None and last is not None else 0.0
        observe["request_prefill_time_seconds"](first - scheduled if first is not None else 0.0)
        observe["request_decode_time_seconds"](decode)
        observe["request_inference_time_seconds"](last - scheduled if last is not None else 0.0)
        observe["request_time_per_output_token_seconds"](decode / (generated - 1) if generated > 1 else 0.0)

    def transfer(self, seconds: float, size: int, pieces: int) -> None:
        if self._nixl is not None:
            self._nixl.transfer(seconds, size, pieces)

    def transfer_failed(self, kind: str) -> None:
        if self._nixl is not None:
            self._nixl.failed(kind)

    def http(
        self, handler: str, method: str, status: int, seconds: float, request: int, response: int
    ) -> None:
        """One answered request; sizes in bytes."""
        self._http.observe(handler, method, status, seconds, request, response)

    # Making them

    def _gauge(self, name: str, about: str) -> Value:
        return self._page.gauge(f"vllm:{name}", about).labels(**self._labels)

    def _counter(self, name: str, about: str) -> Value:
        return self._page.counter(f"vllm:{name}", about).labels(**self._labels)

    def _histogram(self, name: str, about: str, buckets: Iterable[float]) -> Histogram:
        return self._page.histogram(f"vllm:{name}", about, buckets).labels(**self._labels)

    def _labelled(self, name: str, about: str, label: str, values: Iterable[str]) -> dict[str, Value]:
        counter = self._page.counter(f"vllm:{name}", about)
        return {value: counter.labels(**self._labels, **{label: value}) for value in values}

    def _fetch_stages(self) -> dict[str, Value]:
        gauge = self._page.gauge(
            "vllm:num_requests_kv_fetch_by_stage", "Number of waiting requests by async KV load stage."
        )
        stages = ("waiting_to_start", "in_progress", "completed_waiting")
        return {stage: gauge.labels(**self._labels, stage=stage) for stage in stages}


class _Process(ProcessCollector):
    def collect(self) -> Iterable[Metric]:
        return [family for family in super().collect() if family.name != _STARTED]


@lru_cache(maxsize=1)
def _of_process(second: int) -> bytes:
    """What is told of this process, for all engines in it, anew every second: to count its open files takes
    longer than the rest of a page."""
    registry = CollectorRegistry()
    GCCollector(registry)
    PlatformCollector(registry)
    _Process(registry=registry)
    return generate_latest(registry)


class _Nixl:
    def __init__(self, metrics: Metrics, layers: int) -> None:
        self._layers = layers
        make = metrics._histogram
        self._seconds = make(
            "nixl_xfer_time_seconds", "Histogram of transfer duration for NIXL KV Cache transfers.", _TRANSFER
        )
        self._post = make(
            "nixl_post_time_seconds",
            "Histogram of transfer post time for NIXL KV Cache transfers.",
            (0.001, *_TRANSFER),
        )
        self._bytes = make(
            "nixl_bytes_transferred", "Histogram of bytes transferred per NIXL KV Cache transfers.", _BYTES
        )
        self._descriptors = make(
            "nixl_num_descriptors",
            "Histogram of number of descriptors per NIXL  KV Cache transfers.",
            _DESCRIPTORS,
        )
        failures = {name: metrics._counter(f"nixl_{name}", text) for name, text in _NIXL_FAILURES.items()}
        failed, notifications, expired, late = failures.values()
        self._failures = {
            "transfer": (failed,),
            "handshake": (failed,),
            "notification": (failed, notifications),
            "expired": (expired,),
            "late": (late,),
        }

    def transfer(self, seconds: float, size: int, pieces: int) -> None:
        self._seconds.observe(seconds)
        self._post.observe(0.001)
        self._bytes.observe(size)
        self._descriptors.observe(pieces * self._layers)

    def failed(self, kind: str) -> None:
        for counter in self._failures[kind]:
            counter.inc()


class _Http:
    """The HTTP server's own metrics, as vLLM's instrumentation names them."""

    def __init__(self, page: Page) -> None:
        self._requests = page.counter(
            "http_requests", "Total number of requests by method, status and handler."
        )
        self._in = page.summary("http_request_size_bytes", "Content length of incoming requests.")
        self._out = page.summary("http_response_size_bytes", "Content length of outgoing responses.")
        self._fine = page.histogram(
            "http_request_duration_highr_seconds", "Latency with many buckets.", _HTTP_FINE
        ).labels()
        self._coarse = page.histogram(
            "http_request_duration_seconds", "Latency with few buckets by handler.", (0.1, 0.5, 1)
        )

    def observe(
        self, handler: str, method: str, status: int, seconds: float, request: int, response: int
    ) -> None:
        self._requests.labels(method=method, status=f"{status // 100}xx", handler=handler).inc()
        self._in.labels(handler=handler).observe(request)
        self._out.labels(handler=handler).observe(response)
        self._fine.observe(seconds)
        self._coarse.labels(handler=handler, method=method).observe(seconds)
