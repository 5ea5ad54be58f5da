"""Sizes that the resource leaves open, each with its reason in words.

Every function is pure; the reasons become comments of configurations and an annotation of Deployments.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from tandem.config import RouterConfig
from tandem.operator.model import TokenSize

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

CHUNK_TOKENS = 256
"""Of an LMCache chunk: the unit in which KV is sent and buffers are filled."""

ASSUMED_CONTEXT = 131_072
"""Tokens, where no `--max-model-len` tells the longest prompt: for times only, which may be too long."""

SLOWEST_TOKEN_SECONDS = 0.05
"""Between two tokens of a stream that is still worth waiting for when its pod has to leave."""

LONGEST_GRACE = 3600
"""Seconds that a pod which has to leave is given at most."""

DRAIN_DELAY = 15
"""Seconds from a pod's end being decided until name servers, load balancers and routers know: DNS answers
live 5 s (CoreDNS), a load balancer's deregistration starts within 10 s."""

_PATIENCE = RouterConfig(engine=("http://engine:1",))
"""The router's time-outs, which are not rendered and so are its defaults."""

ALB_LONGEST_IDLE = 4000
"""Seconds; an Application Load Balancer takes no more."""


@dataclass(frozen=True)
class Instance:
    """What a whole node of a type has."""

    gpus: int
    efa: int
    """EFA interfaces that pods can ask for (`vpc.amazonaws.com/efa`)."""


INSTANCES = {
    "ml.p4d.24xlarge": Instance(8, 4),
    "ml.p4de.24xlarge": Instance(8, 4),
    "ml.p5.48xlarge": Instance(8, 32),
    "ml.p5e.48xlarge": Instance(8, 32),
    "ml.p5en.48xlarge": Instance(8, 16),
    "ml.p6-b200.48xlarge": Instance(8, 8),
    "ml.p6-b300.48xlarge": Instance(8, 16),
}
"""Types whose EFA interfaces reach GPU memory fast enough for hand-offs. Others get none unless the role's
resources ask for them."""

HUGEPAGES_PER_NODE = 5120 * MIB
"""2 MiB pages that EFA's software takes for a whole node's interfaces; AWS' images set aside twice that."""


@dataclass(frozen=True)
class Efa:
    interfaces: int
    hugepages: int
    """Bytes, in pages of 2 MiB."""
    reason: str


def efa(instance_types: Iterable[str], gpus: int) -> Efa | None:
    """The EFA interfaces of a pod with so many GPUs: its part of those of the node. None where the types
    have none, are not known, or differ."""
    known = {INSTANCES.get(name) for name in instance_types}
    instance = known.pop() if len(known) == 1 else None
    if instance is None or gpus < 1:
        return None
    part = min(1.0, gpus / instance.gpus)
    interfaces = max(1, int(instance.efa * part))
    hugepages = ceil(HUGEPAGES_PER_NODE * part / (2 * MIB)) * 2 * MIB
    reason = (
        f"EFA: {interfaces} interfaces for {gpus} GPUs, of {instance.efa} for {instance.gpus} on a node; "
        f"{quantity(hugepages)} of 2 MiB pages for their software"
    )
    return Efa(interfaces, hugepages, reason)


def shared_memory(ranks: int) -> tuple[int, str]:
    """Bytes of /dev/shm for an engine with so many ranks."""
    size = (2 + ranks) * GIB
    reason = (
        f"shm: {quantity(size)}: 2Gi for vLLM's message queues and UCX, 1Gi a rank for NCCL ({ranks} ranks)"
    )
    return size, reason


def l1_cache(gpus: int) -> tuple[int, str]:
    """Bytes of host memory for each rank's KV blocks that left the GPU (LMCache's L1), one rank a GPU."""
    size = 16 * GIB
    return size, f"L1: {quantity(size)} a rank, {quantity(size * max(1, gpus))} a pod"


@dataclass(frozen=True)
class PdBuffer:
    """LMCache's receive buffer on a decoder, per tensor-parallel rank."""

    bytes: int
    chunks: int
    """Whole chunks of KV that fit."""
    reason: str


def pd_buffer(token: TokenSize, *, longest: int | None, given: int | None) -> PdBuffer:
    """`given` bytes, or the smallest of 8, 16 and 32 GiB that holds four prompts of `longest` tokens."""
    chunk = token.bytes * CHUNK_TOKENS
    per_prompt = ceil((longest or CHUNK_TOKENS) / CHUNK_TOKENS) * chunk
    choices = (8 * GIB, 16 * GIB, 32 * GIB)
    size = given or next((c for c in choices if c >= 4 * per_prompt), choices[-1])
    why = "as the resource says" if given else "computed"
    at_once = f": {size / per_prompt:.1f} prompts of {longest:,} tokens at once" if longest else ""
    reason = (
        f"PD_BUFFER_SIZE: {size:,} bytes a rank, {why}. KV takes {token.bytes:,} bytes a token and rank "
        f"({token.source}), so {size // chunk:,} chunks of {CHUNK_TOKENS} tokens fit{at_once}"
    )
    return PdBuffer(size, size // chunk, reason)


@dataclass(frozen=True)
class Times:
    """In seconds, for an endpoint whose longest prompt has `context` tokens."""

    longest_prefill: int
    longest_silence: int
    """Until a byte comes that is worth waiting for: an answer that is not streamed comes whole at its end."""
    longest_stream: int
    reason: str


def times(context: int | None, config: RouterConfig = _PATIENCE) -> Times:
    tokens = context or ASSUMED_CONTEXT
    prefill = ceil(config.patience(max(config.prefill_timeout, config.first_token_timeout), tokens))
    silence = ceil(prefill + config.answer_timeout)
    stream = min(LONGEST_GRACE, ceil(prefill + tokens * SLOWEST_TOKEN_SECONDS))
    known = "" if context else ", assumed as there is no --max-model-len"
    reason = (
        f"times: {tokens:,} tokens{known}: a prefill may take {prefill} s (the router's own patience), an "
        f"answer may be silent for {silence} s, a stream may last {stream} s (at most {LONGEST_GRACE})"
    )
    return Times(prefill, silence, stream, reason)


@dataclass(frozen=True)
class Grace:
    """How a pod leaves: known to leave, then idle, then nobody needs what it holds, then ended."""

    leave: int
    drain: int
    linger: int
    reason: str

    @property
    def total(self) -> int:
        return self.leave + self.drain + self.linger + 30


def grace(times: Times, linger: int, why_linger: str) -> Grace:
    drain = times.longest_stream
    total = DRAIN_DELAY + drain + linger + 30
    waits = f" + {linger} s {why_linger}" if linger else ""
    reason = (
        f"grace: {DRAIN_DELAY} s to be forgotten + {drain} s for answers{waits} + 30 s to end = {total} s"
    )
    return Grace(DRAIN_DELAY, drain, linger, reason)


def quantity(size: int) -> str:
    """Bytes as Kubernetes writes them: 10737418240 → 10Gi."""
    for unit, name in ((GIB, "Gi"), (MIB, "Mi"), (KIB, "Ki")):
        if size % unit == 0 and size:
            return f"{size // unit}{name}"
    return str(size)
