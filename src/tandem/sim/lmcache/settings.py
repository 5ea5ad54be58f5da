"""LMCache's configuration as LMCache 0.5.6 reads it.

Each later one overrides: the YAML file that LMCACHE_CONFIG_FILE names (or nothing), variables
`LMCACHE_<KEY>`, and `lmcache.<key>` in `kv_connector_extra_config`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from tandem.sim.args import KvTransfer, UsageError

logger = logging.getLogger("tandem.sim")

RETRY_SECONDS = 0.01
"""How often LMCache tries again to get a chunk of a full buffer."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One engine's side of LMCache PD. Ports are one for each tensor-parallel rank."""

    role: Literal["sender", "receiver"]
    buffer_bytes: int
    """`pd_buffer_size` of one rank: a receiver's for what it is sent, a sender's for what is on its way."""
    chunk_size: int = 256
    """Tokens."""
    peer_host: str = "127.0.0.1"
    init_ports: tuple[int, ...] = ()
    alloc_ports: tuple[int, ...] = ()
    proxy: tuple[str, int] | None = None
    """Where a sender says that KV has been written; None: it does not (`pd_skip_proxy_notification`)."""
    hash_seed: str | None = None
    """PYTHONHASHSEED; None: keys are this engine's own, and nobody else's match them."""
    save_partial_chunks: bool = True
    skip_last_tokens: int = 0
    """Tokens at the prompt's end that are not looked up (`skip_last_n_tokens`)."""
    retry_seconds: float = RETRY_SECONDS
    active: bool = True
    """Whether `kv_role` lets it do its work: a sender must not be a consumer, nor a receiver a producer."""

    def transfer_config(self) -> dict[str, Any]:
        """These settings as `--kv-transfer-config`; the hash seed is the environment's."""
        extra: dict[str, Any] = {
            "discard_partial_chunks": not self.save_partial_chunks,
            "lmcache.save_unfull_chunk": True,
            "lmcache.enable_pd": True,
            "lmcache.pd_backend_mode": "sync",
            "lmcache.pd_role": self.role,
            "lmcache.pd_buffer_size": self.buffer_bytes,
            "lmcache.pd_buffer_device": "cpu",
            "lmcache.chunk_size": self.chunk_size,
        }
        if self.role == "receiver":
            extra |= {
                "skip_last_n_tokens": self.skip_last_tokens,
                "lmcache.pd_peer_host": self.peer_host,
                "lmcache.pd_peer_init_port": list(self.init_ports),
                "lmcache.pd_peer_alloc_port": list(self.alloc_ports),
            }
        elif self.proxy is not None:
            extra |= {"lmcache.pd_proxy_host": self.proxy[0], "lmcache.pd_proxy_port": self.proxy[1]}
        else:
            extra["lmcache.pd_skip_proxy_notification"] = True
        return {
            "kv_connector": "LMCacheConnectorV1",
            "kv_role": "kv_consumer" if self.role == "receiver" else "kv_producer",
            "kv_connector_extra_config": extra,
        }

    def disagg_spec(self, req_id: str) -> dict[str, Any]:
        """What a prefill leg names this receiver by."""
        return {
            "req_id": req_id,
            "receiver_host": self.peer_host,
            "receiver_init_port": list(self.init_ports),
            "receiver_alloc_port": list(self.alloc_ports),
        }


