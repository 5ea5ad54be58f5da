"""Modes of LMCache in which its hand-offs go wrong: Tandem chooses none, and refuses to be asked for one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tandem.engine.errors import EngineError
from tandem.engine.kv_events import own_settings
from tandem.engine.pod_variables import lmcache_variable

_LAYERWISE = (
    "KV that goes layer by layer is not handed over: decoders compute it again, or the prefiller dies "
    "(LMCache #1174). Leave it out"
)
_ASYNC = (
    "in this mode a request without a hand-off kills the prefiller, and broken-off ones fill the decoders' "
    "buffers for good (LMCache #2847). Leave it out, or say sync"
)
_WRONG = {
    "use_layerwise": (("true", "1"), _LAYERWISE),
    "pd_backend_mode": (("async",), _ASYNC),
}
"""LMCache's settings, the values with which they are wrong, and why."""


def wrong_variable(name: str, value: Any) -> str | None:
    """What is wrong with a variable of engines that hand over; None: nothing."""
    key = next((key for key in _WRONG if name == lmcache_variable(key)), None)
    return None if key is None else _told(name, key, value)


def wrong_transfer(args: Sequence[str]) -> Iterator[str]:
    """What is wrong with settings of LMCache's in an engine's own `--kv-transfer-config`."""
    try:
        extra = own_settings(args, "--kv-transfer-config").get("kv_connector_extra_config")
    except EngineError:
        return  # no JSON, which is told
    given = extra if isinstance(extra, dict) else {}
    for key in _WRONG:
        if told := _told(f"lmcache.{key}", key, given.get(f"lmcache.{key}")):
            yield told


def _told(name: str, key: str, value: Any) -> str | None:
    values, why = _WRONG[key]
    if str(value).strip().strip("'\"").lower() not in values:
        return None
    return f"{name} is {value!r}: {why}"
