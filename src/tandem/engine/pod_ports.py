"""The ports of a model pod, and which of them its engine cannot serve on."""

from __future__ import annotations

from tandem.engine.kv_events import EVENTS_PORT, MOST_RANKS, REPLAY_PORT

PROXY_PORT = 8081
"""Where routers and load balancers reach a model pod."""
PROXY_METRICS_PORT = 9113
COLLECTOR_METRICS_PORT = 8889
COLLECTOR_HEALTH_PORT = 13133
SIDE_CHANNEL_PORT = 5600
"""Where decoders fetch NIXL's metadata of a prefiller: vLLM's own default."""
LMCACHE_INIT_PORT, LMCACHE_ALLOC_PORT = 7300, 7400
"""A decoder's first rank; rank n has the ports higher by n."""
MOST_LMCACHE_RANKS = LMCACHE_ALLOC_PORT - LMCACHE_INIT_PORT


def taken_ports(*, lmcache: bool, kv_events: bool, tp: int, dp: int) -> dict[int, str]:
    """What listens beside the engine's own server, by port.

    `lmcache`: whether decoders take KV by LMCache; `tp`, `dp`: the most tensor- and data-parallel ranks of a
    pod, each of which has ports of its own.
    """
    own, ranks = range(min(dp, MOST_RANKS)), range(min(tp, MOST_LMCACHE_RANKS))
    taken = {
        PROXY_PORT: "the reverse proxy",
        PROXY_METRICS_PORT: "the reverse proxy's metrics",
        COLLECTOR_METRICS_PORT: "the metrics collector",
        COLLECTOR_HEALTH_PORT: "the metrics collector",
        **{SIDE_CHANNEL_PORT + rank: "NIXL" for rank in own},
    }
    if kv_events:
        taken |= {first + rank: "KV events" for first in (EVENTS_PORT, REPLAY_PORT) for rank in own}
    if lmcache:
        firsts = (LMCACHE_INIT_PORT, LMCACHE_ALLOC_PORT)
        taken |= {first + rank: "LMCache" for first in firsts for rank in ranks}
    return taken
