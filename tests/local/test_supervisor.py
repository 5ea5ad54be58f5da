"""What dies or hangs is started again. The processes are real, small ones; the time is the tests' own."""

from __future__ import annotations

import asyncio
import heapq
import os
import signal
import sys
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Literal

import pytest

from tandem.local.errors import LocalError
from tandem.local.proc import Use
from tandem.local.process import Process, ProcessSpec
from tandem.local.reaper import Reaper
from tandem.local.record import ProcessState
from tandem.local.supervisor import Backoff, Member, Supervisor

from .processes import eventually, gone

# Says what is in a file `says`; dies when the file that its argument names is there, with the file's text.
ENGINE = """
import sys, time
from pathlib import Path
print("INFO Initializing a V1 LLM engine", flush=True)
if (says := Path(sys.argv[1]).with_name("says")).exists():
    print(says.read_text(), flush=True)
while not Path(sys.argv[1]).exists():
    time.sleep(0.01)
sys.exit(Path(sys.argv[1]).read_text())
"""


class Time:
    """A clock that a test moves on."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._count = 0

    async def sleep(self, seconds: float) -> None:
        self._count += 1
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self.sleepers, (self.now + seconds, self._count, woken))
        await woken

    @property
    def sleeping(self) -> int:
        """How many wait for it to move on."""
        return sum(not woken.done() for _, _, woken in self.sleepers)

    def is_missed(self, seconds: float) -> None:
        """Whoever sleeps will wake so much later."""
        self.sleepers = [(at + seconds, count, woken) for at, count, woken in self.sleepers]

    async def passes(self, seconds: float) -> None:
        end = self.now + seconds
        while self.sleepers and self.sleepers[0][0] <= end:
            self.now, _, woken = heapq.heappop(self.sleepers)
            if not woken.done():
                woken.set_result(None)
            for _ in range(20):  # what wakes does its work and sleeps again
                await asyncio.sleep(0)
        self.now = end


class Guard(Reaper):
    """A reaper that only listens."""

    def __init__(self) -> None:
        self.groups: set[int] = set()

    def started(self, group: int) -> None:
        self.groups.add(group)

    def ended(self, group: int) -> None:
        self.groups.discard(group)


class World:
    """One supervised engine, and more where a test wants them."""

    def __init__(self, folder: Path) -> None:
        self.die = folder / "die"
        self.says = folder / "says"
        self.time = Time()
        self.guard = Guard()
        self.told: list[str] = []
        self.saved: list[str] = []
        self.status = 200
        """What the engine answers; 0: nothing."""
        self.work = 0.0
        """CPU seconds that it uses in a second."""
        self.read: list[set[int]] = []
        """The process groups whose use was read, each time."""
        self.answers_after: dict[str, float] = {}
        """By URL, seconds."""
        self._folder = folder
        self.members: list[Member] = []
        self.member = self.more()
        self.state = self.member.state
        self._task: asyncio.Task[None] | None = None

    def more(self, role: Literal["prefill", "decode"] = "decode") -> Member:
        """One more engine."""
        number = len(self.members)
        name = f"{role}-{number}"
        state = ProcessState(name=name, role=role, url=f"http://127.0.0.1:{number}", port=1)
        spec = ProcessSpec(name, (sys.executable, "-c", ENGINE, str(self.die)))
        self.members.append(Member(spec, self._folder / f"{name}.log", state, self.guard))
        return self.members[-1]

    async def start(self, hung_after: float = 300.0, *, renews_prefillers: bool = False) -> None:
        for member in self.members:
            await member.start()
            member.become("ready")

        async def health(url: str) -> int:
            if (seconds := self.answers_after.get(url)) is not None:
                await self.time.sleep(seconds)
            return self.status

        def use_of(groups: Collection[int]) -> dict[int, Use]:
            self.read.append(set(groups))
            return {group: Use(cpu_seconds=self.time.now * self.work) for group in groups}

        supervisor = Supervisor(
            self.members,
            tell=self.told.append,
            changed=lambda: self.saved.append(self.state.state),
            hung_after=hung_after,
            renews_prefillers=renews_prefillers,
            health=health,
            use_of=use_of,
            clock=lambda: self.time.now,
            sleep=self.time.sleep,
        )
        self._task = asyncio.create_task(supervisor.run())
        await eventually(self.is_watched)

    def is_watched(self) -> bool:
        """Whether all who watch one, and who keeps logs small, wait for time to pass."""
        return self.time.sleeping == len(self.members) + 1

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for member in self.members:
            await member.stop()

    async def dies(self, why: str = "ValueError: no room") -> None:
        """Let it die, and be told of."""
        count = len(self.told)
        self.die.write_text(why)
        await eventually(lambda: len(self.told) > count)
        self.die.unlink()

    async def restarts(self, after: float) -> None:
        """See that it is started again after so many seconds, and no earlier."""
        await eventually(lambda: self.guard.groups == set() and self.is_watched())
        await self.time.passes(after - 0.01)
        assert self.state.state == "restarting"
        await self.time.passes(0.01)
        await eventually(lambda: self.state.state == "starting" and self.is_watched())

    async def comes_back(self) -> None:
        await self.time.passes(1)
        await eventually(lambda: self.state.state == "ready")


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    yield world
    await world.stop()


async def test_what_dies_is_started_again_and_both_is_told(world: World) -> None:
    await world.start()
    first = world.member.process.pid
    await world.dies()
    assert gone(first)
    assert world.told == [
        f"decode-0 ended with exit code 1: ValueError: no room; restart 1 in 1 s. Its log: {world.member.log}"
    ]
    assert (world.state.state, world.state.restarts) == ("restarting", 1)
    assert world.state.cause == "decode-0 ended with exit code 1: ValueError: no room"
    await world.restarts(after=1)
    assert world.guard.groups == {world.state.pid} != {first}
    assert world.state.restart_at is None
    await world.comes_back()
    assert world.told[1:] == ["decode-0 is back after 1 s (restart 1)"]
    assert world.saved == ["restarting", "restarting", "starting", "ready"]
    await eventually(lambda: world.member.log.read_text().count("Initializing") == 2)
    text = world.member.log.read_text()
    assert text.index("no room") < text.index("==== tandem: restart 1 of decode-0") < text.rindex("INFO")


async def test_one_that_dies_again_and_again_is_started_less_and_less_often(world: World) -> None:
    await world.start()
    for delay in (1, 2, 4, 8, 16, 30, 30):
        await world.dies()
        assert f"in {delay} s" in world.told[-1]
        await world.restarts(after=delay)
    await world.comes_back()
    await world.time.passes(59)
    await world.dies()
    assert "restart 8 in 30 s" in world.told[-1]
    await world.restarts(after=30)
    await world.comes_back()
    await world.time.passes(60)
    await world.dies()
    assert "restart 9 in 1 s" in world.told[-1]


def test_the_time_that_a_start_takes_is_no_time_of_being_up() -> None:
    backoff = Backoff()
    assert [backoff.after(0) for _ in range(3)] == [1, 2, 4]
    assert backoff.after(59.9) == 8
    assert backoff.after(60) == 1


async def test_one_that_cannot_be_started_is_tried_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.start()
    start = Process.start

    async def cannot(*arguments: object, **options: object) -> Process:
        raise LocalError("Cannot start decode-0: too many processes")

    monkeypatch.setattr(Process, "start", cannot)
    await world.dies()
    await world.time.passes(1)
    await eventually(lambda: len(world.told) == 2)
    assert world.told[1].startswith("Cannot start decode-0: too many processes; restart 2 in 2 s.")
    monkeypatch.setattr(Process, "start", start)
    await world.restarts(after=2)
    await world.comes_back()
    assert world.state.cause == "Cannot start decode-0: too many processes"


async def test_when_it_is_started_again_is_known_once_it_has_ended(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that hangs takes its time to end."""
    await world.start()
    stop, may_stop = Process.stop, asyncio.Event()

    async def slow(process: Process) -> None:
        await may_stop.wait()
        await stop(process)

    monkeypatch.setattr(Process, "stop", slow)
    await world.dies()
    assert (world.state.state, world.state.restart_at) == ("restarting", None)
    may_stop.set()
    await eventually(lambda: world.state.restart_at is not None)
    await world.restarts(after=1)


