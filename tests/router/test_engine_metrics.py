"""What is read of engines' /metrics: of a real engine's page, of any number of ranks, of anything at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from tandem.router.engine_metrics import EngineMetrics, read

from ..sim.helpers import engines, flags, in_virtual_time

# Of vLLM 0.32 on a CPU while it answered one request: SmolLM2-135M, 384 MiB of KV cache. Families in their
# order, some left out.
PAGE = (Path(__file__).parent / "vllm_metrics.txt").read_bytes()
READ = EngineMetrics(
    started=1795999506.4,
    kv_use=0.03703703703703709,
    running=1,
    waiting=0,
    block_size=128,
    cache_tokens=17408,
    prefix_caching=True,
)


def test_a_real_engines_page_is_read() -> None:
    assert read(PAGE) == READ


def test_the_order_of_metrics_and_the_end_of_the_page_do_not_matter() -> None:
    lines = [line for line in PAGE.splitlines() if not line.startswith(b"#")]
    assert read(b"\n".join(reversed(lines))) == READ


@in_virtual_time
async def test_a_simulated_engines_page_is_read_alike() -> None:
    async with engines(flags()) as e:
        page = (await e.ask(0, "/metrics")).body
    found = read(page)
    assert found.started is not None
    assert replace(found, started=None) == EngineMetrics(None, 0.0, 0, 0, 16, 3200, True)


@pytest.mark.parametrize(
    ("given", "instead", "expected"),
    [
        (b'kv_cache_size_tokens="17408"', b'kv_cache_size_tokens="9"', 9),
        (b'kv_cache_size_tokens="17408"', b'kv_cache_size_tokens="None"', 136 * 128),
        (b'kv_cache_size_tokens="17408",', b"", 136 * 128),
        (b'kv_cache_size_tokens="17408",', b'num_gpu_blocks="None",', None),
    ],
)
def test_the_cache_is_as_large_as_the_engine_says_or_else_as_its_blocks(
    given: bytes, instead: bytes, expected: int | None
) -> None:
    page = PAGE.replace(given, instead)
    if expected is None:
        page = page.replace(b'num_gpu_blocks="136"', b'x="1"')
    assert read(page).cache_tokens == expected


def test_an_engine_without_prefix_caching_says_so() -> None:
    off = PAGE.replace(b'enable_prefix_caching="True"', b'enable_prefix_caching="False"')
    assert read(off) == replace(READ, prefix_caching=False)


@pytest.mark.parametrize(
    ("metric", "field"),
    [
        (b"vllm:kv_cache_usage_perc{", "kv_use"),
        (b"vllm:num_requests_running{", "running"),
        (b"vllm:num_requests_waiting{", "waiting"),
        (b"process_start_time_seconds ", "started"),
    ],
)
@pytest.mark.parametrize("value", [b"NaN", b"+Inf", b"-Inf", b"-1.0", b"1e300", b"", b"x", b"1.0.0", b'"'])
def test_a_value_that_cannot_be_is_none_and_the_rest_is_read(metric: bytes, field: str, value: bytes) -> None:
    lines = [
        line.rpartition(b" ")[0] + b" " + value if line.startswith(metric) else line
        for line in PAGE.splitlines()
    ]
    assert read(b"\n".join(lines)) == replace(READ, **{field: None})


def test_timestamps_and_labels_with_quotes_are_read_over() -> None:
    page = b'vllm:num_requests_running{model_name="a\\"} 9",engine="0"} 2.0 1795999513000\n'
    assert read(page) == EngineMetrics(running=2)


def test_a_metric_of_a_longer_name_is_another() -> None:
    page = b'vllm:num_requests_waiting_by_reason{reason="x"} 5\nvllm:num_requests_waiting{engine="0"} 1\n'
    assert read(page) == EngineMetrics(waiting=1)


@given(
    ranks=st.lists(
        st.tuples(
            st.floats(0, 1),
            st.integers(0, 10_000),
            st.integers(0, 10_000),
            st.integers(1, 10**6),
            st.booleans(),
        ),
        min_size=1,
        max_size=5,
    ),
    model=st.text(max_size=30),
    started=st.floats(0, 4e9),
)
@example(
    ranks=[(0.5, 1, 2, 10, True)], model='m,block_size="7",} 9\nvllm:num_requests_running{} 8', started=1
)
def test_ranks_are_added_up_or_the_worst_is_taken(
    ranks: list[tuple[float, int, int, int, bool]], model: str, started: float
) -> None:
    """Pages as Prometheus' own client writes them, with a model of any name."""
    registry = CollectorRegistry()

    def gauge(name: str, *labels: str) -> Gauge:
        return Gauge(name, "text", labels, registry=registry)

    info = (
        "a",
        "block_size",
        "enable_prefix_caching",
        "engine",
        "num_gpu_blocks",
        "user_specified_block_size",
    )
    config = gauge("vllm:cache_config_info", *info)
    use = gauge("vllm:kv_cache_usage_perc", "engine", "model_name")
    waiting = gauge("vllm:num_requests_waiting", "engine", "model_name")
    running = gauge("vllm:num_requests_running", "engine", "model_name")
    gauge("process_start_time_seconds").set(started)
    for engine, (used, runs, waits, blocks, caching) in enumerate(ranks):
        use.labels(engine, model).set(used)
        running.labels(engine, model).set(runs)
        waiting.labels(engine, model).set(waits)
        config.labels(model, 16, caching, engine, blocks, True).set(1)
    assert read(generate_latest(registry)) == EngineMetrics(
        started=started,
        kv_use=max(rank[0] for rank in ranks),
        running=sum(rank[1] for rank in ranks),
        waiting=sum(rank[2] for rank in ranks),
        block_size=16,
        cache_tokens=16 * min(rank[3] for rank in ranks),
        prefix_caching=all(rank[4] for rank in ranks),
    )


def plausible(metrics: EngineMetrics) -> bool:
    counts = (metrics.running, metrics.waiting, metrics.block_size, metrics.cache_tokens, metrics.started)
    return (metrics.kv_use is None or 0 <= metrics.kv_use <= 1) and all(n is None or n >= 0 for n in counts)


@given(page=st.binary())
def test_nothing_raises(page: bytes) -> None:
    assert plausible(read(page))


@given(
    at=st.integers(0, len(PAGE)),
    gone=st.integers(0, 200),
    put=st.one_of(
        st.binary(max_size=20),
        st.sampled_from([b'"', b"\\", b"{", b"}", b"\n", b" ", b"9" * 400, b"NaN", b"\xff"]),
    ),
)
def test_a_damaged_page_does_not_raise(at: int, gone: int, put: bytes) -> None:
    assert plausible(read(PAGE[:at] + put + PAGE[at + gone :]))


@pytest.mark.parametrize(
    "page",
    [
        b'vllm:num_requests_running{a="' + b"\\" * 10**6,
        b"vllm:num_requests_running{" + b"a" * 10**6,
        b"vllm:num_requests_running{" + b'""' * 10**6,
        b"vllm:num_requests_running{} " + b"9" * 10**6,
        b'vllm:cache_config_info{block_size="' + b"9" * 10**6 + b'"} 1',
    ],
    ids=["escapes", "no end", "quotes", "digits", "block size"],
)
def test_a_line_of_a_megabyte_tells_nothing(page: bytes) -> None:
    """Searching that steps back would take for ever."""
    assert read(page) == EngineMetrics()


def test_of_endless_ranks_only_so_many_are_read() -> None:
    found = read(b'vllm:num_requests_running{engine="0"} 1\n' * 50_000)
    assert found.running is not None
    assert found.running < 5_000
