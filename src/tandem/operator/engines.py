"""What the model container of a pool is started with: vLLM's flags and its environment."""

from __future__ import annotations

import json
from typing import Any

from tandem.api import Role, conventions
from tandem.engine import (
    EngineError,
    has_flag,
    kv_events_config,
    kv_transfer_config,
    pod_kv_events,
    pod_variables,
    without,
)
from tandem.engine.kv_events import FLAG as KV_EVENTS
from tandem.engine.kv_events import own_settings
from tandem.engine.kv_transfer import PULLING
from tandem.engine.lmcache import BACKEND_MODE, as_variables, hand_off_flags
from tandem.engine.roles import model_argument
from tandem.operator import names
from tandem.operator.errors import RenderError
from tandem.operator.lmcache import pd_settings
from tandem.operator.plan import Plan
from tandem.operator.pools import Pool
from tandem.operator.texts import literal
from tandem.operator.weights import downloaded_by_engine
from tandem.operator.wishes import section

TRANSFER = "--kv-transfer-config"

_OWN_TRANSFER = ("kv_connector", "kv_connector_module_path", "kv_buffer_device", "kv_buffer_size")
"""Its settings that are one engine's own business."""

LMCACHE_FILE = f"{conventions.LMCACHE_FOLDER}/lmcache.yaml"

_POD_IP = f"$({pod_variables.POD_IP})"

_EFA_ENVIRONMENT = {
    "FI_PROVIDER": "efa",
    "FI_EFA_USE_DEVICE_RDMA": "1",  # reads and writes GPU memory itself, without a copy through the host
    # Libfabric would hand over to a pod on the same node through /dev/shm, which pods do not share.
    "FI_EFA_ENABLE_SHM_TRANSFER": "0",
}

# What engines log of how KV goes, for the endpoint's status, as they start and at their first hand-off: UCX a
# table of seven lines for each kind of connection and transfer (reads are ucp_get, writes ucp_put); libfabric
# its devices. On stdout UCX would keep the tables back until some 4 KB have come together.
_TELLING_UCX = {"UCX_PROTO_INFO": "*ucp_[gp][eu]t[*]*", "UCX_LOG_FILE": "stderr"}
_TELLING_LIBFABRIC = {"NIXL_LOG_LEVEL": "INFO"}


def arguments(plan: Plan, pool: Pool) -> list[str]:
    """The arguments of the model container: the resource's flags, and those that the endpoint needs."""
    args = list(pool.given_args)
    if _is_vllm(plan) and not has_flag(pool.args, "--port"):
        args += ["--port", str(plan.port)]
    if plan.routed:  # so it is vLLM
        args += _model(plan, pool)
    if plan.routed and not has_flag(pool.args, "--enable-prompt-tokens-details"):
        args += ["--enable-prompt-tokens-details"]  # usage tells how many prompt tokens came from a cache
    if plan.disaggregated:
        args = _handing_over(plan, pool, args)
    elif plan.lmcache_colocated and not has_flag(pool.args, TRANSFER):
        args += [TRANSFER, _json({"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"})]
    if plan.kv_events:
        try:
            where = pod_kv_events(pool.flags.dp)
            # Its own settings are read with what Kubernetes is to fill in.
            config = kv_events_config(where, own_settings(pool.args))
        except EngineError as error:
            raise RenderError(str(error)) from None
        args = [*without(args, [KV_EVENTS]), KV_EVENTS, config]
    return args


def _is_vllm(plan: Plan) -> bool:
    """Whether flags of vLLM can be added. A worker without a router, a command and flags may be any server:
    its image says what is started, and arguments of ours would be in the place of that."""
    worker = plan.spec.worker
    return bool(plan.routed or plan.lmcache_colocated or worker.command or worker.args)


def _model(plan: Plan, pool: Pool) -> list[str]:
    """The model where no flag names it, as vLLM would else take one of its own; its name is then modelName,
    as the router expects. And the commit, where the engine downloads the model."""
    source = plan.spec.model_source_config
    hub = section(source.hugging_face_model) if downloaded_by_engine(plan) else {}
    named = model_argument(pool.args)
    flags: list[str] = []
    if named is None:
        folder = plan.spec.worker.model_volume_mount.mount_path
        flags += ["--model", literal(hub.get("modelId") or folder)]
        if not has_flag(pool.args, "--served-model-name"):
            flags += ["--served-model-name", literal(plan.spec.model_name)]
    pinned = hub.get("commitSHA") if named in (None, hub.get("modelId")) else None
    return flags + (["--revision", pinned] if pinned and not has_flag(pool.args, "--revision") else [])


