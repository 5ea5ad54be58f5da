"""Configuration that one part of Tandem renders and another reads."""

from tandem.config.effects import without_effect
from tandem.config.engines import EngineSpec, Subscription, engine_labels, engine_spec, engine_url
from tandem.config.flags import add_router_arguments, flags_tables, router_argv, router_config
from tandem.config.router import DECODING_PATH, STRATEGIES, RouterConfig
from tandem.config.values import dns_source, kubernetes_source

__all__ = [
    "DECODING_PATH",
    "STRATEGIES",
    "EngineSpec",
    "RouterConfig",
    "Subscription",
    "add_router_arguments",
    "dns_source",
    "engine_labels",
    "engine_spec",
    "engine_url",
    "flags_tables",
    "kubernetes_source",
    "router_argv",
    "router_config",
    "without_effect",
]
