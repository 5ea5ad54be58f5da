"""Configuration that one part of Tandem renders and another reads."""

from tandem.config.router import (
    STRATEGIES,
    RouterConfig,
    add_router_arguments,
    flags_table,
    router_argv,
    router_config,
)

__all__ = [
    "STRATEGIES",
    "RouterConfig",
    "add_router_arguments",
    "flags_table",
    "router_argv",
    "router_config",
]
