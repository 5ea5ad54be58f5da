"""Variables of a model container that Tandem sets itself, whatever the resource says of them."""

from __future__ import annotations

from collections.abc import Iterable

POD_IP = "POD_IP"
"""The pod's own address, which other variables refer to."""

SIDE_CHANNEL_HOST, SIDE_CHANNEL_PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"
LMCACHE_FILE = "LMCACHE_CONFIG_FILE"

DEFAULT_HASH_SEED = "0"
"""Of PYTHONHASHSEED: LMCache's keys are Python's hashes, and engines that seed them differently never find
each other's KV."""

HAND_OFF_KEYS = (
    "chunk_size",
    "save_unfull_chunk",
    "use_layerwise",
    "enable_pd",
    "transfer_channel",
    "nixl_backends",
    "pd_backend_mode",
    "pd_buffer_size",
    "pd_buffer_device",
    "pd_role",
    "pd_proxy_host",
    "pd_proxy_port",
    "pd_peer_host",
    "pd_peer_init_port",
    "pd_peer_alloc_port",
)
"""LMCache's settings on which prefillers, decoders and the router must agree."""


def lmcache_variable(key: str) -> str:
    """The variable by which a setting of LMCache's comes: it counts for more than its file."""
    return f"LMCACHE_{key.upper()}"


def owned_variables(connector: str, *, disaggregated: bool, cached: bool) -> frozenset[str]:
    """The names. `cached`: whether a colocated endpoint's engines keep KV in LMCache."""
    names: Iterable[str] = ()
    if connector == "lmcache" and disaggregated:
        names = (LMCACHE_FILE, *map(lmcache_variable, HAND_OFF_KEYS))
    elif connector == "lmcache" and cached:
        names = (LMCACHE_FILE,)
    elif disaggregated:
        names = (SIDE_CHANNEL_HOST, SIDE_CHANNEL_PORT)
    return frozenset((POD_IP, *names))
