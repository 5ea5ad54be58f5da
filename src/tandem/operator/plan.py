"""Everything that is decided about an endpoint before objects are written down."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tandem.api import Endpoint, Role, Spec
from tandem.api.annotations import PREFIX, parse_annotations
from tandem.api.quantities import HUGE_PAGES
from tandem.engine import (
    KV_LEASE_SECONDS,
    ConnectorChoice,
    EngineError,
    choose_connector,
    flag_value,
    routing_strategy,
    wants_kv_events,
)
from tandem.engine.kv_cache import KvCache, kv_cache
from tandem.engine.kv_size import model_names, token_size
from tandem.engine.lmcache import equal_ranks, hand_off_step, receive_buffer
from tandem.engine.pd_buffer import VARIABLE, PdBuffer
from tandem.engine.pod_ports import MOST_LMCACHE_RANKS, taken_ports
from tandem.operator import sizes
from tandem.operator.errors import RenderError
from tandem.operator.names import Names
from tandem.operator.pools import Pool, disaggregated, pools
from tandem.operator.settings import Settings
from tandem.operator.wishes import (
    LoadBalancer,
    Metrics,
    instance_types,
    load_balancer,
    metrics,
    routed,
)


@dataclass(frozen=True)
class Plan:
    endpoint: Endpoint
    settings: Settings
    names: Names
    pools: tuple[Pool, ...]
    """Prefillers first; one of a colocated endpoint."""
    routed: bool
    connector: ConnectorChoice
    """How KV is handed over; of a colocated endpoint only whether LMCache is there."""
    strategy: str
    kv_events: bool
    cache: KvCache
    metrics: Metrics
    balancer: LoadBalancer
    buffer: PdBuffer | None
    """A decoder's receive buffer, with LMCache."""
    step_tokens: int | None
    """Tokens that LMCache's prefillers compute in one step."""
    times: sizes.Times
    api_keys_secret: str | None
    """The Secret with the router's API keys."""

    @property
    def spec(self) -> Spec:
        return self.endpoint.spec

    @property
    def disaggregated(self) -> bool:
        return self.endpoint.spec.pd_spec is not None

    @property
    def lmcache_pd(self) -> bool:
        """Whether prefillers push KV through LMCache."""
        return self.disaggregated and self.connector.name == "lmcache"

    @property
    def lmcache_colocated(self) -> bool:
        """Whether colocated workers keep KV in LMCache."""
        kept = self.cache.l1 or self.cache.redis_url is not None or self.cache.file is not None
        return not self.disaggregated and self.connector.name == "lmcache" and kept

    @property
    def context(self) -> int | None:
        """The longest context that every pool takes, in tokens."""
        return _context(self.pools)

    @property
    def port(self) -> int:
        """Where engines serve."""
        return self.endpoint.spec.worker.model_invocation_port.container_port

    def pool(self, role: Role) -> Pool:
        return next(pool for pool in self.pools if pool.role is role)

    def efa(self, pool: Pool) -> sizes.Efa | None:
        """The interfaces that a pool's pods get for hand-offs: as its resources say, else by the instance
        type."""
        if not self.disaggregated:
            return None
        if pool.efa is not None:
            reason = f"EFA: {pool.efa} interfaces, as the role's resources say"
            return sizes.Efa(pool.efa, 0, reason) if pool.efa else None
        types = instance_types(self.endpoint.spec)
        return sizes.efa(types, pool.gpus, hugepages=HUGE_PAGES not in pool.resources.get("limits", {}))

    @property
    def nixl_backend(self) -> str:
        """NIXL's plug-in. Both sides of a hand-off need the same, so EFA counts where all pods have it."""
        return "LIBFABRIC" if all(map(self.efa, self.pools)) else "UCX"

    @property
    def router_leaves(self) -> int:
        """Seconds in which a router that has to leave still takes requests. With LMCache the next one starts
        when it is gone, and must not wait."""
        return sizes.DRAIN_DELAY if self.lmcache_pd else sizes.ROUTER_DRAIN_DELAY

    def grace(self, pool: Pool) -> sizes.Grace:
        if pool.role is Role.PREFILL and not self.lmcache_pd:
            return sizes.grace(self.times, KV_LEASE_SECONDS, "until the last KV is fetched or its lease ends")
        return sizes.grace(self.times, 0, "")


def plan(endpoint: Endpoint, settings: Settings) -> Plan:
    """Raises RenderError where the resource leaves no way to make objects of it."""
    extensions, problems = parse_annotations(endpoint.metadata.annotations)
    if problems:
        raise RenderError("; ".join(map(str, problems)))
    spec = endpoint.spec
    try:
        found = pools(endpoint, extensions)
        connector = choose_connector(disaggregated(endpoint))
    except EngineError as error:
        raise RenderError(str(error)) from None
    made = Plan(
        endpoint=endpoint,
        settings=settings,
        names=Names(endpoint.metadata.name, endpoint.metadata.namespace, settings.system_namespace),
        pools=found,
        routed=routed(endpoint),
        connector=connector,
        strategy=routing_strategy(endpoint),
        kv_events=routed(endpoint) and wants_kv_events(endpoint),
        cache=kv_cache(spec),
        metrics=metrics(spec),
        balancer=load_balancer(spec),
        buffer=None,
        step_tokens=None,
        times=sizes.times(_context(found)),
        api_keys_secret=extensions.api_keys_secret,
    )
    if made.api_keys_secret is not None and not made.routed:
        where = f"metadata.annotations[{PREFIX}api-keys-secret]"
        raise RenderError(
            f"{where}: is for a router, and there is none; set spec.intelligentRoutingSpec.enabled"
        )
    made = _with_lmcache(made) if made.lmcache_pd else made
    _require_free_port(made)
    return made


def _require_free_port(made: Plan) -> None:
    taken = taken_ports(
        lmcache=made.lmcache_pd,
        kv_events=made.kv_events,
        tp=max(pool.flags.tp for pool in made.pools),
        dp=max(pool.flags.dp for pool in made.pools),
    )
    if made.port in taken:
        raise RenderError(
            f"spec.worker.modelInvocationPort.containerPort: is {made.port}, where the same pod has "
            f"{taken[made.port]}; use another, as 8000"
        )


def _with_lmcache(made: Plan) -> Plan:
    prefill, decode = made.pool(Role.PREFILL), made.pool(Role.DECODE)
    try:
        ranks = equal_ranks(prefill.flags.tp, decode.flags.tp)
    except EngineError as error:
        raise RenderError(str(error)) from None
    if ranks > MOST_LMCACHE_RANKS or max(p.flags.dp for p in made.pools) > 1:
        raise RenderError(
            f"spec.worker.args: LMCache hands over between engines of one data-parallel rank and at most "
            f"{MOST_LMCACHE_RANKS} tensor-parallel ones; use the connector nixl, or more replicas"
        )
    token = token_size(
        made.settings.model_config,
        model_names(made.endpoint),
        tp=ranks,
        kv_cache_dtype=flag_value(decode.args, "--kv-cache-dtype"),
    )
    try:
        buffer = receive_buffer(token, longest=made.context, given=decode.env_value(VARIABLE))
    except EngineError as error:
        raise RenderError(str(error)) from None
    step = prefill.flags.step_tokens or hand_off_step(made.context)
    return replace(made, buffer=buffer, step_tokens=step)


def _context(found: tuple[Pool, ...]) -> int | None:
    return min((pool.flags.context for pool in found if pool.flags.context), default=None)