def read(
    transfer: KvTransfer, environment: Mapping[str, str], *, ranks: int, offset: int = 0
) -> Settings | None:
    """None where PD is off. `offset` engines of this process come before this one: its ports count up from
    theirs. Raises UsageError where LMCache would not start."""
    values = _values(transfer.extra, environment)
    if not values.get("enable_pd"):
        return None
    missing = [k for k in ("pd_role", "pd_buffer_size", "pd_buffer_device") if values.get(k) is None]
    role = values.get("pd_role")
    if role == "receiver":
        wanted = ("pd_peer_host", "pd_peer_init_port", "pd_peer_alloc_port")
        missing += [k for k in wanted if values.get(k) is None]
    notifies = role == "sender" and not values.get("pd_skip_proxy_notification")
    if notifies:
        missing += [k for k in ("pd_proxy_host", "pd_proxy_port") if values.get(k) is None]
    if missing:
        raise UsageError(f"LMCache: enable_pd needs {', '.join(missing)}")
    if role not in ("sender", "receiver"):
        raise UsageError(f"LMCache: pd_role: {role!r} is not simulated; there are sender and receiver")
    if values.get("pd_backend_mode", "async") != "sync":
        logger.warning(
            "LMCache: pd_backend_mode is async, LMCache's default; the simulator behaves as in sync"
        )
    ports = {k: values.get(k) or () for k in ("pd_peer_init_port", "pd_peer_alloc_port")}
    for name, given in ports.items():
        if role == "receiver" and len(given) < ranks:
            raise UsageError(f"LMCache: {name}: {len(given)} ports for {ranks} tensor-parallel ranks")
    extra = transfer.extra
    return Settings(
        role=role,
        buffer_bytes=values["pd_buffer_size"],
        chunk_size=values.get("chunk_size", 256),
        peer_host=str(values.get("pd_peer_host") or "127.0.0.1"),
        init_ports=tuple(port + offset * ranks for port in ports["pd_peer_init_port"]),
        alloc_ports=tuple(port + offset * ranks for port in ports["pd_peer_alloc_port"]),
        proxy=(values["pd_proxy_host"], values["pd_proxy_port"]) if notifies else None,
        hash_seed=environment.get("PYTHONHASHSEED"),
        save_partial_chunks=values["save_unfull_chunk"] and not extra.get("discard_partial_chunks", False),
        skip_last_tokens=int(extra.get("skip_last_n_tokens", 0)),
        active=transfer.role != ("kv_consumer" if role == "sender" else "kv_producer"),
    )


def _int(value: Any) -> int:
    return int(value)


def _ints(value: Any) -> list[int]:
    """LMCache takes a list, one number, or numbers with commas between."""
    if isinstance(value, list):
        return [int(v) for v in value]
    return [int(v) for v in str(value).split(",") if v.strip()]


def _bool(value: Any) -> bool:
    return value if isinstance(value, bool) else str(value).strip().lower() in ("true", "1")


_KEYS: Mapping[str, Callable[[Any], Any]] = {
    "chunk_size": _int,
    "enable_pd": _bool,
    "pd_role": str,
    "pd_buffer_size": _int,
    "pd_buffer_device": str,
    "pd_peer_host": str,
    "pd_peer_init_port": _ints,
    "pd_peer_alloc_port": _ints,
    "pd_proxy_host": str,
    "pd_proxy_port": _int,
    "pd_backend_mode": str,
    "pd_skip_proxy_notification": _bool,
    "save_unfull_chunk": _bool,
}
"""What counts here; LMCache has many keys more."""


def _values(extra: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    if path := environment.get("LMCACHE_CONFIG_FILE"):
        given = _file(path)
    for key in _KEYS:
        if (text := environment.get(f"LMCACHE_{key.upper()}")) is not None:
            given[key] = _unquoted(text)
    values = _converted(given)
    # LMCache turns this on with PD, but looks before it reads vLLM's extra configuration.
    values["save_unfull_chunk"] = bool(values.get("save_unfull_chunk") or values.get("enable_pd"))
    own = {k.removeprefix("lmcache."): v for k, v in extra.items() if k.startswith("lmcache.")}
    return values | _converted(own)


def _file(path: str) -> dict[str, Any]:
    try:
        loaded = yaml.safe_load(Path(path).read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(f"LMCACHE_CONFIG_FILE: {path}: {error}") from None
    if not isinstance(loaded, dict):
        raise UsageError(f"LMCACHE_CONFIG_FILE: {path}: is not a mapping")
    return loaded


def _unquoted(text: str) -> str:
    text = text.strip()
    return text[1:-1] if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"" else text


def _converted(given: Mapping[str, Any]) -> dict[str, Any]:
    values = {}
    for key, convert in _KEYS.items():
        if (value := given.get(key)) is not None:
            try:
                values[key] = convert(value)
            except ValueError:
                raise UsageError(f"LMCache: {key}: {value!r} is not valid") from None
    return values
