"""How a router is told of an engine: where it is, what it is, where it publishes its KV events."""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

_HOST = re.compile(r"[a-z0-9_](?:[a-z0-9_.-]{0,251}[a-z0-9_.])?")
_EVENTS = ("kv-events", "kv-replay", "kv-ranks")  # what may stand among labels and is none
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_./-]{0,61}[A-Za-z0-9])?")


@dataclass(frozen=True)
class Subscription:
    """Where an engine publishes its KV events: the endpoints of its first rank; rank n has a port higher by
    n. A `*` for the host stands for the engine's own."""

    events: str
    replay: str | None = None
    ranks: int = 1

    def __post_init__(self) -> None:
        for endpoint in (self.events, self.replay):
            if endpoint is not None:
                _check_endpoint(endpoint, self.ranks)
        if not 1 <= self.ranks <= 4096:
            raise ValueError(f"{self.ranks} ranks are outside 1 … 4096")

    def of(self, rank: int) -> tuple[str, str | None]:
        """A rank's endpoints."""
        return _shifted(self.events, rank), None if self.replay is None else _shifted(self.replay, rank)

    @property
    def endpoints(self) -> frozenset[str]:
        """All endpoints of all ranks."""
        return frozenset(each for rank in range(self.ranks) for each in self.of(rank) if each is not None)

    def at(self, host: str) -> Subscription:
        """The subscription of an engine on a host."""
        replay = None if self.replay is None else _placed(self.replay, host)
        return Subscription(_placed(self.events, host), replay, self.ranks)


@dataclass(frozen=True)
class EngineSpec:
    """One engine. `labels` are sorted pairs, which makes specifications comparable."""

    url: str
    labels: tuple[tuple[str, str], ...] = ()
    kv_events: Subscription | None = None

    @property
    def text(self) -> str:
        """What `engine_spec` reads."""
        parts = [self.url, *(f"{name}={value}" for name, value in self.labels)]
        if self.kv_events is not None:
            parts.append(f"kv-events={self.kv_events.events}")
            if self.kv_events.replay is not None:
                parts.append(f"kv-replay={self.kv_events.replay}")
            if self.kv_events.ranks > 1:
                parts.append(f"kv-ranks={self.kv_events.ranks}")
        return ",".join(parts)


def engine_url(text: str) -> str:
    """`http://host:port` of an engine; a ValueError says what is wrong with anything else."""
    parts = urlsplit(text)
    if parts.scheme != "http":
        raise ValueError(f"{text!r} is not an http:// URL (engines are reached without TLS)")
    try:
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None
    host = parts.hostname
    if not host or not port:
        raise ValueError(f"{text!r} needs a host and a port, as in http://10.0.0.7:8081")
    if parts.path not in ("", "/") or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError(f"{text!r} must be a bare origin, as in http://10.0.0.7:8081")
    if not (_HOST.fullmatch(host) or _is_ipv6(host)):
        raise ValueError(f"{text!r}: {host!r} is no name or address of a host")
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def listening_host(text: str) -> str:
    """A name or address to listen on; else a ValueError."""
    if not (_HOST.fullmatch(text.lower()) or _is_ipv6(text)):
        raise ValueError(
            f"{text!r} is no name or address of a host, as 127.0.0.1; for all addresses give 0.0.0.0 or ::"
        )
    return text


def engine_labels(given: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Labels, checked and sorted. Raises ValueError."""
    for name, value in given.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a label's name: letters, digits, _ . / - (63 at most)")
        if len(value) > 256 or not value.isprintable():
            raise ValueError(f"label {name!r}: its value must be at most 256 printable characters")
    return tuple(sorted(given.items()))


def engine_spec(text: str) -> EngineSpec:
    """`URL[,NAME=VALUE…]`: labels, and `kv-events`, `kv-replay` and `kv-ranks` for its events. Raises
    ValueError."""
    url, *rest = text.split(",")
    given: dict[str, str] = {}
    for part in rest:
        name, equals, value = part.partition("=")
        if not equals or name in given:
            raise ValueError(f"{text!r}: after the URL come NAME=VALUE, each name once; not {part!r}")
        if name not in _EVENTS and (near := difflib.get_close_matches(name[:100], _EVENTS, 1, 0.8)):
            raise ValueError(f"{text!r}: {name} would be a label; did you mean {near[0]}?")
        given[name] = value
    events, replay = given.pop("kv-events", None), given.pop("kv-replay", None)
    ranks = given.pop("kv-ranks", "1")
    if events is None and (replay is not None or ranks != "1"):
        raise ValueError(f"{text!r}: kv-replay and kv-ranks go with kv-events")
    if not (ranks.isascii() and ranks.isdigit()):
        raise ValueError(f"{text!r}: kv-ranks={ranks} is not a whole number")
    subscription = None if events is None else Subscription(events, replay, int(ranks))
    return EngineSpec(engine_url(url), engine_labels(given), subscription)


def engine_text(text: str) -> str:
    """What `engine_spec` reads, checked and in one form."""
    return engine_spec(text).text


def _check_endpoint(endpoint: str, ranks: int) -> None:
    parts = urlsplit(endpoint)
    if parts.scheme == "ipc" and (parts.netloc or parts.path):
        if ranks > 1:
            raise ValueError(f"{endpoint!r} has no port, so its ranks cannot be told apart")
        return
    try:
        fits = parts.scheme == "tcp" and parts.hostname and parts.port and parts.port + ranks - 1 <= 65535
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"{endpoint!r} is not tcp://HOST:PORT (HOST may be *) or ipc://PATH")


def _placed(endpoint: str, host: str) -> str:
    if not endpoint.startswith("tcp://*:"):
        return endpoint
    return endpoint.replace("*", f"[{host}]" if ":" in host else host, 1)


def _shifted(endpoint: str, rank: int) -> str:
    """As vLLM: the port of a tcp endpoint grows with the rank."""
    if rank == 0:
        return endpoint
    before, _, port = endpoint.rpartition(":")
    return f"{before}:{int(port) + rank}"
