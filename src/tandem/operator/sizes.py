"""Sizes that the resource leaves open, each with its reason in words.

Every function is pure; the reasons become comments of configurations and an annotation of Deployments.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from tandem.config import RouterConfig
from tandem.engine.kv_cache import L1_BYTES

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

ASSUMED_CONTEXT = 131_072
"""Tokens, where no `--max-model-len` tells the longest prompt: for times only, which may be too long."""

SLOWEST_TOKEN_SECONDS = 0.05
"""Between two tokens of a stream that is still worth waiting for when its pod has to leave."""

LONGEST_GRACE = 3600
"""Seconds that a pod which has to leave is given at most."""

ROUTER_DRAIN_DELAY = 30
"""Seconds in which a router that has to leave still takes requests: as long as another needs to start, when a
node is drained of the only one."""
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
"""Types whose EFA interfaces reach GPU memory fast enough for hand-offs: HyperPod's for disaggregation, and
p4d. The figures are EC2's MaximumEfaInterfaces (`aws ec2 describe-instance-types`), which the device plugin
offers as `vpc.amazonaws.com/efa`: https://karpenter.sh/docs/reference/instance-types/ lists them. p6-b300's
first of 17 network cards has none: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html,
https://docs.aws.amazon.com/fsx/latest/LustreGuide/configure-efa-clients.html.

Types that are not here get no interfaces unless the roles' resources ask for them; KV then goes over UCX, and
a note says so. Some of those have interfaces too: g6e and g7e a few, but there GPU memory is behind PCIe, and
trn1 and trn2, which have no NVIDIA GPUs."""

HUGEPAGES_PER_NODE = 5120 * MIB
"""2 MiB pages that EFA's software takes for a whole node's interfaces; AWS' images set aside twice that."""


@dataclass(frozen=True)
class Efa:
    interfaces: int
    hugepages: int
    """Bytes, in pages of 2 MiB; 0: the resource says itself."""
    reason: str


def efa(instance_types: Iterable[str], gpus: int, *, hugepages: bool = True) -> Efa | None:
    """The EFA interfaces of a pod with so many GPUs: its part of those of the node, and (`hugepages`) the
    pages for their software. None where the types have none, are not known, or differ."""
    known = {INSTANCES.get(name) for name in instance_types}
    instance = known.pop() if len(known) == 1 else None
    if instance is None or gpus < 1:
        return None
    part = min(1.0, gpus / instance.gpus)
    interfaces = max(1, int(instance.efa * part))
    pages = ceil(HUGEPAGES_PER_NODE * part / (2 * MIB)) * 2 * MIB if hugepages else 0
    reason = f"EFA: {interfaces} interfaces for {gpus} GPUs, of {instance.efa} for {instance.gpus} on a node"
    reason += f"; {quantity(pages)} of 2 MiB pages for their software" if pages else ""
    return Efa(interfaces, pages, reason)


def shared_memory(ranks: int) -> tuple[int, str]:
    """Bytes of /dev/shm for an engine with so many ranks."""
    size = (2 + ranks) * GIB
    reason = (
        f"shm: {quantity(size)}: 2Gi for vLLM's message queues and UCX, 1Gi a rank for NCCL ({ranks} ranks)"
    )
    return size, reason


def l1_cache(gpus: int) -> tuple[int, str]:
    """Bytes of host memory for each rank's KV blocks that left the GPU (LMCache's L1), one rank a GPU."""
    size = L1_BYTES
    return size, f"L1: {quantity(size)} a rank, {quantity(size * max(1, gpus))} a pod"


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


def deadline(seconds: int) -> int:
    """Of a Deployment: Kubernetes takes none that is over before a pod counts as available."""
    return max(seconds, DRAIN_DELAY + 1)


def grace(times: Times, linger: int, why_linger: str, leave: int = DRAIN_DELAY) -> Grace:
    drain = times.longest_stream
    total = leave + drain + linger + 30
    waits = f" + {linger} s {why_linger}" if linger else ""
    reason = f"grace: {leave} s to be forgotten + {drain} s for answers{waits} + 30 s to end = {total} s"
    return Grace(leave, drain, linger, reason)


def quantity(size: int) -> str:
    """Bytes as Kubernetes writes them: 10737418240 → 10Gi."""
    for unit, name in ((GIB, "Gi"), (MIB, "Mi"), (KIB, "Ki")):
        if size % unit == 0 and size:
            return f"{size // unit}{name}"
    return str(size)
