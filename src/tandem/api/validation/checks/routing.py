"""How requests are routed and limited, and what is cached: sections that need one another."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.api.conventions import PLAIN_PATH, is_plain_path
from tandem.api.validation.report import Found
from tandem.api.validation.subject import Subject, location

_ROUTING = "spec.intelligentRoutingSpec"
_CACHE = "spec.kvCacheSpec"
_LIMITS = "spec.worker.requestLimits"


def routing_checks(subject: Subject) -> Iterator[Found]:
    yield from _router(subject)
    yield from _paths(subject)
    yield from _caches(subject)
    yield from _limits(subject)
    yield from _metrics(subject)


def _router(subject: Subject) -> Iterator[Found]:
    enabled = subject.get(f"{_ROUTING}.enabled")
    if subject.disaggregated and enabled is False:
        yield Found(
            "IEC504",
            location(f"{_ROUTING}.enabled"),
            "has no effect with pdSpec: such an endpoint always has a router; take it out",
        )
    if not subject.routed:
        for name in ("routingStrategy", "autoScalingSpec"):
            if subject.has(f"{_ROUTING}.{name}"):
                yield Found(
                    "IEC505",
                    location(f"{_ROUTING}.{name}"),
                    f"has no effect without a router; set {_ROUTING}.enabled",
                )
    decoders = subject.number("spec.pdSpec.decodingSpec.replicas")
    if decoders is not None and decoders > 1:
        yield Found(
            "IEC601",
            location("spec.pdSpec.decodingSpec.replicas"),
            f"is {decoders}: Tandem spreads requests over them; HyperPod has one decoder an endpoint",
        )


def _paths(subject: Subject) -> Iterator[Found]:
    path = subject.text("spec.invocationEndpoint", "invocations")
    health = subject.text("spec.loadBalancer.healthCheckPath")
    at = location("spec.invocationEndpoint")
    given = {
        "spec.invocationEndpoint": f"/{path.strip('/')}",
        "spec.loadBalancer.healthCheckPath": health,
        "spec.metrics.modelMetrics.path": subject.text("spec.metrics.modelMetrics.path"),
    }
    for field, value in given.items():
        if value.startswith("/") and not is_plain_path(value):  # else it is the schema's matter
            said = f"must be {PLAIN_PATH} (it is {subject.text(field)!r})"
            yield Found("IEC235", location(field), said)
    if not path.strip("/"):
        yield Found(
            "IEC712", at, "is the root, below which everything lies; name a path, as v1/chat/completions"
        )
    elif (
        subject.routed
        and subject.text(f"{_ROUTING}.routingStrategy") == "kvaware"
        and ("chat" in path or not path.endswith("completions"))
    ):
        yield Found(
            "IEC603",
            at if subject.has("spec.invocationEndpoint") else location(f"{_ROUTING}.routingStrategy"),
            f"HyperPod's kvaware works for v1/completions alone, and this endpoint's path is {path}; "
            f"Tandem's works for "
            "chat too",
        )


def _caches(subject: Subject) -> Iterator[Found]:
    file = subject.text(f"{_CACHE}.cacheConfigFile")
    for name in ("enableL1Cache", "enableL2Cache", "l2CacheSpec"):
        if file and subject.has(f"{_CACHE}.{name}"):
            yield Found(
                "IEC509",
                location(f"{_CACHE}.{name}"),
                "has no effect beside cacheConfigFile, which says it all",
            )
    if file:
        return
    backend, url = (
        subject.text(f"{_CACHE}.l2CacheSpec.{name}") for name in ("l2CacheBackend", "l2CacheLocalUrl")
    )
    redis = "redis" in backend.lower()
    if not subject.flag(f"{_CACHE}.enableL2Cache", default=False):
        if subject.has(f"{_CACHE}.l2CacheSpec"):
            yield Found(
                "IEC508", location(f"{_CACHE}.l2CacheSpec"), "has no effect without enableL2Cache: true"
            )
    elif not backend:
        yield Found(
            "IEC507",
            location(f"{_CACHE}.enableL2Cache"),
            "has no effect without l2CacheSpec.l2CacheBackend: say redis or tieredstorage there",
        )
    elif redis and not url:
        yield Found(
            "IEC507",
            location(f"{_CACHE}.l2CacheSpec"),
            "has no effect without l2CacheLocalUrl, as redis://redis.team-a.svc.cluster.local:6379",
        )
    elif redis and "://" not in url:
        yield Found(
            "IEC507",
            location(f"{_CACHE}.l2CacheSpec.l2CacheLocalUrl"),
            f"has no effect: LMCache reads addresses that begin with redis://; write redis://{url}",
        )
    elif "tieredstorage" in backend.lower() and not redis:
        yield Found(
            "IEC513",
            location(f"{_CACHE}.l2CacheSpec.l2CacheBackend"),
            f"has no effect: {backend} is HyperPod's own store, which Tandem does not have; use redis",
        )
    elif subject.disaggregated and not subject.flag(f"{_CACHE}.enableL1Cache", default=True):
        yield Found(
            "IEC508",
            location(f"{_CACHE}.enableL2Cache"),
            "has no effect with pdSpec and without L1: LMCache's prefillers have L2 beside L1 alone. Set "
            "enableL1Cache: true",
        )
    known = ("redis", "tieredstorage")
    if backend.lower() not in known and any(name in backend.lower() for name in known):
        yield Found(
            "IEC717",
            location(f"{_CACHE}.l2CacheSpec.l2CacheBackend"),
            f"is {backend!r}; write redis or tieredstorage",
        )


def _limits(subject: Subject) -> Iterator[Found]:
    if not subject.object(_LIMITS):
        return
    if not subject.has(f"{_LIMITS}.maxConcurrentRequests"):
        yield Found(
            "IEC510",
            location(_LIMITS),
            "limits nothing without maxConcurrentRequests; set it, or take this out",
        )
    elif not subject.flag("spec.metrics.enabled", default=True):
        yield Found(
            "IEC607",
            location(_LIMITS),
            "has no effect on HyperPod with metrics.enabled: false, which takes the reverse proxy away "
            "that limits",
        )


def _metrics(subject: Subject) -> Iterator[Found]:
    if subject.flag("spec.metrics.enabled", default=True):
        return
    # The reverse proxy is there all the same, and hands the engine's metrics on.
    for path in ("spec.metrics.metricsScrapeIntervalSeconds", "spec.metricsCollectorResources"):
        if subject.has(path):
            yield Found("IEC514", location(path), "has no effect with metrics.enabled: false")
