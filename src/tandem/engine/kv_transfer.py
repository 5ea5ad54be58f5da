"""How KV cache goes from prefiller to decoder: the connector, and vLLM's `--kv-transfer-config` per role."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from tandem.api import ANNOTATION_CONNECTOR, Endpoint, Role
from tandem.engine.errors import EngineError

Accelerator = Literal["cpu", "cuda"]

KV_LEASE_SECONDS = 30
"""How long a prefiller keeps a finished prompt's KV blocks for its decoder, which renews the lease while it
waits. vLLM's own default, written out so that what depends on it reads it from one place."""

_ROLES = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}


@dataclass(frozen=True)
class ConnectorChoice:
    name: Literal["nixl"]
    reason: str


def choose_connector(endpoint: Endpoint) -> ConnectorChoice:
    """The KV connector of an endpoint and why. Raises EngineError for one that Tandem does not run yet."""
    asked = endpoint.metadata.annotations.get(ANNOTATION_CONNECTOR, "auto")
    match asked:
        case "auto":
            return ConnectorChoice("nixl", "NIXL, the connector Tandem chooses")
        case "nixl":
            return ConnectorChoice("nixl", f"NIXL, by the annotation {ANNOTATION_CONNECTOR}")
        case "lmcache":
            hint = "Tandem does not hand off through LMCache yet"
        case _:
            hint = "it is not a connector Tandem knows"
    raise EngineError(
        f"metadata.annotations[{ANNOTATION_CONNECTOR}]: is {asked!r}; {hint}. "
        "Use nixl, or leave the annotation out."
    )


def kv_transfer_config(
    connector: ConnectorChoice, role: Role, accelerator: Accelerator, *, lease_seconds: int = KV_LEASE_SECONDS
) -> str:
    """The value of `--kv-transfer-config` for an engine of this role: one line of JSON.

    A transfer that fails is the request's failure (`fail`), not a silent recomputation on the decoder: the
    router decides what to do instead. `lease_seconds` is at least 6: vLLM renews a lease every sixth of it.
    """
    if lease_seconds < 6:
        raise ValueError(f"lease_seconds is {lease_seconds}; it must be at least 6")
    config: dict[str, Any] = {
        "kv_connector": "NixlConnector",
        "kv_role": _ROLES[role],
        "kv_load_failure_policy": "fail",
    }
    extra: dict[str, Any] = {"kv_lease_duration": lease_seconds}
    if accelerator == "cpu":
        config["kv_connector"] = "CpuNixlConnector"  # registered by the entry point of tandem_vllm
        config["kv_buffer_device"] = "cpu"
        extra["num_threads"] = 1  # NIXL's own worker threads: they compete with the engine's for its cores
    return json.dumps({**config, "kv_connector_extra_config": extra}, separators=(",", ":"))
