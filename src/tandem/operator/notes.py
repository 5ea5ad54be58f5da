"""What a reader of the objects should know: what of the resource was replaced, or has no effect."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.engine import has_flag
from tandem.operator import model_files, scaling, sizes
from tandem.operator.engines import TRANSFER, own_transfer
from tandem.operator.plan import Plan
from tandem.operator.pools import Pool
from tandem.operator.wishes import instance_types, section


def notes(plan: Plan) -> tuple[str, ...]:
    """One line each; those that name a field begin with its path."""
    found = [*_handing_over(plan), *_caches(plan), *_interfaces(plan), *_command(plan), *_weights(plan)]
    found += _counting(plan)
    return tuple(dict.fromkeys([*found, *scaling.notes(plan)]))


def _handing_over(plan: Plan) -> Iterator[str]:
    if not plan.disaggregated:
        return
    yield f"connector: {plan.connector.reason}"
    for pool in plan.pools:
        if has_flag(pool.args, TRANSFER):
            kept = ", ".join(own_transfer(plan, pool))
            yield (
                f"{TRANSFER} of the {pool.component} engines: replaced by the configuration for that "
                f"connector{kept and f', which keeps {kept}'}"
            )
    if plan.buffer is not None and (complaint := plan.buffer.complaint(plan.context)):
        yield f"PD_BUFFER_SIZE: {complaint}"


def _caches(plan: Plan) -> Iterator[str]:
    given = section(plan.spec.kv_cache_spec)
    if plan.connector.name != "lmcache" and given:
        yield "spec.kvCacheSpec: without effect, as the engines run without LMCache"
    elif plan.lmcache_pd and plan.cache.file is not None:
        yield "spec.kvCacheSpec.cacheConfigFile: read first; what hand-offs need is set over it"
    if plan.lmcache_pd and plan.cache.redis_url is not None and not plan.cache.l1:
        yield "spec.kvCacheSpec.enableL2Cache: without effect, as prefillers have L2 beside L1 alone"
    if plan.cache.tiered:
        yield (
            "spec.kvCacheSpec.l2CacheSpec.l2CacheBackend: tieredstorage is HyperPod's own store; no L2 cache "
            "is rendered"
        )


def _interfaces(plan: Plan) -> Iterator[str]:
    types = instance_types(plan.spec)
    if not plan.disaggregated or not types or plan.nixl_backend == "LIBFABRIC":
        return
    without = [pool for pool in plan.pools if not plan.efa(pool)]
    if said := [pool.component for pool in without if pool.efa == 0]:
        yield f"EFA: none for the {' and '.join(said)} engines, as their resources say; KV goes over UCX"
        return
    yield (
        f"EFA: no interfaces are asked for, as {_why_none(types, without)}; KV goes over UCX. Name "
        "vpc.amazonaws.com/efa in the roles' resources to use them"
    )


def _why_none(types: tuple[str, ...], without: list[Pool]) -> str:
    unknown = [name for name in types if name not in sizes.INSTANCES]
    if unknown:
        return f"those of {', '.join(unknown)} are not known"
    if any(pool.gpus < 1 for pool in without):
        return "they go with GPUs, of which a role asks for none"
    each = ", ".join(f"{name} has {sizes.INSTANCES[name].efa}" for name in types)
    return f"the types differ ({each})"


def _command(plan: Plan) -> Iterator[str]:
    command = plan.spec.worker.command
    if command and command[0].rpartition("/")[2] in ("sh", "bash"):
        yield (
            'spec.worker.command: is a shell; flags reach the engine only if it hands its arguments on ("$@")'
        )


def _counting(plan: Plan) -> Iterator[str]:
    why = model_files.why_not(plan)
    if plan.routed and why is not None:
        yield f"counting: engines count the router's prompts, which is slower, as {why}"


def _weights(plan: Plan) -> Iterator[str]:
    source = plan.spec.model_source_config
    if source.model_source_type == "fsx" and not section(source.fsx_storage).get("mountName"):
        yield (
            "spec.modelSourceConfig.fsxStorage.mountName: is not given; fsx is rendered, which holds for "
            "file systems of type SCRATCH_1 only"
        )
