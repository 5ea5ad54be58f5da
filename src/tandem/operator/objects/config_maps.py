"""ConfigMaps: of each pool LMCache, nginx, the collector and the scripts; of the router its collector."""

from __future__ import annotations

from tandem.operator import scripts
from tandem.operator.collector import pool_collector, router_collector
from tandem.operator.lmcache import lmcache_yaml
from tandem.operator.nginx import nginx_conf
from tandem.operator.objects.common import Object, head
from tandem.operator.plan import Plan
from tandem.operator.pools import Pool
from tandem.operator.weights import has_claim, prefetched

LMCACHE, NGINX, COLLECTOR = "lmcache.yaml", "nginx.conf", "collector.yaml"
DRAIN, COPY, DOWNLOAD = "drain.py", "copy_weights.py", "download_model.py"


def has_lmcache_file(plan: Plan) -> bool:
    """Whether LMCache reads a file of ours."""
    return (plan.lmcache_pd or plan.lmcache_colocated) and plan.cache.file is None


def pool_config(plan: Plan, pool: Pool) -> Object:
    data = {NGINX: nginx_conf(plan, pool), DRAIN: scripts.text(DRAIN)}
    if has_lmcache_file(plan):
        data[LMCACHE] = lmcache_yaml(plan, pool)
    if plan.metrics.enabled:
        data[COLLECTOR] = pool_collector(plan)
    if prefetched(plan):
        fetcher = COPY if has_claim(plan) else DOWNLOAD
        data[fetcher] = scripts.text(fetcher)
    made = head(plan, "v1", "ConfigMap", plan.names.pool(pool.role), pool.component)
    return made | {"data": data}


def router_config_map(plan: Plan) -> Object | None:
    """None without metrics: the router's own configuration is its command line."""
    if not plan.metrics.enabled:
        return None
    made = head(plan, "v1", "ConfigMap", plan.names.router, "router", system=True)
    return made | {"data": {COLLECTOR: router_collector(plan)}}
