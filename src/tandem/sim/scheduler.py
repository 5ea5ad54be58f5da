"""Which tokens the next step computes, as vLLM's V1 scheduler chooses them. Pure: no clock, no I/O.

Running requests come first, in the order they were admitted, then waiting ones, first come, first served,
each as far as the step's token budget goes. A prompt larger than what is left is cut into chunks. When blocks
run out, the request admitted last gives its own back and starts over (preemption).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tandem.sim.blocks import Block, BlockPool, HashChain, foreign_kv
from tandem.sim.request import SimRequest, State


@dataclass(frozen=True, slots=True)
class Limits:
    """Named as vLLM's flags are."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    """Tokens of one prompt in one step at most, while others wait; 0: no such limit."""
    reserve_full_isl: bool = True
    """A prompt is admitted only when all of it fits."""
    priority: bool = False
    """The lowest number goes first, instead of the first come."""


@dataclass(slots=True)
class Step:
    """What one step computes."""

    work: list[tuple[SimRequest, int]] = field(default_factory=list)
    """(request, tokens of it)."""
    loading: float = 0.0
    """Seconds that the engine spends in it on KV of other engines."""
    preempted: list[SimRequest] = field(default_factory=list)
    admitted: list[SimRequest] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.work)

    def chunks(self) -> list[tuple[int, int]]:
        """(tokens, context before them) of what computes prompt tokens; see `CostProfile.step_seconds`."""
        return [(n, r.computed) for r, n in self.work if n > 1 or r.computed < r.prompt_length - 1]

    def contexts(self) -> list[int]:
        """Tokens of context of each stream that computes its next token."""
        return [r.computed for r, n in self.work if n == 1 and r.computed >= r.prompt_length - 1]


@dataclass(slots=True)
class CacheCounters:
    """Tokens looked up and found at admission, as vLLM counts them (not after preemptions)."""

    queries: int = 0
    hits: int = 0
    external_queries: int = 0
    external_hits: int = 0


