"""The seam for KV hand-off kinds: what an engine asks of one, and what it gives it.

A kind is a class made once for each engine. To add one: write the class, name it in `build.KINDS`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tandem.sim.blocks import Block, BlockPool
from tandem.sim.clock import Clock
from tandem.sim.cost import CostProfile
from tandem.sim.request import Finish, SimRequest


@dataclass
class TransferStats:
    """What happened since the engine started, for /metrics."""

    on_transfer: Callable[[float, int, int], None] = lambda seconds, size, pieces: None
    """`size` in bytes; `pieces`: runs of blocks in a layer that lie together."""
    on_failure: Callable[[str], None] = lambda kind: None
    """`kind`: transfer, handshake, notification, expired or late."""


class Host(Protocol):
    """What a hand-off kind sees of its engine."""

    engine_id: str
    pool: BlockPool
    profile: CostProfile
    clock: Clock
    stats: TransferStats
    network: Network
    dead: bool

    def loaded(self, request: SimRequest, *, ok: bool) -> None:
        """The request's blocks are filled, or will not be."""

    def freed(self) -> None:
        """Blocks came free: what waits may go on."""

    def crash(self) -> None:
        """The engine dies, as a real one does of a failed assertion."""

    def fault(self, kind: str, request: SimRequest | None = None) -> bool:
        """Whether a fault of this kind is due now; see `faults`."""

    def fault_value(self, kind: str, request: SimRequest | None = None) -> float:
        """The value of a fault that is due now; 0 where none is."""


class HandOff(Protocol):
    """One engine's side of a way to hand KV over."""

    async def start(self) -> None:
        """Listen to other engines."""

    async def close(self) -> None:
        """Stop at once: what others still wanted is lost."""

    def queued(self, request: SimRequest) -> None:
        """A request arrived."""

    def matched(self, request: SimRequest, local: int) -> int | None:
        """Prompt tokens beyond `local` cached ones whose KV comes from another engine; None: it has to wait.
        Asked again until the request is admitted."""

    def load(self, request: SimRequest, blocks: Sequence[Block]) -> float | None:
        """Fill these blocks (those of the request that no local hit filled). None: it takes a while; call
        `Host.loaded` once. Else it is done by the end of the step, which lasts so many seconds longer."""

    def save(self, work: Sequence[tuple[SimRequest, int]], then: Callable[[], None]) -> None:
        """A step computed so many tokens of these requests. Call `then` when the engine may go on."""

    def finished(self, request: SimRequest, finish: Finish) -> bool:
        """A request ended. True: its blocks stay held until the kind releases them to the pool itself.
        What the reply's kv_transfer_params are goes to `request.kv_reply`."""

    def refused(self, params: Mapping[str, Any]) -> None:
        """A request with these kv_transfer_params was answered with an error before the engine saw it."""

    @property
    def held(self) -> int:
        """What is held for other engines: requests, or chunks of a buffer. 0 when all is over."""

    def details(self) -> dict[str, Any]:
        """What else goes on, for tests and people; see `Engine.state`."""


@dataclass
class Network:
    """Engines of one process, found by where they say they listen. Others are reached over TCP."""

    listeners: dict[tuple[str, int], Any] = field(default_factory=dict)
    """(host, port) of a side channel → the hand-off kind that listens there."""
    notify: Callable[[str, bytes], None] | None = None
    """Takes what engines would send to a router over ZMQ: its URL, the message. None: they do send it."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine in the background until it ends or the network closes."""
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def close(self) -> None:
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


class NoHandOff:
    """An engine without `--kv-transfer-config`: kv_transfer_params mean nothing to it."""

    held = 0

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def queued(self, request: SimRequest) -> None:
        pass

    def matched(self, request: SimRequest, local: int) -> int | None:
        return 0

    def load(self, request: SimRequest, blocks: Sequence[Block]) -> float | None:
        raise AssertionError("nothing is ever matched")

    def save(self, work: Sequence[tuple[SimRequest, int]], then: Callable[[], None]) -> None:
        then()

    def finished(self, request: SimRequest, finish: Finish) -> bool:
        return False

    def refused(self, params: Mapping[str, Any]) -> None:
        pass

    def details(self) -> dict[str, Any]:
        return {}
