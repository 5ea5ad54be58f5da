"""Strategies choose one engine among candidates. Small classes without I/O; their memory is bounded."""

from collections.abc import Callable

from tandem.config import RouterConfig
from tandem.router.strategies.base import Choice, Prompt, Strategy
from tandem.router.strategies.chain import Space
from tandem.router.strategies.decoder import DecoderLoad, DecoderScore, OutputEstimate
from tandem.router.strategies.kv_index import KvIndex
from tandem.router.strategies.kvaware import KvAware
from tandem.router.strategies.leastloaded import LeastLoaded
from tandem.router.strategies.prefixaware import PrefixAware
from tandem.router.strategies.roundrobin import RoundRobin
from tandem.router.strategies.sent_index import SentIndex
from tandem.router.strategies.session import Session

__all__ = [
    "STRATEGIES",
    "Choice",
    "DecoderLoad",
    "DecoderScore",
    "KvAware",
    "KvIndex",
    "LeastLoaded",
    "OutputEstimate",
    "PrefixAware",
    "Prompt",
    "RoundRobin",
    "SentIndex",
    "Session",
    "Space",
    "Strategy",
]

_SPAN_TOKENS = 64


def _prefix_aware(config: RouterConfig) -> Strategy:
    size = config.kv_block_size
    return PrefixAware(SentIndex(size, stride=max(1, _SPAN_TOKENS // size)))


STRATEGIES: dict[str, Callable[[RouterConfig], Strategy]] = {
    "prefixaware": _prefix_aware,
    "session": lambda config: Session(),
    "roundrobin": lambda config: RoundRobin(),
}
"""Those that can be configured, each made for one router."""