def _handing_over(plan: Plan, pool: Pool, args: list[str]) -> list[str]:
    assert pool.role is not None
    args = without(args, [TRANSFER])
    if plan.lmcache_pd:
        assert plan.step_tokens is not None
        args = hand_off_flags(pool.role, args, plan.step_tokens)
    return [*args, TRANSFER, transfer_config(plan, pool)]


def transfer_config(plan: Plan, pool: Pool) -> str:
    """The value of `--kv-transfer-config` for a role."""
    assert pool.role is not None
    if plan.lmcache_pd:
        name = "producer1" if pool.role is Role.PREFILL else "consumer1"
        return kv_transfer_config(plan.connector, pool.role, "cuda", name=name)
    config = json.loads(kv_transfer_config(plan.connector, pool.role, "cuda"))
    config["kv_connector_extra_config"]["backends"] = [plan.nixl_backend]
    own = own_transfer(plan, pool)
    extra = own.pop("kv_connector_extra_config", {}) | config.pop("kv_connector_extra_config")
    return _json({**config, **own, "kv_connector_extra_config": extra})


def own_transfer(plan: Plan, pool: Pool) -> dict[str, Any]:
    """What stays of the resource's own `--kv-transfer-config`: which of the connectors that hand over alike,
    and settings of one engine alone, such as NIXL's threads. Nothing where it is for another connector."""
    if plan.lmcache_pd:
        return {}
    try:
        own = own_settings(pool.given_args, TRANSFER)
    except EngineError as error:
        raise RenderError(str(error)) from None
    if own.get("kv_connector", PULLING[0]) not in PULLING:
        return {}
    kept = {name: own[name] for name in _OWN_TRANSFER if name in own}
    extra = own.get("kv_connector_extra_config")
    return kept | ({"kv_connector_extra_config": extra} if isinstance(extra, dict) and extra else {})


def environment(plan: Plan, pool: Pool) -> list[dict[str, Any]]:
    """The variables of the model container, as Kubernetes' EnvVars: defaults, the resource's, and those that
    cannot be otherwise."""
    owned = pod_variables.owned_variables(
        plan.connector.name, disaggregated=plan.disaggregated, cached=plan.lmcache_colocated
    )
    kept = [v.model_dump(by_alias=True, exclude_unset=True) for v in pool.env if v.name not in owned]
    said = {v["name"] for v in kept}
    defaults = [{"name": n, "value": v} for n, v in _defaults(plan, pool).items() if n not in said]
    # The pod's own address comes first: variables may refer to those before them.
    return [pod_field(pod_variables.POD_IP, "status.podIP"), *defaults, *kept, *_owned(plan, pool)]


def _defaults(plan: Plan, pool: Pool) -> dict[str, str]:
    variables = {
        "DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONHASHSEED": pod_variables.DEFAULT_HASH_SEED,
    }
    if not plan.settings.workers_as_root:
        # Caches of compiled kernels are kept in the home folder, and the image has none for this user.
        variables |= {"HOME": "/tmp", "USER": "tandem"}
    if plan.connector.name == "lmcache":
        variables["LMCACHE_TRACK_USAGE"] = "false"
    if plan.disaggregated:
        efa = plan.nixl_backend == "LIBFABRIC"
        variables |= {**_EFA_ENVIRONMENT, **_TELLING_LIBFABRIC} if efa else _TELLING_UCX
    return variables


def _owned(plan: Plan, pool: Pool) -> list[dict[str, Any]]:
    variables: list[dict[str, Any]] = []
    if plan.disaggregated and not plan.lmcache_pd:
        variables += [
            {"name": pod_variables.SIDE_CHANNEL_HOST, "value": _POD_IP},
            {"name": pod_variables.SIDE_CHANNEL_PORT, "value": str(names.SIDE_CHANNEL_PORT)},
        ]
    if plan.lmcache_pd or plan.lmcache_colocated:
        file = literal(plan.cache.file or LMCACHE_FILE)
        variables.append({"name": pod_variables.LMCACHE_FILE, "value": file})
    if plan.lmcache_pd:
        keys: dict[str, Any] = dict(BACKEND_MODE)
        if pool.role is Role.DECODE:
            keys["pd_peer_host"] = _POD_IP
        if plan.cache.file is not None:
            keys |= pd_settings(plan, pool)
        variables += [{"name": name, "value": value} for name, value in as_variables(keys).items()]
    return variables


def pod_field(name: str, path: str) -> dict[str, Any]:
    """A variable with a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
