"""How the engines of one machine hand over through LMCache, as they and their router have to know it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tandem.api import Endpoint, Role
from tandem.engine.args import flag_value
from tandem.engine.kv_size import count, model_names, token_size
from tandem.engine.lmcache import (
    BACKEND_MODE,
    Receiver,
    Sender,
    as_variables,
    equal_ranks,
    hand_off_settings,
    hand_off_step,
    receive_buffer,
)
from tandem.engine.machine import Machine
from tandem.engine.pd_buffer import VARIABLE, PdBuffer
from tandem.engine.pod_variables import DEFAULT_HASH_SEED
from tandem.engine.roles import int_flag, literal_environment, model_config

BUFFER_SHARE = 8
"""One part in this many of the available memory is room for receive and send buffers on a CPU, all engines
together: half of what KV caches take."""

DEFAULT_VARIABLES = {"PYTHONHASHSEED": DEFAULT_HASH_SEED, "LMCACHE_TRACK_USAGE": "false"}
"""What an engine with LMCache has unless the manifest says otherwise."""


@dataclass(frozen=True)
class LMCacheHandOff:
    buffer: PdBuffer
    """Of each rank of a decoder to receive, and of a prefiller to send from."""
    step_tokens: int
    """What a prefiller computes in one step; a longer prompt is computed by a decoder alone."""
    ranks: int
    """Tensor-parallel, of both roles."""
    host: str
    notify_port: int
    """Where prefillers tell the router that KV is there."""
    device: Literal["cpu", "cuda"]

    def variables(self, role: Role, init_ports: Sequence[int], alloc_ports: Sequence[int]) -> dict[str, str]:
        """What an engine is told that takes KV on these ports, if it is a decoder."""
        side: Sender | Receiver
        if role is Role.PREFILL:
            side = Sender(self.host, self.notify_port)
        else:
            side = Receiver(init_ports, alloc_ports, self.host)
        settings = hand_off_settings(side, buffer_bytes=self.buffer.bytes, backend="UCX", device=self.device)
        return as_variables({"local_cpu": False, **settings, **BACKEND_MODE})


def lmcache_hand_off(
    endpoint: Endpoint,
    machine: Machine,
    model: Path,
    args: Mapping[Role, Sequence[str]],
    *,
    engines: int,
    host: str,
    notify_port: int,
) -> LMCacheHandOff:
    """`args`: each role's flags; `engines`: how many there are in all. Raises EngineError."""
    config = model_config(model)
    ranks = equal_ranks(*(int_flag(args[role], "--tensor-parallel-size") or 1 for role in Role))
    contexts = (int_flag(args[role], "--max-model-len") for role in Role)
    context = min(filter(None, contexts), default=None) or count(config, "max_position_embeddings")
    token = token_size(
        config or None,
        model_names(endpoint),
        tp=ranks,
        kv_cache_dtype=flag_value(args[Role.DECODE], "--kv-cache-dtype"),
    )
    on_cpu = machine.accelerator == "cpu"
    return LMCacheHandOff(
        buffer=receive_buffer(
            token,
            longest=context,
            given=literal_environment(endpoint).get(VARIABLE),
            room=machine.memory_bytes // BUFFER_SHARE // engines if on_cpu else None,
        ),
        step_tokens=int_flag(args[Role.PREFILL], "--max-num-batched-tokens") or hand_off_step(context),
        ranks=ranks,
        host=host,
        notify_port=notify_port,
        device="cpu" if on_cpu else "cuda",
    )
