"""LMCache's configuration file for the engines of a pool."""

from __future__ import annotations

import json
import textwrap
from typing import Any

from tandem.api import Role
from tandem.api.problem import one_line
from tandem.engine import kv_cache
from tandem.engine.lmcache import Receiver, Sender, hand_off_settings
from tandem.engine.pod_ports import LMCACHE_ALLOC_PORT, LMCACHE_INIT_PORT
from tandem.operator import names, sizes
from tandem.operator.plan import Plan
from tandem.operator.pools import Pool

_WHY = {
    "chunk_size": "tokens; the same for both roles, or KV that comes is garbage",
    "local_cpu": "L1: KV blocks that leave the GPU stay in the pod's memory",
    "max_local_cpu_size": "GiB a rank",
    "remote_url": "L2: shared by the pods",
    "extra_config": "where L2 fails the rest goes on; by default LMCache then does nothing at all, hand-offs "
    "included",
    "save_unfull_chunk": "the last, shorter chunk of a prompt is sent too",
    "use_layerwise": "layer by layer nothing is handed over (LMCache #1174)",
    "enable_pd": "prefill and decode on engines of their own",
    "nixl_backends": "LIBFABRIC over EFA, UCX over everything else",
    "pd_role": "sender: prefills and pushes; receiver: decodes",
    "pd_proxy_host": "the router, which has to be told when all KV is there",
    "pd_peer_init_port": "one for each tensor-parallel rank; pd_peer_host is the pod's own address, by "
    "LMCACHE_PD_PEER_HOST",
}


def lmcache_yaml(plan: Plan, pool: Pool) -> str:
    """The file, with a comment where a key needs one."""
    keys = cache_settings(plan, pool)
    if plan.lmcache_pd:
        keys |= pd_settings(plan, pool)
    lines = [f"# LMCache of the {pool.component} engines of {plan.names.namespace}/{plan.names.name}."]
    for key, value in keys.items():
        why = plan.buffer.reason if key == "pd_buffer_size" and plan.buffer else _WHY.get(key)
        lines += textwrap.wrap(one_line(why or ""), 100, initial_indent="# ", subsequent_indent="# ")
        lines.append(f"{key}: {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def cache_settings(plan: Plan, pool: Pool) -> dict[str, Any]:
    """Chunks, L1 and L2."""
    l1_bytes, _ = sizes.l1_cache(pool.gpus)
    keys = kv_cache.cache_settings(plan.cache, pool.role, l1_bytes=l1_bytes)
    if "remote_url" in keys and keys["local_cpu"]:
        keys["extra_config"] = {"fallback_policy": "local_cpu"}
    return keys


def pd_settings(plan: Plan, pool: Pool) -> dict[str, Any]:
    """What makes an engine one half of a hand-off."""
    assert plan.buffer is not None
    side: Sender | Receiver
    if pool.role is Role.PREFILL:
        side = Sender(f"{plan.names.notify_service}.{plan.names.system_namespace}.svc", names.NOTIFY_PORT)
    else:
        side = Receiver(*receiver_ports(pool))
    size = plan.buffer.bytes
    return hand_off_settings(side, buffer_bytes=size, backend=plan.nixl_backend, device="cuda")


def receiver_ports(pool: Pool) -> tuple[list[int], list[int]]:
    """Where a decoder's ranks take KV: (init ports, alloc ports)."""
    ranks = range(pool.flags.tp)
    return [LMCACHE_INIT_PORT + r for r in ranks], [LMCACHE_ALLOC_PORT + r for r in ranks]
