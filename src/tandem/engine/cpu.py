"""What a vLLM engine needs on CPU cores that it shares a machine with: flags and environment.

No worker processes (an engine is its API server and one process that schedules and computes), eager execution
(compiling takes longer than a demonstration), cores of its own, and UCX over shared memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tandem.engine.args import has_flag

KV_SHARE = 4
"""One part in this many of the available memory is KV cache, all engines together; weights, activations and
the processes themselves (1 to 2 GB each) live in the rest."""

UNUSABLE_FLAGS = dict.fromkeys(
    (
        "--api-server-count",
        "--data-parallel-size",
        "--data-parallel-size-local",
        "--decode-context-parallel-size",
        "--enable-expert-parallel",
        "--nnodes",
        "--pipeline-parallel-size",
        "--prefill-context-parallel-size",
        "--tensor-parallel-size",
    ),
    "a CPU engine computes in one process",
)
"""Flags left out on a CPU, and why."""

OWNED_FLAGS = {
    "--distributed-executor-backend": ("uni", "the executor without worker processes"),
}

NOT_INHERITED = (
    "VLLM_CPU_KVCACHE_SPACE",  # in whole GiB, overrides --kv-cache-memory-bytes
    "VLLM_CPU_OMP_THREADS_BIND",  # would fight with the pinning
    "VLLM_PLUGINS",  # a list without `tandem` would hide the connector
    "GOMP_CPU_AFFINITY",
    "KMP_AFFINITY",
    "OMP_PLACES",
    "OMP_PROC_BIND",
)
"""Variables of whoever starts Tandem that must not reach an engine."""


def default_environment(args: Iterable[str]) -> dict[str, str]:
    """Variables that an engine with these flags has unless the manifest says otherwise."""
    environment = {
        "UCX_LOG_LEVEL": "warn",
        # On one machine the thread that asks for KV also copies it, so NIXL's progress thread has only
        # notifications to see to: twice its usual pause halves what idle engines cost.
        "TANDEM_NIXL_PROGRESS_DELAY_US": "2000",
        "VLLM_SSM_CONV_STATE_LAYOUT": "DS",  # NIXL needs it; vLLM sets it for its own connectors only
    }
    if has_flag(list(args), "--enforce-eager"):
        # Eager in earnest: vLLM still compiles its sampler's logprobs with gcc, at the first request that
        # asks for them, which then waits 18 s.
        environment["TORCHDYNAMO_DISABLE"] = "1"
    return environment


def owned_environment(physical_cores: int) -> dict[str, str]:
    """Variables that an engine pinned to this many physical cores must have."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # The uni executor does not bind or count threads: unset, OpenMP starts one per core of the machine,
        # and they spin against each other on the few that the engine is pinned to.
        "OMP_NUM_THREADS": str(physical_cores),
        "UCX_TLS": "sysv,posix,cma,tcp,self",
        "UCX_NET_DEVICES": "lo",
    }


DEFAULT_SEQUENCES = 128
"""vLLM's `--max-num-seqs` on CPU, which may not be more than the tokens of a step."""


def default_flags(
    args: Iterable[str], *, step: int | None, kv_bytes: int, environment: Mapping[str, str]
) -> list[str]:
    """Flags for what the role's merged `args` leave open.

    `step`: the most tokens of a step (None: vLLM's own); `kv_bytes`: the engine's share of KV memory.
    """
    args = list(args)
    flags: list[str] = []
    if not any(
        has_flag(args, f) for f in ("--enforce-eager", "--compilation-config", "--optimization-level")
    ):
        flags += ["--enforce-eager"]
    if not has_flag(args, "--kv-cache-memory-bytes") and "VLLM_CPU_KVCACHE_SPACE" not in environment:
        flags += ["--kv-cache-memory-bytes", str(kv_bytes)]
    if step is not None and not has_flag(args, "--max-num-batched-tokens"):
        flags += ["--max-num-batched-tokens", str(step)]
        if step < DEFAULT_SEQUENCES and not has_flag(args, "--max-num-seqs"):
            flags += ["--max-num-seqs", str(step)]
    return flags


def kv_bytes_per_engine(available_bytes: int, engines: int) -> int:
    """Each engine's KV cache: an equal part of 1/KV_SHARE of the available memory, in whole MiB."""
    mib = 1 << 20
    return max(1, available_bytes // KV_SHARE // engines // mib) * mib
