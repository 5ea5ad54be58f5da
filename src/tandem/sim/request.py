"""A request inside the engine: what it wants, how far it is, which KV blocks it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from tandem.sim.blocks import Block, HashChain, KvSource


class State(Enum):
    WAITING = "waiting"
    LOADING = "loading"
    """Its blocks are being filled by another engine's KV."""
    RUNNING = "running"
    FINISHED = "finished"


class Finish(Enum):
    """vLLM's finish reasons."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Sampling:
    """What shapes an answer. Token counts are at least 0."""

    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    variant: bytes = b""
    """Set where sampling is not greedy: choices and seeds give different answers, deterministically."""


@dataclass(frozen=True, slots=True)
class Output:
    """One token of an answer, or its end without one (`token` is None)."""

    token: int | None
    finish: Finish | None = None
    stop_reason: int | None = None
    """The stop token that ended it, as vLLM reports it; None for end-of-sequence."""
    first: bool = False


class AnswerStream(Protocol):
    """Where an answer's tokens come from; see `text.Answer`."""

    def next_token(self) -> int: ...


Sink = Callable[["SimRequest", Output], None]
"""Called within the step that made the token."""


@dataclass(slots=True)
class Group:
    """The choices of one prompt: `n` requests, which some metrics count as one."""

    n: int = 1
    finished: int = 0
    longest: int = 0
    """Tokens of the longest answer so far."""


@dataclass(eq=False, slots=True)
class SimRequest:
    """One sequence. `tokens` grows by what is generated; the KV of the first `computed` of them is there."""

    id: str
    prompt: list[int]
    sampling: Sampling
    sink: Sink
    arrival: float
    salt: str | None = None
    lora: str | None = None
    priority: int = 0
    kv_params: dict[str, Any] | None = None
    """The client's kv_transfer_params."""
    group: Group = field(default_factory=Group)

    state: State = State.WAITING
    tokens: list[int] = field(init=False)
    chain: HashChain | None = None
    blocks: list[Block] = field(default_factory=list)
    cached_blocks: int = 0
    """Of `blocks`, how many are in the prefix cache by now."""
    computed: int = 0
    kv: KvSource = field(init=False)
    answer: AnswerStream | None = None
    preemptions: int = 0

    looked_up: bool = False
    """Whether its prefix was looked up in the cache; again after a preemption."""
    kv_unseen: bool = False
    """Whether it holds KV that something else computed and nobody has looked at."""
    local_hit: int = 0
    external: int = 0
    reported_cached: int | None = None
    """Prompt tokens that usage calls cached: after a hand-off, those of the prefiller."""
    kv_reply: dict[str, Any] | None = None
    """kv_transfer_params for the reply."""

    queued: float = 0.0
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.kv = KvSource(self.tokens)

    @property
    def prompt_length(self) -> int:
        return len(self.prompt)

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.prompt)
