"""How KV cache goes from prefiller to decoder: the connector, and vLLM's `--kv-transfer-config` per role."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from tandem.api import ANNOTATION_CONNECTOR, Endpoint, Role
from tandem.api.annotations import parse_annotations
from tandem.engine.args import flag_value
from tandem.engine.errors import EngineError
from tandem.engine.pd_buffer import VARIABLE
from tandem.engine.roles import role_args

Accelerator = Literal["cpu", "cuda"]

KV_LEASE_SECONDS = 30
"""How long a prefiller keeps a finished prompt's KV blocks for its decoder, which renews the lease while it
waits. vLLM's own default, written out so that what depends on it reads it from one place."""

PULLING = ("NixlConnector", "NixlPullConnector", "CpuNixlConnector")
"""vLLM's connectors over which a decoder fetches KV by NIXL: they take the same settings and hand over
alike."""

_VLLM_NAMES = {
    "nixl": ("NixlConnector", "CpuNixlConnector"),
    "lmcache": ("LMCacheConnectorV1", "CpuLMCacheConnector"),
}
"""What vLLM calls a connector on a GPU and on a CPU, where it is one of tandem_vllm."""

_ROLES = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}


CONNECTORS = ("nixl", "lmcache")


@dataclass(frozen=True)
class ConnectorChoice:
    name: Literal["nixl", "lmcache"]
    reason: str
    asked: bool = False
    """Whether the resource asks for it by name."""


def choose_connector(endpoint: Endpoint) -> ConnectorChoice:
    """The KV connector of an endpoint and why: what the annotation names; by itself (`auto`) LMCache where
    the image, the flags or a variable tell that the engines have it, else NIXL. Raises EngineError for a name
    that is none."""
    asked = endpoint.metadata.annotations.get(ANNOTATION_CONNECTOR, "auto")
    match asked:
        case "nixl" | "lmcache":
            return ConnectorChoice(asked, f"{_SPELT[asked]}, by the annotation {ANNOTATION_CONNECTOR}", True)
        case "auto":
            told = _lmcache_in(endpoint)
            if told is not None:
                return ConnectorChoice("lmcache", f"LMCache, as {told}")
            return ConnectorChoice("nixl", "NIXL, the connector Tandem chooses")
    raise EngineError(
        f"metadata.annotations[{ANNOTATION_CONNECTOR}]: is {asked!r}; it is not a connector Tandem knows. "
        f"Use one of auto, {', '.join(CONNECTORS)}, or leave the annotation out."
    )


def startable_connector(
    choice: ConnectorChoice, *, lmcache: str | None
) -> tuple[ConnectorChoice, str | None]:
    """The connector that engines started here hand over with, and a note where it is not the one chosen.
    `lmcache`: the version that is installed beside vLLM.

    Raises EngineError when the resource asks by name for one that cannot be started.
    """
    if choice.name == "nixl" or lmcache is not None:
        return choice, None
    if choice.asked:
        raise EngineError(
            f"metadata.annotations[{ANNOTATION_CONNECTOR}]: is {choice.name!r}, and beside vLLM there is no "
            "LMCache. Install it (`make setup` does), use nixl, or leave the annotation out."
        )
    instead = ConnectorChoice("nixl", "NIXL, as there is no LMCache beside vLLM")
    return instead, f"{choice.reason}: replaced by NIXL, as there is no LMCache beside this machine's vLLM"


_SPELT = {"nixl": "NIXL", "lmcache": "LMCache"}


def _lmcache_in(endpoint: Endpoint) -> str | None:
    """What tells that the engines have LMCache.

    HyperPod's own image does not say so by its name, and its guide sets LMCache's variables with it: those
    begin with LMCACHE_, but for the receive buffer's. PYTHONHASHSEED is none: vLLM's own hashes use it, too.
    Where flags name another connector, variables may be left from before.
    """
    image = endpoint.spec.worker.image
    if "lmcache" in image.lower():
        return f"the image {image} carries it"
    others = False
    for role in Role:
        transfer = flag_value(role_args(endpoint, role), "--kv-transfer-config") or ""
        if "lmcache" in transfer.lower():
            return f"--kv-transfer-config of the {role.value} engines carries it"
        others = others or bool(transfer)
    names = () if others else _variables(endpoint)
    own = next((name for name in names if name == VARIABLE or name.startswith("LMCACHE_")), None)
    return own and f"the variable {own} is its own"


def _variables(endpoint: Endpoint) -> Iterator[str]:
    """Names of those of all engines and of those of one role."""
    yield from (variable.name for variable in endpoint.spec.worker.environment_variables)
    for own in parse_annotations(endpoint.metadata.annotations)[0].roles.values():
        yield from (variable["name"] for variable in own.env)


def kv_transfer_config(
    connector: ConnectorChoice,
    role: Role,
    accelerator: Accelerator,
    *,
    lease_seconds: int = KV_LEASE_SECONDS,
    name: str = "tandem",
) -> str:
    """The value of `--kv-transfer-config` for an engine of this role: one line of JSON.

    A transfer that fails is the request's failure (`fail`), not a silent recomputation on the decoder: the
    router decides what to do instead. `lease_seconds`, of NIXL, is at least 6: vLLM renews a lease every
    sixth of it. `name`: the engine's own on its machine, where LMCache's parts find each other by it.
    """
    if lease_seconds < 6:
        raise ValueError(f"lease_seconds is {lease_seconds}; it must be at least 6")
    stock, on_cpu = _VLLM_NAMES[connector.name]
    config: dict[str, Any] = {
        "kv_connector": on_cpu if accelerator == "cpu" else stock,
        "kv_role": _ROLES[role],
        "kv_load_failure_policy": "fail",
    }
    extra: dict[str, Any] = {"kv_lease_duration": lease_seconds}
    if connector.name == "lmcache":
        extra = {"discard_partial_chunks": False, "lmcache_rpc_port": name}
    elif accelerator == "cpu":
        config["kv_buffer_device"] = "cpu"
        extra["num_threads"] = 1  # NIXL's own worker threads: they compete with the engine's for its cores
    return json.dumps({**config, "kv_connector_extra_config": extra}, separators=(",", ":"))
