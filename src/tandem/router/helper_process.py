"""What takes long with request bodies (to count or to read them) is done in a process of its own, so that the
loop stays free for streams.

One child for the length of the router, started at once or with the first body; bodies wait their turn in a
bounded queue. A child that dies, or takes far too long, is replaced; the body that it had in hand fails with
`Unavailable`, and the caller does without. One that does not live long is not replaced for a while.

Huge bodies take seconds, so they wait for each other alone: there is another child for them, started with
the first one.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import msgspec

from tandem.router.helper_frames import HEADER, MAX_LENGTH, Kind, header

logger = logging.getLogger("tandem.router")

# Bytes read at once from the child: ids of a long prompt are hundreds of kilobytes.
_READ = 2**20

# Bytes of bodies that are handed to the child at once: their ids fit into what is read at once.
_BATCH = 2**16


def command(worker: str, *words: str) -> tuple[str, ...]:
    """How a child that runs a module is started."""
    # -P: a file in the working directory must not stand in for a module.
    return (sys.executable, "-P", "-m", worker, *words)


@dataclass(frozen=True, slots=True)
class Limits:
    """patience: seconds that a body waits for its answer, queue included. longest: seconds that the child
    may take over one; start: to start. lives: seconds that a child must have lived to be replaced at once,
    except the first to die. waiting: bodies in the queue; huge_waiting: in that of the huge ones.
    huge: bytes of a body that is huge."""

    patience: float = 10.0
    longest: float = 20.0
    start: float = 60.0
    lives: float = 60.0
    waiting: int = 256
    huge_waiting: int = 8
    huge: int = 2**20


class Unavailable(Exception):
    """The process cannot do this now."""


class Unusable(Unavailable):
    """What it needs cannot be used, as a tokenizer's files: what is wrong, in which file, what to do."""


class _CannotWork(ValueError):
    """The child said so, and ended."""


@dataclass(slots=True, eq=False)
class _Job:
    kind: Kind
    data: bytes
    answer: asyncio.Future[tuple[Kind, bytes]]