class Scheduler:
    """`matched(request, local)` says how many prompt tokens beyond the local hit another engine has, None to
    wait; `load(request, blocks)` fills blocks with them: see `handoff.HandOff`."""

    def __init__(
        self,
        limits: Limits,
        pool: BlockPool,
        *,
        matched: Callable[[SimRequest, int], int | None] = lambda request, local: 0,
        load: Callable[[SimRequest, Sequence[Block]], float | None] = lambda request, blocks: None,
        connector: bool = False,
    ) -> None:
        self.limits = limits
        self.pool = pool
        self.running: list[SimRequest] = []
        self.waiting: deque[SimRequest] = deque()
        self.loading: dict[str, SimRequest] = {}
        self.counters = CacheCounters()
        self._matched = matched
        self._load = load
        self._connector = connector

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    def add(self, request: SimRequest) -> None:
        request.chain = HashChain(self.pool.block_size, request.salt, request.lora)
        if self.pool.caching:
            request.chain.extend(request.tokens)
        self._enqueue(request)

    def remove(self, request: SimRequest) -> None:
        """Take a request out, wherever it is. Its blocks stay its own."""
        if request.state is State.RUNNING:
            self.running.remove(request)
        elif request.state is State.WAITING:
            self.waiting.remove(request)
        elif request.state is State.LOADING:
            del self.loading[request.id]
        request.state = State.FINISHED

    def loaded(self, request: SimRequest, *, ok: bool) -> None:
        """The KV of a loading request arrived, or (`ok` false) it is to compute its prompt itself."""
        del self.loading[request.id]
        request.state = State.WAITING
        if ok:
            self._cache(request, request.computed)
            # All of it is there; the last token is computed again for its successor.
            request.computed = min(request.computed, len(request.tokens) - 1)
        else:
            request.computed = request.local_hit
        self.waiting.appendleft(request)

    def schedule(self) -> Step:
        """The next step; empty when nothing can be computed now."""
        step = Step()
        budget = self._schedule_running(step, self.limits.max_num_batched_tokens)
        if not step.preempted:
            self._schedule_waiting(step, budget)
        return step

    def computed(self, step: Step) -> list[SimRequest]:
        """The step is done: note its KV. Returns the requests that have their next token now, in order."""
        due = []
        size = self.pool.block_size
        for request, tokens in step.work:
            if request.state is not State.RUNNING:
                continue  # aborted meanwhile
            start = request.computed
            if request.kv_unseen:
                request.kv_unseen = False
                request.kv.taint = foreign_kv(request.blocks, request.tokens, start, size)
            request.computed = end = start + tokens
            for i in range(start // size, (end - 1) // size + 1):
                block = request.blocks[i]
                block.source, block.start = request.kv, i * size
                block.filled = min(size, end - i * size)
            if end == len(request.tokens):
                due.append(request)
        return due

    # Running

    def _schedule_running(self, step: Step, budget: int) -> int:
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            tokens = self._chunk(len(request.tokens) - request.computed, budget)
            if not self._make_room(request, tokens, step):
                break
            step.work.append((request, tokens))
            if step.preempted:  # by priority, of those before this one too
                budget = self.limits.max_num_batched_tokens - step.tokens
                index = self.running.index(request) + 1
            else:
                budget -= tokens
                index += 1
        return budget

    def _make_room(self, request: SimRequest, tokens: int, step: Step) -> bool:
        """Blocks for the next tokens, preempting others, and in the end itself. False: it was preempted."""
        while not self._extend(request, request.computed + tokens):
            victim = self._victim()
            self.running.remove(victim)
            step.work = [(r, n) for r, n in step.work if r is not victim]
            self.pool.release(victim.blocks)
            victim.blocks, victim.cached_blocks, victim.computed = [], 0, 0
            victim.looked_up = victim.kv_unseen = False
            victim.preemptions += 1
            victim.state = State.WAITING
            self.waiting.appendleft(victim)
            step.preempted.append(victim)
            if victim is request:
                return False
        return True

    def _victim(self) -> SimRequest:
        if self.limits.priority:
            return max(self.running, key=lambda r: (r.priority, r.arrival))
        return self.running[-1]

    # Waiting

    def _schedule_waiting(self, step: Step, budget: int) -> None:
        while budget > 0 and self.waiting and len(self.running) < self.limits.max_num_seqs:
            request = self.waiting[0]
            if not request.looked_up:
                hit, external = self._look_up(request)
                if external is None:
                    break
                local = len(hit) * self.pool.block_size
                tokens = 0 if external else self._admissible(len(request.tokens) - local, budget)
                if not (external or tokens) or not self._fits(request, hit, local + tokens, external):
                    break
                self._admit(request, hit, external)
                if external:
                    self.waiting.popleft()
                    self._start_loading(request, step)
                    continue
            else:
                tokens = self._admissible(len(request.tokens) - request.computed, budget)
                if not tokens:
                    break
            if not self._extend(request, request.computed + tokens):
                break
            self.waiting.popleft()
            request.state = State.RUNNING
            self.running.append(request)
            step.work.append((request, tokens))
            step.admitted.append(request)
            budget -= tokens

    def _look_up(self, request: SimRequest) -> tuple[list[Block], int | None]:
        """The cached prefix, not held yet, and how many tokens after it others have (None: to wait)."""
        assert request.chain is not None
        hit = self.pool.hit(request.chain.hashes, len(request.tokens))
        if request.preemptions:
            return hit, 0
        return hit, self._matched(request, len(hit) * self.pool.block_size)

    def _admissible(self, tokens: int, budget: int) -> int:
        """How many of a prompt's remaining tokens the step takes; 0: none, as prompts may not be cut."""
        tokens = self._chunk(tokens, tokens)
        return min(tokens, budget) if self.limits.chunked_prefill or tokens <= budget else 0

    def _fits(self, request: SimRequest, hit: list[Block], tokens: int, external: int) -> bool:
        if self.limits.reserve_full_isl or external:
            tokens = len(request.tokens)
        free = self.pool.free - (self._promised() if external else 0)
        return self.pool.needed(tokens, len(hit)) + self.pool.hit_costs(hit) <= free

    def _admit(self, request: SimRequest, hit: list[Block], external: int) -> None:
        local = len(hit) * self.pool.block_size
        self.pool.hold(hit)
        request.blocks = hit
        request.cached_blocks = len(hit)
        request.computed = local
        request.looked_up = True
        request.kv_unseen = bool(local or external)
        if request.preemptions == 0:
            request.local_hit, request.external = local, external
            self.counters.queries += len(request.tokens) if self.pool.caching else 0
            self.counters.hits += local
            if self._connector:
                self.counters.external_queries += len(request.tokens) - local
                self.counters.external_hits += external

    def _promised(self) -> int:
        """Blocks that running prompts still need: a load must not take them, or neither could go on."""
        return sum(
            self.pool.needed(r.prompt_length, len(r.blocks))
            for r in self.running
            if r.computed < r.prompt_length
        )

    def _start_loading(self, request: SimRequest, step: Step) -> None:
        hit = len(request.blocks)
        request.computed = request.local_hit + request.external
        request.blocks = request.blocks + self.pool.allocate(self.pool.needed(request.computed, hit))
        request.state = State.LOADING
        self.loading[request.id] = request
        seconds = self._load(request, request.blocks[hit:])
        if seconds is not None:  # in this very step, which it can be part of
            step.loading += seconds
            self.loaded(request, ok=True)

    # Both

    def _chunk(self, tokens: int, budget: int) -> int:
        threshold = self.limits.long_prefill_token_threshold
        if threshold and len(self.running) + len(self.waiting) > 1:
            tokens = min(tokens, threshold)
        return min(tokens, budget)

    def _extend(self, request: SimRequest, tokens: int) -> bool:
        """Have blocks for the request's first `tokens` tokens, and enter full ones into the cache."""
        needed = self.pool.needed(tokens, len(request.blocks))
        if needed:
            if needed > self.pool.free:
                return False
            request.blocks.extend(self.pool.allocate(needed))
        self._cache(request, tokens)
        return True

    def _cache(self, request: SimRequest, tokens: int) -> None:
        full = tokens // self.pool.block_size
        if full > request.cached_blocks and self.pool.caching:
            assert request.chain is not None
            self.pool.cache(
                request.blocks,
                request.chain.extend(request.tokens),
                request.cached_blocks,
                full,
                request.tokens,
                salt=request.salt,
                lora=request.lora,
            )
            request.cached_blocks = full

    def _enqueue(self, request: SimRequest) -> None:
        if not self.limits.priority:
            self.waiting.append(request)
            return
        at = next(
            (
                i
                for i, r in enumerate(self.waiting)
                if (r.priority, r.arrival) > (request.priority, request.arrival)
            ),
            len(self.waiting),
        )
        self.waiting.insert(at, request)
