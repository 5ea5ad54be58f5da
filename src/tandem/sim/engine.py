"""One engine: its scheduler and blocks, stepping through time, and what reaches it from outside."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from tandem.sim import faults
from tandem.sim.blocks import BlockPool
from tandem.sim.clock import Clock
from tandem.sim.cost import CostProfile
from tandem.sim.events import Publisher
from tandem.sim.handoff import HandOff, Network, NoHandOff, TransferStats
from tandem.sim.metrics import Metrics
from tandem.sim.request import Finish, Output, SimRequest, State
from tandem.sim.scheduler import Limits, Scheduler, Step
from tandem.sim.text import Answer, Style

logger = logging.getLogger("tandem.sim")

# How far steps may lag behind the clock before the engine lets the lost time go. A late timer must not make
# every step late; a process that cannot keep up must not try to catch up for ever.
_MAX_LAG = 0.05


class EngineDead(Exception):
    """The engine crashed. Worded as vLLM's EngineDeadError."""

    def __init__(self) -> None:
        super().__init__("EngineCore encountered an issue. See stack trace (above) for the root cause.")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What an engine is."""

    limits: Limits
    blocks: int
    block_size: int
    prefix_caching: bool
    recompute_failed_loads: bool = False
    """`kv_load_failure_policy: recompute`; else a failed load is the request's failure."""


