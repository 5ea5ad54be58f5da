"""The sources of engines that a configuration names."""

from __future__ import annotations

from tandem.config import EngineSpec, RouterConfig, dns_source, kubernetes_source
from tandem.router.discovery.base import Discovery, Member
from tandem.router.discovery.dns import DnsDiscovery
from tandem.router.discovery.file import FileDiscovery
from tandem.router.discovery.merged import MergedDiscovery
from tandem.router.discovery.static import StaticDiscovery
from tandem.router.engines import EngineRole

_FLAGS = {"prefill": EngineRole.PREFILL, "decode": EngineRole.DECODE, "engine": EngineRole.BOTH}


def discovery(config: RouterConfig) -> MergedDiscovery:
    """The engines of the command line, of `--discover-file`, of each `--discover-dns` and of
    `--discover-kubernetes`; of one that several name, the first in this order counts. Raises ValueError where
    a DNS name cannot be one."""
    sources: dict[str, Discovery] = {}
    given = [_placed(spec, role, config) for flag, role in _FLAGS.items() for spec in config.specs(flag)]
    if given:
        sources["command line"] = StaticDiscovery(given)
    if config.discover_file is not None:
        sources[f"file {config.discover_file}"] = FileDiscovery(
            config.discover_file, subscriptions=config.subscription
        )
    for text in config.discover_dns:
        role, name, port = dns_source(text)
        try:
            source = DnsDiscovery(EngineRole(role), name, port, subscriptions=config.subscription)
        except ValueError as error:
            raise ValueError(f"--discover-dns: {error}") from None
        sources[f"DNS {text}"] = source
    if config.discover_kubernetes is not None:
        # A client of the API server, which no other source needs.
        from tandem.router.discovery.kubernetes import KubernetesDiscovery

        sources[f"Kubernetes {config.discover_kubernetes}"] = KubernetesDiscovery(
            *kubernetes_source(config.discover_kubernetes),
            subscriptions=config.subscription,
            stale_after=config.discovery_stale_after,
        )
    return MergedDiscovery(sources)


def _placed(spec: EngineSpec, role: EngineRole, config: RouterConfig) -> Member:
    return Member(spec.url, role, labels=spec.labels, kv_events=config.subscription_of(spec))