async def test_one_that_neither_answers_nor_works_is_killed_and_started_again(world: World) -> None:
    await world.start(hung_after=100)
    first = world.member.process.pid
    world.status, world.work = 0, 0.12  # more than an idle one's timers
    await world.time.passes(30)
    assert world.state.state == "hung"
    assert world.state.doing.startswith("since ")
    await world.time.passes(65)
    assert world.told == []
    assert not gone(first)
    await world.time.passes(5)
    await eventually(lambda: gone(first))
    assert world.told[0].startswith(
        "decode-0 was hung: for 100 s it neither answered nor worked; restart 1 in 1 s."
    )
    world.status = 200
    await world.restarts(after=1)
    await world.comes_back()


async def test_one_whose_port_for_nixl_is_taken_is_started_again_until_it_has_it(world: World) -> None:
    await world.start()
    world.status, world.work = 0, 0.5
    await world.dies()
    world.says.write_text("zmq.error.ZMQError: Address already in use (addr='tcp://127.0.0.1:1')")
    await world.restarts(after=1)
    await eventually(lambda: "already in use" in world.member.log.read_text())
    await world.time.passes(1)
    await eventually(lambda: len(world.told) == 2)
    assert world.told[1].startswith(
        "decode-0 cannot listen on port 1: it was taken meanwhile (another program); restart 2 in 2 s"
    )
    world.says.unlink()
    await world.restarts(after=2)
    world.status = 200
    await world.comes_back()
    await world.time.passes(100)
    assert (len(world.told), world.state.state) == (3, "ready")


