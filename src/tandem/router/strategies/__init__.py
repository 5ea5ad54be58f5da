"""Strategies choose one engine among candidates. Small classes without I/O; their memory is bounded."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tandem.config import RouterConfig
from tandem.router.strategies.base import Choice, Prompt, Strategy
from tandem.router.strategies.chain import Space
from tandem.router.strategies.decoder import DecoderLoad, DecoderScore, OutputEstimate
from tandem.router.strategies.kv_index import KvIndex
from tandem.router.strategies.kvaware import KvAware, KvPrefixes
from tandem.router.strategies.leastloaded import LeastLoaded
from tandem.router.strategies.prefixaware import PrefixAware
from tandem.router.strategies.prefixes import Prefixes
from tandem.router.strategies.roundrobin import RoundRobin
from tandem.router.strategies.sent_index import SentIndex, all_at_once
from tandem.router.strategies.session import Session

__all__ = [
    "Choice",
    "DecoderLoad",
    "DecoderScore",
    "KvAware",
    "KvIndex",
    "KvPrefixes",
    "LeastLoaded",
    "Made",
    "OutputEstimate",
    "PrefixAware",
    "Prompt",
    "RoundRobin",
    "SentIndex",
    "Session",
    "Space",
    "Strategy",
    "make",
]

_SPAN_TOKENS = 64


@dataclass(frozen=True)
class Made:
    """A strategy made for one router, and what it knows of caches, which the choice of decoders uses too."""

    strategy: Strategy
    prefixes: Prefixes | None = None
    index: KvIndex | None = None
    """To be fed with KV events."""


def make(config: RouterConfig, later: Callable[[Iterator[None]], None] = all_at_once) -> Made:
    """The strategy that a router is configured with. `later`: see SentIndex."""
    size = config.kv_block_size
    sent = SentIndex(
        size, stride=max(1, _SPAN_TOKENS // size), cache_tokens=lambda e: e.cache_tokens, later=later
    )
    match config.routing_strategy:
        case "roundrobin":
            return Made(RoundRobin(), sent if config.uncached_threshold else None)
        case "session":
            return Made(Session(), sent if config.uncached_threshold else None)
    if config.routing_strategy == "prefixaware":
        return Made(PrefixAware(sent), sent)
    index = KvIndex(config.kv_index_blocks)
    prefixes = KvPrefixes(index, sent)
    return Made(KvAware(prefixes), prefixes, index)
