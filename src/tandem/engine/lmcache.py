"""What engines that hand over through LMCache are told, wherever they run: LMCache's settings, and flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tandem.api import Role
from tandem.engine.args import has_flag, switch, without
from tandem.engine.errors import EngineError
from tandem.engine.kv_size import TokenSize
from tandem.engine.pd_buffer import CHUNK_TOKENS, VARIABLE, PdBuffer, given_bytes, pd_buffer
from tandem.engine.pod_variables import lmcache_variable
from tandem.engine.step_size import MAX_PREFILL_STEP

DEFAULT_STEP_TOKENS = 8192
"""`--max-num-batched-tokens` of prefillers where no context is known: what vLLM takes itself on large GPUs.
It is written out because the router has to know it."""


@dataclass(frozen=True)
class Sender:
    """A prefiller, which tells the router at an address when all KV of a prompt has been sent."""

    proxy_host: str
    proxy_port: int


@dataclass(frozen=True)
class Receiver:
    """A decoder, and where its tensor-parallel ranks take KV: a port of each kind for each."""

    init_ports: Sequence[int]
    alloc_ports: Sequence[int]
    host: str | None = None
    """None: it is said elsewhere."""


def hand_off_settings(
    side: Sender | Receiver, *, buffer_bytes: int, backend: str, device: Literal["cpu", "cuda"]
) -> dict[str, Any]:
    """What makes an engine one half of a hand-off, in LMCache's own terms.

    `pd_backend_mode` is missing: a file must not have it, as LMCache 0.4.3 calls the key unknown. As a
    variable it has to be BACKEND_MODE.
    """
    keys: dict[str, Any] = {
        "chunk_size": CHUNK_TOKENS,
        "save_unfull_chunk": True,
        "use_layerwise": False,
        "enable_pd": True,
        "transfer_channel": "nixl",
        "nixl_backends": [backend],
        "pd_buffer_size": buffer_bytes,
        "pd_buffer_device": device,
    }
    if isinstance(side, Sender):
        return keys | {
            "pd_role": "sender",
            "pd_proxy_host": side.proxy_host,
            "pd_proxy_port": side.proxy_port,
        }
    host = {} if side.host is None else {"pd_peer_host": side.host}
    return keys | {
        "pd_role": "receiver",
        **host,
        "pd_peer_init_port": list(side.init_ports),
        "pd_peer_alloc_port": list(side.alloc_ports),
    }


BACKEND_MODE = {"pd_backend_mode": "sync"}
"""LMCache 0.5's default is async, in which a request without a hand-off kills a prefiller, and aborted ones
fill the receive buffer for good. LMCache 0.4.3 knows no other mode than sync."""


def as_variables(keys: Mapping[str, Any]) -> dict[str, str]:
    """LMCache's settings as variables of the environment, which count for more than its file."""
    return {lmcache_variable(key): _text(value) for key, value in keys.items()}


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def equal_ranks(prefill: int, decode: int) -> int:
    """The tensor-parallel ranks of both roles. Raises EngineError where they differ."""
    if prefill != decode:
        raise EngineError(
            f"spec.pdSpec: prefillers have --tensor-parallel-size {prefill} and decoders {decode}; with "
            "LMCache each rank writes to its own counterpart, so they must be equal"
        )
    return decode


def receive_buffer(
    token: TokenSize, *, longest: int | None, given: str | None, room: int | None = None
) -> PdBuffer:
    """`pd_buffer`, with its variable's text as the resource has it. Raises EngineError."""
    try:
        size = None if given is None else given_bytes(given)
        return pd_buffer(token, longest=longest, given=size, room=room)
    except ValueError as error:
        raise EngineError(f"spec.worker.environmentVariables[{VARIABLE}]: {error}") from None


def hand_off_step(context: int | None) -> int:
    """Tokens that a prefiller computes in one step where no flag says so; `context`: the longest prompt's."""
    return min(context or DEFAULT_STEP_TOKENS, MAX_PREFILL_STEP)


def hand_off_flags(role: Role, args: Sequence[str], step_tokens: int) -> list[str]:
    """A role's flags with what LMCache needs of them: it hands over one step of a prefill at a time and is
    notified of the first, so a prompt has to be one step. A decoder's chunks are freed when they are loaded,
    which what its own prefix cache has never is (LMCache #2933)."""
    if role is Role.PREFILL:
        given = has_flag(args, "--max-num-batched-tokens")
        return [*args, *(() if given else ("--max-num-batched-tokens", str(step_tokens)))]
    if switch(args, "--enable-prefix-caching") is False:
        return list(args)
    return [*without(args, ["--enable-prefix-caching"]), "--no-enable-prefix-caching"]