class HelperProcess:
    """A context manager: the process lives as long as the block."""

    def __init__(
        self,
        config: bytes,
        *,
        command: Sequence[str],
        name: str,
        meanwhile: str,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
        waits: bool = False,
    ) -> None:
        """`config`: what the child is told first. `name`: in what is logged; `meanwhile`: what becomes of its
        work while there is none. `waits`: it starts with the first body."""
        self._name = name
        self._meanwhile = meanwhile
        self._waits = waits
        self._huge: HelperProcess | None = None
        self.beyond: HelperProcess | None = None
        """Another, whose process for huge bodies this one shares."""
        self._config = config
        self._command = command
        self._limits = limits or Limits()
        self._clock = clock
        self.answers = 0
        """How many it has given."""
        self._jobs: deque[_Job] = deque()  # the first one is in hand
        self._more = asyncio.Event()
        self._child: Process | None = None
        self._started = 0.0
        self._deaths = 0
        self._not_before = clock()
        self._task: asyncio.Task[None] | None = None
        self._told: bytes | Unavailable = Unavailable(f"{name} has not started")
        self._tried = asyncio.Event()

    async def __aenter__(self) -> Self:
        self.begin()
        return self

    def begin(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the process; nothing of it is left. Bodies that wait get Unavailable."""
        task, self._task = self._task, None  # from here on nothing is asked, and nothing started
        huge, self._huge = self._huge, None
        if huge is not None:
            await huge.aclose()
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        for job in self._jobs:
            if not job.answer.done():
                job.answer.set_exception(Unavailable(f"{self._name} has ended"))

    async def started(self) -> bytes:
        """Wait until the process is ready; what it told then. Raises Unavailable where its first try failed,
        Unusable where another would not help."""
        await self._tried.wait()
        if isinstance(self._told, Unavailable):
            raise self._told
        return self._told

    @property
    def pid(self) -> int | None:
        """The child's, while there is one."""
        return self._child.pid if self._child is not None else None

    async def ask(self, kind: Kind, data: bytes, *, huge: bool = False) -> tuple[Kind, bytes]:
        """The answer to a frame. `huge`: whether it is to wait with those that take long, whatever its size.
        Raises Unavailable."""
        self._check_open()
        worker = self._for_huge() if huge or self.is_huge(data) else self
        return await worker._answer(kind, data)

    def is_huge(self, data: bytes) -> bool:
        """Whether a body waits with those that take long for its size alone."""
        return len(data) >= self._limits.huge

    def _check_open(self) -> None:
        if self._task is None:
            raise Unavailable(f"{self._name} has ended")

    def _for_huge(self) -> HelperProcess:
        if self.beyond is not None:
            return self.beyond._for_huge()
        self._check_open()  # the other's may have ended before this one
        if self._huge is None:
            limits = replace(self._limits, waiting=self._limits.huge_waiting)
            self._huge = HelperProcess(
                self._config,
                command=self._command,
                limits=limits,
                clock=self._clock,
                name=f"{self._name} of huge bodies",
                meanwhile=self._meanwhile,
                waits=True,
            )
            self._huge.begin()
        return self._huge

    async def _answer(self, kind: Kind, data: bytes) -> tuple[Kind, bytes]:
        if len(self._jobs) >= self._limits.waiting:
            raise Unavailable(f"{len(self._jobs)} bodies wait for {self._name}")
        job = _Job(kind, data, asyncio.get_running_loop().create_future())
        self._jobs.append(job)
        self._more.set()
        try:
            async with asyncio.timeout(self._limits.patience):
                return await job.answer
        except TimeoutError:
            raise Unavailable(f"no answer of {self._name} within {self._limits.patience:g} s") from None
        finally:
            self._forget(job)

    def _forget(self, job: _Job) -> None:
        if job in self._jobs:  # to try would cost 3 ms: the error of one that is not there shows the answer
            self._jobs.remove(job)

    async def _run(self) -> None:
        try:
            while True:
                if self._waits:
                    await self._some()
                try:
                    await self._living_child()
                except Unavailable as error:
                    if not self._tried.is_set():
                        self._told = error
                self._tried.set()
                await self._some()
                await self._ask(self._batch())
        finally:
            self._tried.set()
            await self._end_child()

    async def _some(self) -> None:
        """Wait until there is a job."""
        while not self._jobs:
            self._more.clear()
            await self._more.wait()

    def _batch(self) -> list[_Job]:
        """The jobs to hand over now: the first in the queue, and while they are small those behind it, lest
        each wait for a turn of a busy loop."""
        batch: list[_Job] = []
        size = 0
        for job in self._jobs:
            size += len(job.data)
            if batch and size > _BATCH:
                break
            batch.append(job)
        return batch

    async def _ask(self, batch: list[_Job]) -> None:
        """Have the child answer, in their order. Those it has not when it fails get Unavailable."""
        failed: Unavailable | None = None
        try:
            child = await self._living_child()
            async with asyncio.timeout(self._limits.longest):
                for job in batch:
                    _write(child, job.kind, job.data)
                await _drain(child)
            for job in batch:
                async with asyncio.timeout(self._limits.longest):
                    answer = await _receive(child)
                self.answers += 1
                if not job.answer.done():
                    job.answer.set_result(answer)
        except Unavailable as error:
            failed = error
        except (OSError, EOFError, ValueError) as error:  # TimeoutError is an OSError
            await self._bury(error)
            failed = Unavailable(f"{self._name} failed")
        for job in batch:
            if failed is not None and not job.answer.done():
                job.answer.set_exception(Unavailable(str(failed)))
            self._forget(job)

    async def _living_child(self) -> Process:
        """The child, replaced if it is dead. Raises Unavailable."""
        if self._child is not None:
            if self._child.returncode is None:
                return self._child
            await self._bury(EOFError())
        started = self._clock()
        if started < self._not_before:
            raise Unavailable(f"{self._name} does not stay alive")
        self._started = started
        try:
            self._child = child = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=PIPE, limit=_READ
            )
            async with asyncio.timeout(self._limits.start):
                _write(child, Kind.CONFIG, self._config)
                await _drain(child)
                kind, rest = await _receive(child)
            if kind is Kind.UNUSABLE:
                raise _CannotWork(msgspec.json.decode(rest))
            if kind is not Kind.READY:
                raise ValueError(f"{kind.name} came first")
            self._told = rest
        except (OSError, EOFError, ValueError) as error:
            await self._bury(error)
            if isinstance(error, _CannotWork):
                raise Unusable(str(error)) from None
            raise Unavailable(f"{self._name} does not start") from None
        logger.info("%s (%d) is ready after %.2f s", self._name, child.pid, self._clock() - started)
        return child

    async def _bury(self, error: Exception) -> None:
        """After a child's death, or what must be its last fault: note it, and when the next may start."""
        await self._end_child()
        self._deaths += 1
        again = self._deaths > 1 and self._clock() - self._started < self._limits.lives
        self._not_before = self._started + self._limits.lives if again else self._clock()
        if isinstance(error, _CannotWork):
            logger.error("%s cannot work, so %s: %s", self._name, self._meanwhile, error)
            return
        logger.error(
            "%s %s and is %s; meanwhile %s",
            self._name,
            "took too long" if isinstance(error, TimeoutError) else f"died ({type(error).__name__})",
            f"started again after {self._limits.lives:g} s" if again else "started again",
            self._meanwhile,
        )

    async def _end_child(self) -> None:
        """Kill the child if there is one, and wait until nothing of it is left."""
        child, self._child = self._child, None
        if child is None:
            return
        assert child.stdin is not None
        assert child.stdout is not None
        with suppress(ProcessLookupError):
            child.kill()
        child.stdin.close()
        while await child.stdout.read(_READ):
            pass
        await child.wait()


def _write(child: Process, kind: Kind, rest: bytes) -> None:
    assert child.stdin is not None
    child.stdin.write(header(kind, rest))
    child.stdin.write(rest)


async def _drain(child: Process) -> None:
    assert child.stdin is not None
    await child.stdin.drain()


async def _receive(child: Process) -> tuple[Kind, bytes]:
    """Raises EOFError when the child is gone, ValueError for what is no frame."""
    assert child.stdout is not None
    kind, length = HEADER.unpack(await child.stdout.readexactly(HEADER.size))
    if length > MAX_LENGTH:
        raise ValueError(f"a frame of {length} bytes")
    return Kind(kind), await child.stdout.readexactly(length)