class Engine:
    """Give it requests with `add`; their sinks are called as tokens come. Close it in the end."""

    def __init__(
        self,
        settings: EngineSettings,
        profile: CostProfile,
        style: Style,
        metrics: Metrics,
        *,
        clock: Clock,
        network: Network,
        make_handoff: Callable[[Engine], HandOff] = lambda engine: NoHandOff(),
        publisher: Publisher | None = None,
        on_crash: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine_id = str(uuid4())
        self.settings = settings
        self.profile = profile
        self.style = style
        self.metrics = metrics
        self.clock = clock
        self.network = network
        self.publisher = publisher
        self.faults = faults.Faults()
        self.stats = TransferStats(metrics.transfer, metrics.transfer_failed)
        self.pool = BlockPool(
            settings.blocks,
            settings.block_size,
            caching=settings.prefix_caching,
            events=publisher is not None,
        )
        self.handoff = make_handoff(self)
        self.scheduler = Scheduler(
            settings.limits,
            self.pool,
            matched=self.handoff.matched,
            load=self.handoff.load,
            connector=not isinstance(self.handoff, NoHandOff),
        )
        self.requests: dict[str, SimRequest] = {}
        self.dead = False
        self.wrong_kv = 0
        """Requests that were answered from another prompt's KV."""
        self._on_crash = on_crash
        self._timer: asyncio.TimerHandle | None = None
        self._kicked: asyncio.Handle | None = None
        self._saving = False
        """Whether a step is computed and the hand-off has the engine wait."""
        self._busy_until = -math.inf
        """The end of the step before this one, as the cost model has it; in the past forever when idle."""

    async def start(self) -> None:
        """Raises OSError when the hand-off's port cannot be had."""
        await self.handoff.start()

    async def close(self) -> None:
        self._stop()
        await self.handoff.close()
        if self.publisher is not None:
            self.publisher.close()

    # From outside

    def add(self, request: SimRequest) -> None:
        """Queue a request. Raises EngineDead."""
        if self.dead:
            raise EngineDead
        request.queued = self.clock.now()
        self.requests[request.id] = request
        self.handoff.queued(request)
        self.scheduler.add(request)
        self.kick()

    def abort(self, request: SimRequest) -> None:
        """The client left, or has what it wanted. Does nothing to a finished request."""
        if request.id in self.requests:
            self._end(request, Finish.ABORT)
            self.kick()

    def stop(self, request: SimRequest) -> None:
        """The frontend found a stop string: the request ended by itself."""
        if request.id in self.requests:
            self._end(request, Finish.ABORT)
            self.metrics.finished(request, Finish.STOP, self.clock.now())
            self.kick()

    def kick(self) -> None:
        """Something changed: begin the next step if none is under way."""
        if self._timer is None and self._kicked is None and not self._saving and not self.dead:
            self._kicked = asyncio.get_running_loop().call_soon(self._begin)

    def report(self) -> None:
        """Bring the metrics' gauges up to date."""
        s = self.scheduler
        self.metrics.scheduler(len(s.running), len(s.waiting), len(s.loading), self.pool.usage, s.counters)

    def state(self) -> dict[str, Any]:
        """What is going on inside, for tests and people."""
        s = self.scheduler
        return {
            "engine_id": self.engine_id,
            "dead": self.dead,
            "running": len(s.running),
            "waiting": len(s.waiting),
            "loading": len(s.loading),
            "leases": self.handoff.held,
            "free_blocks": self.pool.free,
            "blocks": self.pool.size - 1,
            "wrong_kv": self.wrong_kv,
            **self.handoff.details(),
        }

    # For the hand-off kind (`handoff.Host`)

    def loaded(self, request: SimRequest, *, ok: bool) -> None:
        if not ok and not self.settings.recompute_failed_loads:
            logger.error(
                "Failing 1 request(s) due to KV load failure (failure_policy=fail, %d tokens affected). "
                "Request IDs: %s",
                request.external,
                {request.id},
            )
            self._fail(request)
        else:
            if not ok:
                logger.warning("Recovered from KV load failure: 1 request(s) rescheduled (%s)", request.id)
                request.kv_unseen = bool(request.local_hit)
            self.scheduler.loaded(request, ok=ok)
        self.kick()

    def freed(self) -> None:
        self.kick()

    def crash(self) -> None:
        if self.dead:
            return
        self._stop()
        logger.error("EngineCore died")
        for request in list(self.requests.values()):
            self._end(request, Finish.ABORT)
            request.sink(request, Output(None, Finish.ABORT))
        self.network.spawn(self.handoff.close())
        self._on_crash()

    def fault(self, kind: str, request: SimRequest | None = None) -> bool:
        leg = faults.leg_of(request.kv_params) if request is not None else "decode"
        return self.faults.due(kind, request.id if request is not None else None, leg)

    def fault_value(self, kind: str, request: SimRequest | None = None) -> float:
        leg = faults.leg_of(request.kv_params) if request is not None else "decode"
        return self.faults.value(kind, request.id if request is not None else None, leg)

    # Stepping

    def _begin(self) -> None:
        if self._kicked is not None:  # a stop string within a step kicks too; there is one step at a time
            self._kicked.cancel()
            self._kicked = None
        if self.dead or self.scheduler.idle:
            self._busy_until = -math.inf
            self._publish()
            return
        step = self.scheduler.schedule()
        self._publish()
        now = self.clock.now()
        for request in step.admitted:
            if request.scheduled is None:
                request.scheduled = now
        if not step.work:
            self._busy_until = -math.inf
            if step.preempted:
                self.kick()
            return
        seconds = self.profile.step_seconds(step.chunks(), step.contexts()) * self.faults.slowness
        seconds += step.loading
        start = self._busy_until if now - self._busy_until < _MAX_LAG else now
        self._busy_until = start + seconds
        self._timer = self.clock.at(self._busy_until, lambda: self._finish(step))

    def _finish(self, step: Step) -> None:
        self._timer = None
        computed = self.clock.now()
        due = self.scheduler.computed(step)
        self._saving = True
        self.handoff.save(step.work, lambda: self._deliver(step, due, computed))

    def _deliver(self, step: Step, due: list[SimRequest], computed: float) -> None:
        """The step's KV is saved, its tokens come out. `computed`: when they were there."""
        self._saving = False
        if self.dead:
            return
        now = self.clock.now()
        self._busy_until += now - computed
        prompt_tokens = 0
        for request in due:
            if request.state is State.RUNNING:  # not aborted meanwhile
                prompt_tokens += self._generate(request, now)
        self.metrics.step(prompt_tokens + len(due), len(due), len(step.preempted))
        self._begin()

    def _generate(self, request: SimRequest, now: float) -> int:
        """Give a request its next token. Returns the prompt tokens computed for it, once."""
        if request.answer is None:
            foreign = request.kv.taint
            self.wrong_kv += bool(foreign)
            request.answer = Answer(
                self.style,
                request.tokens,
                variant=request.sampling.variant,
                foreign=foreign,
                at_least=request.sampling.min_tokens,
            )
        token = request.answer.next_token()
        request.tokens.append(token)
        computed, first = 0, request.first_token is None
        if request.first_token is None or request.last_token is None:
            request.first_token = now
            if request.reported_cached is None:
                request.reported_cached = request.local_hit + request.external
            computed = request.prompt_length - request.local_hit - request.external
            self.metrics.first_token(request, now)
        else:
            self.metrics.next_token(now - request.last_token)
        request.last_token = now
        finish, reason = self._finish_of(request, token)
        if finish is not None:
            self._end(request, finish)
            self.metrics.finished(request, finish, now)
        request.sink(request, Output(token, finish, reason, first))
        return computed

    def _finish_of(self, request: SimRequest, token: int) -> tuple[Finish | None, int | None]:
        sampling = request.sampling
        generated = request.generated
        if generated >= sampling.min_tokens:
            if token == self.style.eos and not sampling.ignore_eos:
                return Finish.STOP, None
            if token in sampling.stop_token_ids:
                return Finish.STOP, token
        full = len(request.tokens) >= self.settings.limits.max_model_len
        return (Finish.LENGTH if full or generated >= sampling.max_tokens else None), None

    def _end(self, request: SimRequest, finish: Finish) -> None:
        """Take a request out and let go of its blocks, unless they are held for another engine."""
        self.scheduler.remove(request)
        del self.requests[request.id]
        if not self.handoff.finished(request, finish):
            self.pool.release(request.blocks)
        self.faults.forget(request.id)

    def _fail(self, request: SimRequest) -> None:
        self._end(request, Finish.ERROR)
        self.metrics.failed(request, self.clock.now())
        self.metrics.finished(request, Finish.ERROR, self.clock.now())
        request.sink(request, Output(None, Finish.ERROR))

    def _publish(self) -> None:
        if self.publisher is not None and self.pool.events:
            self.publisher.publish(self.clock.wall(), self.pool.take_events())

    def _stop(self) -> None:
        self.dead = True
        for handle in (self._timer, self._kicked):
            if handle is not None:
                handle.cancel()
        self._timer = self._kicked = None
