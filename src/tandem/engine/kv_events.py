"""KV events: what an engine is told so that the routing strategy kvaware learns what its prefix cache holds.

Engines of both roles publish, as decoders are chosen by cached prefixes too. Nothing else is needed: prefix
caching is on by default in vLLM (V1), and PYTHONHASHSEED may differ, because events carry the tokens of each
block and the router does not compare engines' hashes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from tandem.api import Endpoint
from tandem.config import Subscription
from tandem.engine.args import Setting, settings, without
from tandem.engine.errors import EngineError
from tandem.engine.roles import routing_strategy

FLAG = "--kv-events-config"

EVENTS_PORT = 5557
"""Where an engine in a pod publishes: vLLM's own default."""

REPLAY_PORT = 6557
"""Where it repeats what was missed."""

MOST_RANKS = 43
"""Data-parallel ranks of one pod for which these ports do. vLLM adds the rank to each port, also to that of
NIXL's side channel: 5557 … 5599 stay below its 5600, and 6557 … 6599 meet neither."""

BUFFER_STEPS = 10_000
"""Batches that an engine keeps for replay, one for each step that changed its cache: vLLM's default. With
steps of 8,192 new tokens in blocks of 16 that is about 500 MB, and far less where most steps decode. A router
that starts learns from them what the cache took in over these steps."""


def wants_kv_events(endpoint: Endpoint) -> bool:
    """Whether the endpoint's routing strategy reads KV events."""
    return routing_strategy(endpoint) == "kvaware"


def pod_kv_events(ranks: int = 1) -> Subscription:
    """Where an engine in a pod of its own publishes, with so many data-parallel ranks in that pod. Raises
    EngineError where their ports would meet others."""
    if ranks > MOST_RANKS:
        raise EngineError(
            f"spec.worker.args or spec.pdSpec: --data-parallel-size {ranks}: with the strategy kvaware a pod "
            f"has at most {MOST_RANKS} ranks, as each publishes its KV events on a port of its own"
        )
    return Subscription(f"tcp://*:{EVENTS_PORT}", f"tcp://*:{REPLAY_PORT}", ranks)


def kv_events_config(where: Subscription, given: Mapping[str, Any] | None = None) -> str:
    """The value of `--kv-events-config` for an engine that publishes at `where`: one line of JSON.

    Of `given`, the engine's own settings, all stay but those that say whether and where it publishes.
    Raises ValueError for endpoints that vLLM would not bind, or that ranks would both take.
    """
    for endpoint in (where.events, where.replay):
        if endpoint is not None and not endpoint.startswith(("tcp://*:", "ipc://")):
            raise ValueError(f"{endpoint!r}: vLLM binds tcp://*:PORT and ipc://PATH; to others it connects")
    if where.events == where.replay or _meet(where):
        raise ValueError(f"{where.events} and {where.replay} meet with {where.ranks} ranks")
    config: dict[str, Any] = {
        "topic": "",
        "buffer_steps": BUFFER_STEPS,
        # For a router that does not read no more is kept than can be replayed; vLLM would keep ten times
        # that. What overflows is a gap, which the router fills by a replay.
        "hwm": BUFFER_STEPS,
        **(given or {}),
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": where.events,
        "replay_endpoint": where.replay,
    }
    return json.dumps(config, separators=(",", ":"))


def publishing_args(args: Iterable[str], where: Subscription) -> list[str]:
    """An engine's flags, with those by which it publishes at `where` in place of its own.

    Raises EngineError when its own are unreadable."""
    args = list(args)
    return [*without(args, [FLAG]), FLAG, kv_events_config(where, own_settings(args))]


def own_settings(args: Iterable[str], flag: str = FLAG) -> dict[str, Any]:
    """What an engine's own `--kv-events-config`, or another flag that takes JSON, says; one dotted key
    replaces what stands as JSON text, as in vLLM. Raises EngineError."""
    whole: dict[str, Any] = {}
    dotted: dict[str, Any] = {}
    for setting in settings(args):
        if setting.flag == flag and setting.path:
            dotted[".".join(setting.path)] = _dotted_value(setting)
        elif setting.flag == flag:
            whole = _object(setting)
    return dotted or whole


def _meet(where: Subscription) -> bool:
    """Whether a rank publishes where another one replays."""
    if where.replay is None or where.ranks == 1:
        return False
    events, replay = (int(endpoint.rpartition(":")[2]) for endpoint in (where.events, where.replay))
    return abs(events - replay) < where.ranks


def _object(setting: Setting) -> dict[str, Any]:
    try:
        value = json.loads(" ".join(setting.values))
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise EngineError(f"spec.worker.args or spec.pdSpec: {setting}: its value is not a JSON object")
    return value


def _dotted_value(setting: Setting) -> Any:
    text = " ".join(setting.values)
    try:
        return json.loads(text)
    except ValueError:
        return text