@pytest.mark.parametrize(("status", "work"), [(0, 0.5), (200, 0.0), (503, 0.0)])
async def test_one_that_works_or_answers_is_not_hung(world: World, status: int, work: float) -> None:
    """A prefill step may take minutes, in which an engine answers nothing."""
    await world.start(hung_after=100)
    world.status, world.work = status, work
    await world.time.passes(1000)
    assert (world.told, world.state.state) == ([], "ready")


async def test_one_that_answers_in_time_is_not_hung_any_more(world: World) -> None:
    await world.start(hung_after=100)
    for _ in range(5):
        world.status = 0
        await world.time.passes(90)
        assert world.state.state == "hung"
        world.status = 200
        await world.time.passes(5)
        assert world.state.state == "ready"
    assert world.told == []


async def test_of_the_time_in_which_nobody_looked_nothing_is_known(world: World) -> None:
    """As where `tandem up` was stopped by Ctrl-Z, or a container with all that is in it was frozen."""
    await world.start(hung_after=100)
    world.status = 0
    await world.time.passes(50)
    world.time.is_missed(1000)
    await world.time.passes(1050)
    assert world.told == []
    await world.time.passes(100)
    await eventually(lambda: len(world.told) == 1)
    assert world.told[0].startswith("decode-0 was hung: for 100 s it neither answered nor worked")


async def test_nothing_is_killed_for_hanging_where_that_is_turned_off(world: World) -> None:
    await world.start(hung_after=0)
    world.status = 0
    await world.time.passes(100_000)
    assert (world.told, world.state.state) == ([], "hung")


async def test_a_slow_start_is_no_hanging_while_anything_moves(world: World) -> None:
    await world.start(hung_after=100)
    await world.dies()
    world.status, world.work = 0, 0.001  # weights come from a slow disk
    await world.restarts(after=1)
    await eventually(lambda: world.member.log.read_text().count("Initializing") == 2)
    await world.time.passes(500)
    assert len(world.told) == 1
    assert (world.state.state, world.state.doing) == ("starting", "starting the engine")
    world.work = 0
    await world.time.passes(1)  # the clock of this fake jumps back here
    await world.time.passes(101)
    await eventually(lambda: len(world.told) == 2)
    assert "was hung" in world.told[1]


async def test_all_are_looked_at_together_however_long_each_takes_to_answer(world: World) -> None:
    """To know what one has used, all processes of the machine are read of."""
    for seconds in (0.7, 1.3):
        world.answers_after[world.more().state.url] = seconds
    await world.start()
    await world.time.passes(50)
    assert world.read == [{member.process.pid for member in world.members}] * (1 + 10)


async def test_a_full_log_is_put_aside(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Path] = []
    monkeypatch.setattr("tandem.local.supervisor.keep_small", kept.append)
    await world.start()
    for count in (1, 2):
        await eventually(lambda count=count: len(kept) == count and world.is_watched())  # type: ignore[misc]
        await world.time.passes(5)
    assert set(kept) == {world.member.log}


async def test_prefillers_that_cannot_find_a_decoder_again_are_started_again_one_at_a_time(
    world: World,
) -> None:
    prefillers = [world.more("prefill"), world.more("prefill")]
    await world.start(renews_prefillers=True)
    first = [member.process.pid for member in prefillers]
    os.kill(world.member.process.pid, signal.SIGKILL)
    await eventually(lambda: len(world.told) == 2)
    assert world.told[1].startswith(
        "prefill-1 is to be started again: it cannot find decode-0 again, which was; restart 1 in 1 s."
    )
    assert not gone(first[1])
    for seconds in range(1, 20):
        if prefillers[1].state.restarts:
            break
        assert prefillers[1].process.pid == first[1], seconds
        await world.time.passes(1)
        await asyncio.sleep(0.05)
    assert prefillers[0].state.state == "ready", "the next one waits until this one is back"
    await eventually(lambda: gone(first[1]))
    assert [member.state.restarts for member in (world.member, *prefillers)] == [1, 1, 1]


async def test_where_prefillers_find_a_decoder_again_they_go_on(world: World) -> None:
    prefiller = world.more("prefill")
    await world.start()
    os.kill(world.member.process.pid, signal.SIGKILL)
    await eventually(lambda: len(world.told) == 1)
    await world.time.passes(30)
    assert prefiller.state.restarts == 0


async def test_where_no_thread_can_be_started_logs_are_looked_at_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[Path] = []

    async def no_thread(look: object, log: Path) -> None:
        tries.append(log)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("asyncio.to_thread", no_thread)
    await world.start()
    for count in (1, 2):
        await eventually(lambda count=count: len(tries) == count and world.is_watched())  # type: ignore[misc]
        await world.time.passes(5)
