"""What the engines of an endpoint are started with: pure functions from (endpoint, role, machine)."""

from tandem.engine.args import flag_value, flag_values, has_flag, int_value, merge_args, switch, without
from tandem.engine.detect import detect
from tandem.engine.errors import EngineError, MachineError
from tandem.engine.kv_events import kv_events_config, pod_kv_events, wants_kv_events
from tandem.engine.kv_transfer import (
    KV_LEASE_SECONDS,
    Accelerator,
    ConnectorChoice,
    choose_connector,
    kv_transfer_config,
    startable_connector,
)
from tandem.engine.launch import EngineLaunch, EnginePlan, EnginePorts, hand_off_ranks, plan
from tandem.engine.machine import Core, CoreShares, Machine, share_cores, share_gpus
from tandem.engine.roles import (
    engine_count,
    int_flag,
    max_model_len,
    model_argument,
    role_args,
    routing_strategy,
    served_model_name,
)

__all__ = [
    "KV_LEASE_SECONDS",
    "Accelerator",
    "ConnectorChoice",
    "Core",
    "CoreShares",
    "EngineError",
    "EngineLaunch",
    "EnginePlan",
    "EnginePorts",
    "Machine",
    "MachineError",
    "choose_connector",
    "detect",
    "engine_count",
    "flag_value",
    "flag_values",
    "hand_off_ranks",
    "has_flag",
    "int_flag",
    "int_value",
    "kv_events_config",
    "kv_transfer_config",
    "max_model_len",
    "merge_args",
    "model_argument",
    "plan",
    "pod_kv_events",
    "role_args",
    "routing_strategy",
    "served_model_name",
    "share_cores",
    "share_gpus",
    "startable_connector",
    "switch",
    "wants_kv_events",
    "without",
]
